"""Tiles of exact decode: pure functions of shapes and dtypes, never of values. No bit depends on them."""

from __future__ import annotations

from typing import NamedTuple

from replayssm.ssd.configs import TERMS, padded

_MULTIPROCESSORS = 132
_MOST_SHARED = 216 << 10  # bytes that the programs on a multiprocessor share, with some room


def chunk_rows(chunk_size: int) -> int:
    """Rows of a tile that holds a chunk.

    Never 64: with one head in four warps, Triton 3.6 then spreads the sums of the chunk wrongly over the warps of the
    one matrix instruction that covers 64 rows (seen on an H200). Rows behind the chunk change no bit.

    Args:
        chunk_size: Q.
    """
    rows = padded(chunk_size)
    return 128 if rows == 64 else rows


class StepTile(NamedTuple):
    """How the step in one launch cuts a head.

    Attributes:
        rows: rows (head dim) of a program.
        fold_rows: rows that a program handles at a time where a chunk is folded or crossed.
        fold_tokens: ring rows of one product there.
        columns: columns (state dim) of one product of B and C.
        warps: warps of a program.
        registers: most registers of a thread, or None.
    """

    rows: int
    fold_rows: int
    fold_tokens: int
    columns: int
    warps: int
    registers: int | None


def step_tile(headdim: int, dstate: int, chunk_size: int, input_bytes: int, heads: int) -> StepTile:
    """Tile of the step in one launch.

    Args:
        headdim: P.
        dstate: N.
        chunk_size: Q.
        input_bytes: bytes of one element of x.
        heads: heads of all lanes together.
    """
    if input_bytes == 4:
        rows = min(32, padded(headdim))
        return StepTile(rows, rows, min(TERMS, chunk_rows(chunk_size)), min(TERMS, padded(dstate)), 4, None)
    most = 64 if dstate <= 128 else 32
    while most > 16 and heads * -(-headdim // most) * 2 <= _MULTIPROCESSORS:
        most //= 2  # programs of fewer rows, as long as each still has a multiprocessor to itself
    rows, columns = min(most, padded(headdim)), padded(dstate)
    if 2 * chunk_rows(chunk_size) * columns > _MOST_SHARED // 2:
        columns = 64  # all of B's rows would not fit beside the state
    return StepTile(rows, rows, min(32, chunk_rows(chunk_size)), columns, 4, None)


class BatchTile(NamedTuple):
    """How the two kernels of a step for many lanes cut the work.

    Attributes:
        prepare_rows: rows of a chunk of which a program of the first kernel forms products.
        prepare_heads: heads whose new rows it stores.
        prepare_columns: columns (state dim) of one product of B and C.
        prepare_registers: most registers of a thread there, or None.
        heads: heads of a group that a program of the second kernel streams.
        fold_rows: rows (head dim) of a program where a chunk is folded or crossed.
        fold_tokens: ring rows of one product there.
        workers: programs that take the lanes that fold or cross.
        moved: lanes that they look at together.
        warps: warps of a program of the second kernel.
        registers: most registers of a thread there, or None.
        stages: loads in flight where there are loops over blocks.
        apart: whether the workers have a launch of their own, the third, as they would take registers from the others.
    """

    prepare_rows: int
    prepare_heads: int
    prepare_columns: int
    prepare_registers: int | None
    heads: int
    fold_rows: int
    fold_tokens: int
    workers: int
    moved: int
    warps: int
    registers: int | None
    stages: int
    apart: bool


def batch_tile(
    headdim: int, dstate: int, chunk_size: int, input_bytes: int, tokens: int, lanes: int, nheads: int
) -> BatchTile | None:
    """Tile of the step in two launches; None where one launch is faster, or two do not fit.

    Args:
        headdim: P.
        dstate: N.
        chunk_size: Q.
        input_bytes: bytes of one element of x.
        tokens: T.
        lanes: R.
        nheads: H.
    """
    if input_bytes == 4:
        return _fp32_batch_tile(headdim, dstate, chunk_size, tokens, lanes * nheads)
    if lanes * nheads <= 512:
        return None
    rows, columns = chunk_rows(chunk_size), padded(dstate)
    held = [  # bytes in shared memory: states in fp32, rows of x, and the two operands with a column for every token
        padded(heads * headdim) * (4 * columns + 2 * rows) + 2 * padded(heads * tokens) * (columns + rows)
        for heads in (1, 2)
    ]
    if held[0] > _MOST_SHARED:
        return None
    heads = 2 if 2 * held[1] <= _MOST_SHARED else 1  # two programs on a multiprocessor, if possible
    return BatchTile(
        min(64, rows), 8 if rows <= 128 else 4, min(128, columns), 64, heads, min(32, padded(headdim)), min(64, rows),
        128, 256, 4 * heads, 128, 3, False,
    )  # fmt: skip


def _fp32_batch_tile(headdim: int, dstate: int, chunk_size: int, tokens: int, heads: int) -> BatchTile | None:
    """Two launches are faster whatever the number of lanes: in one, every head would multiply B and C anew."""
    if padded(headdim) > 128 or tokens > 32:
        return None
    columns, rows = min(TERMS, padded(dstate)), min(TERMS, padded(chunk_size))
    prepare_rows, warps = min(64, chunk_rows(chunk_size)), 2 if headdim <= 32 else 4
    return BatchTile(prepare_rows, 8, columns, None, 1, 16, rows, 128, 256, warps, None, 3, heads > 512)
