"""``replayssm.ssd`` as the paper writes it: one token after the other, in fp64. The truth of every other path.

``docs/maths.md`` §1. Inputs are taken as they are and nothing is rounded in between.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.recurrence import advance, process_dt, read_out
from replayssm.ssd.requests import plan


def chunk_scan(
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
    """See ``replayssm.ssd.chunk_scan``."""
    num_rows = 0 if x_buffer is None else x_buffer.shape[1]
    for row, slot, start, buffered, first, length, boundary in plan(
        cu_seqlens, batch_indices, num_buffered, ring_start, num_rows, x.shape[0], chunk_size
    ):
        S = x.new_zeros(*x.shape[1:], B.shape[2], dtype=torch.float64)
        if initial_states is not None:
            S = initial_states[row].double()
        last = S
        for t in range(buffered + length):
            old = t < buffered
            if old:
                assert x_buffer is not None and dt_buffer is not None and B_buffer is not None
                at = slot, (start + t) % num_rows
                token = x_buffer[at], dt_buffer[at], B_buffer[at]
            else:
                token = x[first + t - buffered], dt[first + t - buffered], B[first + t - buffered]
            S = advance(S, token[0], process_dt(token[1], dt_bias, dt_softplus, dt_min, dt_max), A, token[2])
            if not old:
                new = first + t - buffered
                out[new] = read_out(S, x[new], C[new], D, None if z is None else z[new]).to(out.dtype)
            if (t + 1) % chunk_size == 0:
                last = S
                if chunk_states is not None and not old:
                    chunk_states[boundary] = S
                boundary += not old
        if boundary_states is not None:
            boundary_states[row] = last
        if final_states is not None:
            final_states[row] = S
