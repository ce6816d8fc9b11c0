"""Tiles of the Mamba-2 kernels: pure functions of shapes and dtypes, never of values."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """How the step kernel cuts the state of one request: into blocks of rows, some of which make a program.

    Attributes:
        rows: rows of a block; a head has ``ceil(headdim / rows)`` blocks.
        blocks: blocks of a program: 1, or those of some heads of one group.
        fold_rows: rows that a fold handles at a time; they are fp32 in registers.
        folds: folds of a round, which share what belongs to the head.
        stages: blocks in flight, that is read ahead into shared memory, where nothing is folded.
        fold_stages: pieces of ``fold_rows`` in flight in a fold.
        warps: warps of a program.
        registers: most registers of a thread, so that enough programs fit; None leaves it to the compiler.
    """

    rows: int
    blocks: int
    fold_rows: int
    folds: int
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


def state_planes(dstate: int, state_bytes: int) -> int:
    """Tiles of columns in which a state is folded: 4 for 8-bit codes, which may come as words of four columns."""
    return 4 if state_bytes == 1 and dstate % 4 == 0 and dstate > 32 else 1


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
    """Tile of ``checkpointing_ssu``. No result depends on the choice: these tiles compute the rows of a product alike.

    Not every tile would: with fp32 inputs, several heads per program give other bits than one.

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
        return Tile(32, 1, 32, 1, 1, 1, 4, None)
    light = input_bytes == 2 and window <= 16 and dstate <= 128
    if state_bytes == 1:
        # Several heads a program gave outputs off by 0.6 % where int8 codes leave a tile partly empty (20 x 36, Triton
        # 3.6; why is not known), one head was right. With 64 x 128 all tiles have been compared.
        light = light and dstate == 128 and headdim % 64 == 0
    wanted = 1 if heads < 1024 or not light else 2 if heads <= 4096 else 8 if state_bytes == 1 and heads > 16384 else 4
    together = next(count for count in (8, 4, 2, 1) if count <= wanted and heads_per_group % count == 0)
    if together == 1:
        return Tile(rows, 1, rows, 1, 1, 1, 4, 128 if light and seq_len == 1 else None)
    fold_rows = min(rows, 32)
    # A second fp32 block would take shared memory from other programs; many tokens leave no registers for two.
    folds = rows // fold_rows if state_bytes == 2 and seq_len <= 4 else 1
    stages, fold_stages = 3 if state_bytes <= 2 else 2, 3 if together == 8 else 2
    return Tile(rows, together * parts, fold_rows, folds, stages, fold_stages, 2, 168)


def requests_in_order(batch: int, heads: int, state_bytes: int, blocks: int, seq_len: int) -> tuple[int, int]:
    """Requests that programs put in order, 0 for none, and how many that do not flush follow each one that does.

    Every program looks at the cursors of the whole batch for that. It pays where many flush, or where few programs run.

    Args:
        batch: requests.
        heads: batch times heads.
        state_bytes: bytes of one element of the state.
        blocks: blocks of a program.
        seq_len: T.
    """
    if blocks == 1 or batch > 256 or (state_bytes == 2 and heads > 16384 and seq_len == 1):
        return 0, 0
    between = 0 if seq_len == 1 else 1 if state_bytes == 1 else 2
    return 128 if batch <= 128 else 256, between


class MaterializeTile(NamedTuple):
    """How the materialize kernel cuts its work.

    Attributes:
        program_rows: rows of a head's state that one program owns.
        fold_rows: rows that a fold handles at a time.
        stages: blocks of fold_rows in flight.
        copy_rows: rows that a copy moves at a time.
        programs: programs that a launch has at most; each takes the requests in turn.
        warps: warps of a program.
        registers: most registers of a thread, so that enough programs fit; None leaves it to the compiler.
    """

    program_rows: int
    fold_rows: int
    stages: int
    copy_rows: int
    programs: int
    warps: int
    registers: int | None


def materialize_tile(headdim: int, dstate: int, state_bytes: int) -> MaterializeTile:
    """Tile of ``replayssm_materialize``.

    Args:
        headdim: P.
        dstate: N.
        state_bytes: bytes of one element of the state.
    """
    rows = max(16, min(64, next_power_of_2(headdim)))
    if state_bytes == 4:
        return MaterializeTile(rows, rows, 1, rows, 1 << 14, 4 if rows == 64 else 2, None)
    if state_bytes == 2:
        copy_rows = max(1, min(rows, 2048 // state_columns(dstate)))  # 4 KB: memory is used best with as little
        return MaterializeTile(rows, 16, min(3, rows // 16), copy_rows, 1 << 14, 2, 128)
    # Folds of codes that come as words wait for instructions: with 32 rows each they take a fifth fewer.
    return MaterializeTile(rows, min(rows, 32), 2, rows, 1 << 14, 2, 168)
