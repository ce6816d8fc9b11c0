"""Tiles of the Mamba-2 kernels: pure functions of shapes and dtypes, never of values."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """How the step kernel cuts the state of one request: into blocks of rows, some of which make a program.

    Attributes:
        rows: rows of a block; a head has ``ceil(headdim / rows)`` blocks.
        blocks: blocks of a program: 1, or those of some heads of one group.
        fold_rows: rows that a fold handles at a time; they are fp32 in registers.
        stages: blocks in flight, that is read ahead into shared memory, where nothing is folded.
        fold_stages: pieces of ``fold_rows`` in flight in a fold.
        warps: warps of a program.
        registers: most registers of a thread, so that enough programs fit; None leaves it to the compiler.
    """

    rows: int
    blocks: int
    fold_rows: int
    stages: int
    fold_stages: int
    warps: int
    registers: int | None


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below ``number`` (at least 1)."""
    return 1 << (number - 1).bit_length()


def window_rows(window: int) -> int:
    """Rows of the tile that holds a window; 16 is the shortest reduction axis of a matrix instruction."""
    return max(16, next_power_of_2(window))


def state_columns(dstate: int) -> int:
    """Columns of a state's tile."""
    return max(16, next_power_of_2(dstate))


def step_tile(
    headdim: int,
    dstate: int,
    state_bytes: int,
    input_bytes: int,
    seq_len: int,
    window: int,
    heads_per_group: int,
    heads: int,
) -> Tile:
    """Tile of ``checkpointing_ssu``. No result depends on it: rows of a product are computed alike in every tile.

    A small batch has one program per block, which reads its state before it knows the cursors. A large one has a few
    heads per program, which share what the group shares and read the next head's state while they work on one.

    Args:
        headdim: P.
        dstate: N.
        state_bytes: bytes of one element of the state.
        input_bytes: bytes of one element of x.
        seq_len: T.
        window: most rows that may be replayed.
        heads_per_group: heads that share B and C.
        heads: batch times heads.
    """
    rows = max(16, min(64 if dstate <= 128 else 32, next_power_of_2(headdim)))
    parts = -(-headdim // rows)
    if input_bytes == 4 and heads * parts <= 66 and rows > 32:  # half of an H200's multiprocessors would idle
        return Tile(32, 1, 32, 1, 1, 4, None)
    light = input_bytes == 2 and window <= 16 and dstate <= 128
    wanted = 1 if heads < 1024 or not light else 2 if heads <= 4096 else 8 if state_bytes == 1 and heads > 16384 else 4
    together = next(count for count in (8, 4, 2, 1) if count <= wanted and heads_per_group % count == 0)
    if together == 1:
        return Tile(rows, 1, rows, 1, 1, 4, 128 if light and seq_len == 1 else None)
    if together == 8 and seq_len > 1:
        return Tile(rows, together * parts, rows, 3, 2, 2, None)
    return Tile(rows, together * parts, min(rows, 32), 3 if state_bytes <= 2 else 2, 3 if together == 8 else 2, 2, 168)


def requests_in_order(batch: int, heads: int, state_bytes: int, blocks: int) -> int:
    """Requests that programs put in order, those that flush first, so that no long program starts last; 0 for none.

    Every program looks at the cursors of the whole batch for that. On an H200 it gained 8 % at 16384 heads of bf16 and
    lost 1.5 % at 32768; fp32 and the 8-bit types, whose flushes take longer, gained at both.

    Args:
        batch: requests.
        heads: batch times heads.
        state_bytes: bytes of one element of the state.
        blocks: blocks of a program.
    """
    if blocks == 1 or batch > 256 or (state_bytes == 2 and heads > 16384):
        return 0
    return 128 if batch <= 128 else 256


class MaterializeTile(NamedTuple):
    """How the materialize kernel cuts its work.

    Attributes:
        program_rows: rows of a head's state that one program owns.
        fold_rows: rows that a fold handles at a time.
        stages: blocks of fold_rows in flight.
        programs: programs that a launch has at most; each takes the requests in turn.
        warps: warps of a program.
    """

    program_rows: int
    fold_rows: int
    stages: int
    programs: int
    warps: int


def materialize_tile(headdim: int, dstate: int, state_bytes: int) -> MaterializeTile:
    """Tile of ``replayssm_materialize``.

    Args:
        headdim: P.
        dstate: N.
        state_bytes: bytes of one element of the state.
    """
    rows = max(16, min(64, next_power_of_2(headdim)))
    if state_bytes == 4:
        return MaterializeTile(rows, rows, 1, 1 << 14, 4 if rows == 64 else 2)
    return MaterializeTile(rows, 16, min(4, rows // 16), 1 << 14, 2)
