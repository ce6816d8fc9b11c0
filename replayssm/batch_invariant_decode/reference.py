"""``replayssm.batch_invariant_decode`` token by token in fp64: the truth up to rounding."""

from __future__ import annotations

from torch import Tensor

from replayssm.batch_invariant_decode.requests import plan, plan_rows
from replayssm.batch_invariant_decode.storage import commit, masked_update_rows, refresh, store_tails
from replayssm.recurrence import advance, process_dt, read_out

__all__ = ["commit", "decode_rows", "masked_update_rows", "refresh", "step", "store_tails"]


def step(
    ssm_state: Tensor,
    x_rows: Tensor,
    z_rows: Tensor | None,
    dt_rows: Tensor,
    B_rows: Tensor,
    C_rows: Tensor | None,
    num_buffered: Tensor,
    ring_start: Tensor | None,
    target_rows: Tensor,
    chunk_flags: Tensor,
    out: Tensor,
    shadow: Tensor | None,
    arrivals: Tensor | None,
    sums: Tensor | None,
    num_summed: Tensor | None,
    x: Tensor,
    z: Tensor | None,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    batch_indices: Tensor,
    chunk_size: int,
    most_live: int,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
) -> None:
    """See ``batch_invariant_decode_buffered_scan``."""
    num_rows = x_rows.shape[1]
    lanes = plan(batch_indices, num_buffered, ring_start, num_rows, most_live)
    out.zero_()
    target_rows.fill_(-1)
    chunk_flags.zero_()
    pairs = [(x_rows, x), (z_rows, z), (dt_rows, dt), (B_rows, B), (C_rows, C)]
    for lane, slot, start, live in lanes:
        S = ssm_state[slot].double()
        target_rows[lane] = live - chunk_size if live >= chunk_size else live
        for t in range(live + x.shape[1]):
            row, new = (start + t) % num_rows, t - live
            if new >= 0:
                for rows, values in pairs:
                    if rows is not None and values is not None:
                        rows[slot, row] = values[lane, new]
            token = x_rows[slot, row], process_dt(dt_rows[slot, row], dt_bias, dt_softplus, dt_min, dt_max)
            S = advance(S, token[0], token[1], A, B_rows[slot, row])
            if new >= 0:
                gate = None if z is None else z[lane, new]
                out[lane, new] = read_out(S, token[0], C[lane, new], D, gate).to(out.dtype)
            if t + 1 == chunk_size and (ring_start is None or t < live):
                ssm_state[slot] = S
                if shadow is not None:
                    shadow[slot] = S
                chunk_flags[lane] = 1
        if num_summed is not None:
            num_summed[slot] = 0
        if ring_start is None:
            num_buffered[slot] = (live + 1) % chunk_size
        elif live >= chunk_size:
            ring_start[slot], num_buffered[slot] = (start + chunk_size) % num_rows, live - chunk_size


def decode_rows(
    initial_states: Tensor,
    out: Tensor,
    x: Tensor,
    z: Tensor | None,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    chunk_starts: Tensor,
    slots: Tensor,
    target_rows: Tensor,
    chunk_flags: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
) -> None:
    """See ``replayssm.batch_invariant_decode._mamba_chunk_scan_decode_rows``."""
    lanes = plan_rows(chunk_starts, slots, target_rows, x.shape[0], initial_states.shape[0], chunk_size)
    for lane, start, slot, row in lanes:
        S = initial_states[slot].double()
        for t in range(start, start + row + 1):
            S = advance(S, x[t], process_dt(dt[t], dt_bias, dt_softplus, dt_min, dt_max), A, B[t])
        t = start + row
        out[lane] = read_out(S, x[t], C[t], D, None if z is None else z[t]).to(out.dtype)
        if bool(chunk_flags[lane]):
            initial_states[slot] = S
