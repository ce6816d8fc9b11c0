"""Tiles of exact decode: pure functions of shapes and dtypes, never of values. No bit depends on them."""

from __future__ import annotations

from typing import NamedTuple

from replayssm.ssd.configs import padded


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


def step_tile(headdim: int, dstate: int, input_bytes: int) -> StepTile:
    """Tile of the step in one launch.

    Args:
        headdim: P.
        dstate: N.
        input_bytes: bytes of one element of x.
    """
    if input_bytes == 4:  # fp32 products run without matrix units
        return StepTile(16, 16, 16, min(32, padded(dstate)), 4, None)
    rows = min(64 if dstate <= 128 else 32, padded(headdim))
    return StepTile(rows, min(rows, 16), 32, min(64, padded(dstate)), 4, None)


class BatchTile(NamedTuple):
    """How the two kernels of a step for many lanes cut the work.

    Attributes:
        heads: heads of a program of the first kernel.
        prepare_columns: columns (state dim) of one product of B and C.
        prepare_registers: most registers of a thread there, or None.
        rows: rows (head dim) of a head that a program of the second kernel has.
        columns: columns of the state in one product; their loads are all in flight together.
        fold_rows: rows that a program handles at a time where a chunk is folded or crossed.
        tokens: ring rows of one product.
        warps: warps of a program of the second kernel.
        registers: most registers of a thread there, or None.
    """

    heads: int
    prepare_columns: int
    prepare_registers: int | None
    rows: int
    columns: int
    fold_rows: int
    tokens: int
    warps: int
    registers: int | None


def batch_tile(
    headdim: int, dstate: int, chunk_size: int, input_bytes: int, tokens: int, lane_heads: int
) -> BatchTile | None:
    """Tile of the step in two launches; None where one launch is faster.

    Args:
        headdim: P.
        dstate: N.
        chunk_size: Q.
        input_bytes: bytes of one element of x.
        tokens: T.
        lane_heads: lanes times heads.
    """
    if input_bytes == 4 or lane_heads < 512:
        return None
    rows = min(64 if dstate <= 128 else 32, padded(headdim))
    small = chunk_size <= 128
    return BatchTile(
        8, min(64 if small else 32, padded(dstate)), 128 if small else None, rows, min(64, padded(dstate)),
        min(rows, 16), 32, 4, 96 if tokens == 1 else 128,
    )  # fmt: skip
