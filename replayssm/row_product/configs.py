"""How the product is cut. The order of a sum follows from the number of inputs alone; a tile changes no result."""

from __future__ import annotations

from typing import NamedTuple

# Inputs of one step of a sum.
BLOCK = 64
# Bytes of shared memory that the widest tile takes: Hopper has them.
WIDE = 196608
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


def tile(rows: int, columns: int, depth: int, bf16: bool, wide: bool) -> Tile:
    """Tile of ``row_product``.

    Few rows are bound by reading the weight: it takes enough programs, each with some blocks in flight. Many rows are
    bound by the matrix units and by bringing x to them in its parts: it takes wide tiles.

    Args:
        rows: rows of x.
        columns: outputs.
        depth: inputs.
        bf16: whether the weight is, which then takes three products of bf16 and not of TF32.
        wide: whether a multiprocessor has ``WIDE`` bytes of shared memory for a program.
    """
    parts = num_parts(depth)
    height = max(16, min(64, 1 << (rows - 1).bit_length()))
    if parts == 1:
        height, width = _small(rows, columns, height)
        return Tile(height, width, False, 3, 4)
    height, width, warps = _wide(rows, columns, bf16) if wide else (height, 64, 4)
    programs = -(-rows // height) * -(-columns // width)
    return Tile(height, width, programs < _ENOUGH, 3, warps)


def _small(rows: int, columns: int, most: int) -> tuple[int, int]:
    """Rows and columns of a program where the inputs are one part, as in small models: the largest of which are enough.

    Args:
        rows: rows of x.
        columns: outputs.
        most: rows of a program at most.
    """
    for height, programs in ((most, 200), (min(32, most), 90)):
        if -(-rows // height) * -(-columns // 64) >= programs:
            return height, 64
    return 32, 16


def _wide(rows: int, columns: int, bf16: bool) -> tuple[int, int, int]:
    """Rows, columns and warps of a program where there is enough work."""
    if rows <= 16:
        return (16, 128 if bf16 and columns >= 4096 else 64, 4)
    if rows <= 32:
        return (32, 64, 4)
    if rows <= 64:
        return (64, 128, 8)
    return (64, 256, 8) if bf16 else (128, 128, 8)
