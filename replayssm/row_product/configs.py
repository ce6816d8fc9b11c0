"""Tile of the product: a pure function of shapes. What the bits depend on follows from the weight's shape alone."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """How the kernel cuts its work.

    Attributes:
        columns: outputs of a program.
        depth: inputs of one step of the sum.
        rows: rows of a program; no result depends on it.
        stages: steps in flight.
        warps: warps of a program.
    """

    columns: int
    depth: int
    rows: int
    stages: int
    warps: int


def tile(rows: int, columns: int, weight_bytes: int) -> Tile:
    """Tile of ``row_product``.

    Few rows are bound by reading the weight: as many programs as the device has multiprocessors, and some blocks of the
    weight in flight in each.

    Args:
        rows: rows of x.
        columns: outputs.
        weight_bytes: bytes of one element of the weight.
    """
    wide = 64 if columns >= 6144 else 32 if columns >= 3072 else 16
    together = 16 if rows <= 16 else 32 if rows <= 32 else 64
    depth = 128 if weight_bytes == 2 or wide < 64 else 64
    return Tile(wide, depth, together, 4 if together < 64 else 3, 4)
