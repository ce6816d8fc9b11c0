"""Tiles of the scan's kernels: pure functions of shapes and dtypes, never of values. No bit depends on them.

That holds because an element of a 16-bit product is summed over the reduction axis in ascending blocks of 16, whatever
tile it lies in (``docs/numerics.md`` §5). ``TERMS`` and the cumulative sum are exceptions, without a choice.
"""

from __future__ import annotations

from typing import NamedTuple

# Terms of an fp32 product that are summed in the matrix unit, which rounds towards zero, before they are added to what
# came before. The bits of prefill and decode depend on it.
TERMS = 32
_PROGRAMS = 128  # about as many as a large GPU has multiprocessors
_HOPPER = 227 << 10  # bytes of shared memory that a program may take there


def padded(number: int) -> int:
    """The smallest power of two that is at least ``number`` and 16, the shortest axis of a matrix product."""
    return max(16, 1 << (number - 1).bit_length())


class StateTile(NamedTuple):
    """How the states kernel cuts a head's state.

    Attributes:
        rows: rows of the state (head dim) of a program.
        columns: columns (state dim) of a program.
        tokens: tokens of one product.
        warps: warps of a program.
        stages: loads in flight.
    """

    rows: int
    columns: int
    tokens: int
    warps: int
    stages: int


def state_tile(chunk_size: int, headdim: int, dstate: int, input_bytes: int, heads: int, shared: int) -> StateTile:
    """Tile of the kernel that walks over the chunks of a sequence with one head's state.

    Args:
        chunk_size: Q.
        headdim: P.
        dstate: N.
        input_bytes: bytes of an element of x.
        heads: heads of all sequences.
        shared: bytes of shared memory that a program may take.
    """
    if input_bytes == 4:
        return StateTile(min(64, padded(headdim)), min(32, padded(dstate)), min(TERMS, padded(chunk_size)), 4, 3)
    rows, columns, tokens = min(64, padded(headdim)), min(64, padded(dstate)), padded(chunk_size)
    if tokens > 128 or shared < _HOPPER:
        return StateTile(rows, columns, min(64, tokens), 4, 2)
    programs = heads * -(-headdim // rows) * -(-dstate // columns)
    return StateTile(rows, columns, tokens, 4, 4 if programs <= _PROGRAMS else 3)


class ScanTile(NamedTuple):
    """How the kernels that compute outputs cut a chunk; its columns (head dim) are the state tile's rows.

    Attributes:
        rows: output rows of a program.
        tokens: tokens of one product in the form with one head.
        states: columns of the state in one product.
        heads: heads of a program, all of one group, which share ``C_t B_j`` in registers; 0 for the form with one head,
            which reads them from memory.
        warps: warps of a program.
        registers: most registers of a thread, or None.
        stages: loads in flight.
    """

    rows: int
    tokens: int
    states: int
    heads: int
    warps: int
    registers: int | None
    stages: int


def scan_tile(
    chunk_size: int, headdim: int, dstate: int, input_bytes: int, heads_per_group: int, chunk_groups: int, shared: int
) -> ScanTile:
    """Tile of the kernel that computes outputs.

    Args:
        chunk_size: Q.
        headdim: P.
        dstate: N.
        input_bytes: bytes of an element of x.
        heads_per_group: heads of a group.
        chunk_groups: groups of all chunks.
        shared: bytes of shared memory that a program may take.
    """
    if input_bytes == 4:
        tokens = min(TERMS, padded(chunk_size))
        return ScanTile(tokens, tokens, min(TERMS, padded(dstate)), 0, 4, 128, 2)
    rows = padded(chunk_size)
    if dstate > 128 or shared < _HOPPER:
        return ScanTile(min(64, rows), min(64, rows), min(128, padded(dstate)), 0, 4, None, 2)
    heads = min(16, heads_per_group)
    while heads > 1 and chunk_groups * -(-heads_per_group // heads) * -(-headdim // 64) < _PROGRAMS:
        heads = (heads + 1) // 2
    return ScanTile(min(128, rows), min(128, rows), padded(dstate), heads, 4 if rows <= 64 else 8, None, 3)
