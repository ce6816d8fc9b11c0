"""How the product is cut. The order of a sum follows from the number of inputs alone; a tile changes no result."""

from __future__ import annotations

from typing import NamedTuple

# Inputs of one step of a sum.
BLOCK = 64


def num_parts(depth: int) -> int:
    """Parts into which the inputs are cut, each with a sum of its own."""
    return 4 if depth >= 1024 else 2 if depth >= 512 else 1


class Tile(NamedTuple):
    """How the kernel cuts its work.

    Attributes:
        rows: rows of a program.
        columns: outputs of a program.
        together: whether the parts of the inputs go side by side.
        stages: blocks of every part that are in flight.
        warps: warps of a program.
    """

    rows: int
    columns: int
    together: bool
    stages: int
    warps: int


def tile(rows: int, columns: int, depth: int) -> Tile:
    """Tile of ``row_product``.

    Few rows are bound by reading the weight: enough programs for all multiprocessors, and some blocks of the weight in
    flight in each.

    Args:
        rows: rows of x.
        columns: outputs.
        depth: inputs.
    """
    if rows > 32:
        wide = 64 if columns >= 1024 else 32
        return Tile(64, wide, False, 3, 4)
    wide = 32 if columns >= 4096 else 16
    together = 16 if rows <= 16 else 32
    return Tile(together, wide, True, 3 if num_parts(depth) > 2 else 4, 4)
