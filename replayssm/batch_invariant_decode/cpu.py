"""``replayssm.batch_invariant_decode`` on the CPU: one lane after the other, by the arithmetic of ``replayssm.ssd``."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.batch_invariant_decode.requests import plan, plan_rows
from replayssm.batch_invariant_decode.storage import commit, masked_update_rows, refresh, store_tails, write_rows
from replayssm.ssd.arithmetic import Chunk, Parameters, Rows, build, finish, fold, parameters, ring_rows, score

__all__ = ["commit", "decode_rows", "masked_update_rows", "refresh", "step", "store_tails"]


class _Slot:
    """The rows of one slot and its state."""

    def __init__(self, rows: Rows, state: Tensor, chunk_size: int, shared: Parameters) -> None:
        self.rows = rows
        self.state = state
        self.chunk_size = chunk_size
        self.shared = shared
        self.shadow: Tensor | None = None

    def close(self, boundary: Tensor) -> None:
        """Make ``boundary`` the slot's state."""
        self.state.copy_(boundary)
        if self.shadow is not None:
            self.shadow.copy_(boundary)

    def chunk(self, start: int, count: int) -> Chunk:
        """The chunk of ``count`` rows from ring row ``start`` on."""
        return build(ring_rows(self.rows, start, count), self.chunk_size, self.shared)

    def verify(self, start: int, live: int, C: Tensor) -> tuple[Tensor, Tensor | None]:
        """Outputs of the rows behind the live ones, without skip and gate, and the next boundary's state if reached."""
        count, Q = C.shape[0], self.chunk_size
        inside = min(count, Q - live)
        chunk = self.chunk(start, live + inside)
        y = score(chunk, self.state if self.shadow is None else self.shadow.float(), C[:inside], live)
        if chunk.length < Q:
            return y, None
        boundary = fold(self.state, chunk)
        if inside < count:
            later = score(self.chunk(start + Q, count - inside), boundary, C[inside:], 0)
            y = torch.cat((y, later))
        return y, boundary


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
    """See ``batch_invariant_decode_buffered_scan``; with ``ring_start`` folds are lazy and no token is committed."""
    lanes = plan(batch_indices, num_buffered, ring_start, x_rows.shape[1], most_live)
    shared = parameters(A, D, dt_bias, dt_softplus, dt_min, dt_max)
    out.zero_()
    target_rows.fill_(-1)
    chunk_flags.zero_()
    pairs = [(x_rows, x), (z_rows, z), (dt_rows, dt), (B_rows, B), (C_rows, C)]
    for lane, number, start, live in lanes:
        slot = _Slot(Rows(x_rows[number], dt_rows[number], B_rows[number]), ssm_state[number], chunk_size, shared)
        slot.shadow = None if shadow is None else shadow[number]
        if ring_start is not None and live >= chunk_size:
            slot.close(fold(slot.state, slot.chunk(start, chunk_size)))
            start, live = (start + chunk_size) % x_rows.shape[1], live - chunk_size
            ring_start[number], num_buffered[number], chunk_flags[lane] = start, live, 1
        for rows, values in pairs:
            if rows is not None and values is not None:
                write_rows(rows[number], start + live, values[lane])
        y, boundary = slot.verify(start, live, C[lane])
        out[lane] = finish(y, x[lane], shared.D, None if z is None else z[lane])
        target_rows[lane] = live
        if num_summed is not None:
            num_summed[number] = 0  # a GPU keeps sums, and sums its own
        if ring_start is None:
            num_buffered[number] = live + 1 if boundary is None else 0
            if boundary is not None:
                slot.close(boundary)
                chunk_flags[lane] = 1


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
    shared = parameters(A, D, dt_bias, dt_softplus, dt_min, dt_max)
    flags = chunk_flags.tolist()
    for lane, start, number, row in lanes:
        token = slice(start + row, start + row + 1)
        state = initial_states[number]
        chunk = build([Rows(x, dt, B).part(start, row + 1)], chunk_size, shared)
        y = finish(score(chunk, state, C[token], row), x[token], shared.D, None if z is None else z[token])
        out[lane] = y[0]
        if flags[lane]:
            state.copy_(fold(state, chunk))
