"""Tiles of exact decode: pure functions of shapes and dtypes, never of values. No bit depends on them."""

from __future__ import annotations

from typing import NamedTuple

from replayssm.ssd.configs import padded


class PrepareTile(NamedTuple):
    """How the first kernel of a step forms ``C_t B_j``; its heads and warps are the cumulative sum's.

    Attributes:
        columns: columns (state dim) of one product.
        registers: most registers of a thread, or None.
    """

    columns: int
    registers: int | None


def prepare_tile(chunk_size: int, dstate: int, input_bytes: int) -> PrepareTile:
    """Tile of the kernel that prepares a step."""
    if input_bytes == 4 or chunk_size > 128:
        return PrepareTile(min(32, padded(dstate)), None)
    return PrepareTile(min(64, padded(dstate)), 128)


class StepTile(NamedTuple):
    """How the step kernel cuts the state of one head.

    Attributes:
        rows: rows (head dim) of a program.
        fold_rows: rows that a program handles at a time where a chunk is folded or crossed.
        tokens: ring rows of one product.
        warps: warps of a program.
        stages: loads in flight.
        registers: most registers of a thread, so that enough programs fit; None leaves it to the compiler.
    """

    rows: int
    fold_rows: int
    tokens: int
    warps: int
    stages: int
    registers: int | None


def step_tile(headdim: int, dstate: int, input_bytes: int, tokens: int, heads: int) -> StepTile:
    """Tile of the step.

    Args:
        headdim: P.
        dstate: N.
        input_bytes: bytes of one element of x.
        tokens: T.
        heads: lanes times heads.
    """
    if input_bytes == 4:  # fp32 products run without matrix units
        return StepTile(16, 16, 16, 4, 1, None)
    rows = min(64 if dstate <= 128 else 32, padded(headdim))
    return StepTile(rows, min(rows, 16), 32, 4, 2, 128 if tokens == 1 else 168)
