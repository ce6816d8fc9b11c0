"""Tiles of exact decode: pure functions of shapes and dtypes, never of values. No bit depends on them."""

from __future__ import annotations

from typing import NamedTuple

from replayssm.ssd.configs import padded


class StepTile(NamedTuple):
    """How the step kernel cuts the state of one head.

    Attributes:
        rows: rows (head dim) of a program.
        fold_rows: rows that a program handles at a time where a chunk is folded or crossed.
        tokens: ring rows of one product.
        warps: warps of a program.
        stages: loads in flight.
    """

    rows: int
    fold_rows: int
    tokens: int
    warps: int
    stages: int


def step_tile(headdim: int, dstate: int, input_bytes: int, heads: int) -> StepTile:
    """Tile of the step.

    Args:
        headdim: P.
        dstate: N.
        input_bytes: bytes of one element of x.
        heads: lanes times heads.
    """
    if input_bytes == 4:  # fp32 products run without matrix units
        return StepTile(16, 16, 16, 4, 1)
    rows = min(64 if dstate <= 128 else 32, padded(headdim))
    return StepTile(rows, min(rows, 32), 32, 4, 2)
