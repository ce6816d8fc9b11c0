"""How the product is cut. The order of a sum follows from the number of inputs alone; a tile changes no result."""

from __future__ import annotations

from typing import NamedTuple

# Inputs of one step of a sum.
BLOCK = 64
# Programs that keep the multiprocessors of a large device busy.
_ENOUGH = 264


def num_parts(depth: int) -> int:
    """Parts into which the inputs are cut, each with a sum of its own."""
    return 8 if depth >= 2048 else 4 if depth >= 1024 else 1


class Tile(NamedTuple):
    """How the kernel cuts its work.

    Attributes:
        rows: rows of a program.
        columns: outputs of a program.
        split: whether every part of the inputs has programs of its own.
        stages: blocks in flight.
        warps: warps of a program.
    """

    rows: int
    columns: int
    split: bool
    stages: int
    warps: int


def tile(rows: int, columns: int, depth: int) -> Tile:
    """Tile of ``row_product``.

    Few rows are bound by reading the weight: it takes enough programs, each with some blocks in flight.

    Args:
        rows: rows of x.
        columns: outputs.
        depth: inputs.
    """
    parts = num_parts(depth)
    height = 16 if rows <= 16 else 32 if rows <= 32 else 64
    width = 16 if height < 64 and parts == 1 and columns < 4096 else 64
    programs = -(-rows // height) * -(-columns // width)
    return Tile(height, width, parts > 1 and programs < _ENOUGH, 3, 4)
