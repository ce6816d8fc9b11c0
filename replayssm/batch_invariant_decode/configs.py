"""Tiles of exact decode: pure functions of shapes and dtypes, never of values. No bit depends on them."""

from __future__ import annotations

from typing import NamedTuple

from replayssm.ssd.configs import padded


class StepTile(NamedTuple):
    """How the step kernel cuts the heads of a lane.

    Attributes:
        heads: heads of a program, all of one group, which share ``B_j C_t``.
        rows: rows (head dim) of each that a program has.
        fold_rows: rows that a program handles at a time where a chunk is folded or crossed.
        fold_tokens: ring rows of one product there.
        columns: columns (state dim) of one product of B and C.
        warps: warps of a program.
        stages: heads in flight.
        registers: most registers of a thread, so that enough programs fit; None leaves it to the compiler.
    """

    heads: int
    rows: int
    fold_rows: int
    fold_tokens: int
    columns: int
    warps: int
    stages: int
    registers: int | None


def step_tile(headdim: int, dstate: int, input_bytes: int, tokens: int, heads_per_group: int, heads: int) -> StepTile:
    """Tile of the step.

    Args:
        headdim: P.
        dstate: N.
        input_bytes: bytes of one element of x.
        tokens: T.
        heads_per_group: heads that share B and C.
        heads: lanes times heads.
    """
    if input_bytes == 4:  # fp32 products run without matrix units
        return StepTile(1, 16, 16, 16, min(32, padded(dstate)), 4, 1, None)
    rows = min(64 if dstate <= 128 else 32, padded(headdim))
    columns = min(64, padded(dstate))
    together = min(4, heads_per_group) if heads >= 1024 else 1
    together = 1 << (together.bit_length() - 1)
    return StepTile(together, rows, min(rows, 16), 32, columns, 4, 1 if together == 1 else 2, None)
