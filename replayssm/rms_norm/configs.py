"""Tile of the normalisation: a pure function of the number of channels, on which alone the order of a sum depends."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """How the kernel cuts its work: a program has one row.

    Attributes:
        channels: a power of two that all channels fit into.
        warps: warps of a program.
    """

    channels: int
    warps: int


def tile(channels: int) -> Tile:
    """Tile for rows of ``channels`` channels."""
    padded = 1 << max(channels - 1, 0).bit_length()
    return Tile(padded, min(max(padded // 512, 1), 8))
