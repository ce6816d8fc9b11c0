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
    return StateTile(rows, min(64, padded(dstate)), min(64, padded(chunk_size)), 4, 3)


class ScanTile(NamedTuple):
    """How the scan kernel cuts a chunk of one head.

    Attributes:
        rows: output rows of a program, and tokens of one product.
        columns: columns (head dim) of a program.
        states: columns of the state in one product.
        warps: warps of a program.
        stages: loads in flight.
    """

    rows: int
    columns: int
    states: int
    warps: int
    stages: int


def scan_tile(chunk_size: int, headdim: int, dstate: int, input_bytes: int) -> ScanTile:
    """Tile of the kernel that computes outputs."""
    if input_bytes == 4:
        return ScanTile(16, min(32, padded(headdim)), 16, 4, 1)
    return ScanTile(min(64, padded(chunk_size)), min(64, padded(headdim)), min(128, padded(dstate)), 4, 2)
