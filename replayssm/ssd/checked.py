"""The checked mode (``REPLAYSSM_CHECK=1``): read everything a call will read, and refuse what cannot be right."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.checks import check_finite
from replayssm.ssd.requests import plan


def check_parameters(A: Tensor, D: Tensor | None, dt_bias: Tensor | None) -> None:
    """Raise ValueError when a parameter holds a number that is not finite."""
    for name, parameter in {"A": A, "D": D, "dt_bias": dt_bias}.items():
        if parameter is not None:
            check_finite(name, parameter, "")


def check_rows(rings: dict[str, Tensor | None], slot: int, start: int, count: int) -> None:
    """Raise ValueError when one of a slot's live rows holds a number that is not finite."""
    for name, ring in rings.items():
        if ring is not None:
            rows = (start + torch.arange(count, device=ring.device)) % ring.shape[1]
            check_finite(name, ring[slot][rows], f" of the live rows of slot {slot}")


def check_values(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    cu_seqlens: Tensor | None,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    initial_states: Tensor | None,
    x_buffer: Tensor | None,
    dt_buffer: Tensor | None,
    B_buffer: Tensor | None,
    num_buffered: Tensor | None,
    ring_start: Tensor | None,
    batch_indices: Tensor | None,
    out: Tensor,
    final_states: Tensor | None,
    boundary_states: Tensor | None,
    chunk_states: Tensor | None,
) -> None:
    """Raise ValueError for a bound, slot or cursor out of range, a slot used twice, or a number that is not finite.

    The arguments are those of ``cpu.chunk_scan``; memory that the call does not read is not looked at.
    """
    num_rows = 0 if x_buffer is None else x_buffer.shape[1]
    sequences = plan(cu_seqlens, batch_indices, num_buffered, ring_start, num_rows, x.shape[0], chunk_size)
    check_parameters(A, D, dt_bias)
    rings = {"x_buffer": x_buffer, "dt_buffer": dt_buffer, "B_buffer": B_buffer}
    for sequence in sequences:
        if initial_states is not None:
            check_finite("initial_states", initial_states[sequence.row], f" of sequence {sequence.row}")
        check_rows(rings, sequence.slot, sequence.start, sequence.buffered)
        own = slice(sequence.first, sequence.first + sequence.length)
        for name, tensor in {"x": x, "dt": dt, "B": B, "C": C, "z": z}.items():
            if tensor is not None:
                check_finite(name, tensor[own], f" of sequence {sequence.row}")
