"""Tiles of the scan's kernels: pure functions of shapes and dtypes, never of values. No bit depends on them.

That holds because an element of a product is summed over the reduction axis in ascending blocks of 16, whatever tile it
lies in (``docs/numerics.md`` §5). The cumulative sum is the exception, and has no choice of tile.
"""

from __future__ import annotations

from typing import NamedTuple


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


def state_tile(chunk_size: int, headdim: int, dstate: int, input_bytes: int) -> StateTile:
    """Tile of the kernel that walks over the chunks of a sequence with one head's state."""
    if input_bytes == 4:  # fp32 products run without matrix units
        return StateTile(min(32, padded(headdim)), min(32, padded(dstate)), 16, 4, 1)
    rows = min(64, padded(headdim))
    return StateTile(rows, min(64, padded(dstate)), min(128, padded(chunk_size)), 4, 2)


class ScanTile(NamedTuple):
    """How the kernels that compute outputs cut a chunk; its columns (head dim) are the state tile's rows.

    Attributes:
        rows: output rows of a program, and where it has one head, tokens of one product.
        states: columns of the state in one product.
        heads: heads of a program, all of one group: with more than one they share ``C_t B_j``.
        warps: warps of a program.
        stages: loads in flight.
        registers: most registers of a thread, or None.
    """

    rows: int
    states: int
    heads: int
    warps: int
    stages: int
    registers: int | None


def scan_tile(chunk_size: int, headdim: int, dstate: int, input_bytes: int, heads_per_group: int) -> ScanTile:
    """Tile of the kernel that computes outputs."""
    if input_bytes == 4:
        return ScanTile(16, 16, 1, 4, 1, None)
    rows = min(64, padded(chunk_size))
    if chunk_size <= 128 and dstate <= 128 and heads_per_group > 1:
        return ScanTile(rows, padded(dstate), min(8, heads_per_group), 4, 2, None)
    return ScanTile(rows, min(128, padded(dstate)), 1, 4, 2, None)
