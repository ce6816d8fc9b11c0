"""``replayssm.mamba`` as the paper writes it: one token after the other, in fp64. The truth of every other path.

``docs/maths.md`` §1. The records are what the rings hold (x and B in their own type, the processed dt in fp32); all
arithmetic between them and the stored results is fp64.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from replayssm.mamba.copies import materialize_with
from replayssm.mamba.requests import plan
from replayssm.mamba.slots import Noise, Slot, store
from replayssm.recurrence import advance, process_dt, read_out
from replayssm.rounding import decode


def checkpointing_ssu(
    state: Tensor,
    state_scale: Tensor | None,
    x_cache: Tensor,
    B_cache: Tensor,
    dt_cache: Tensor,
    out: Tensor,
    ring_start: Tensor,
    prev_num_accepted_tokens: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    state_batch_indices: Tensor | None,
    pad_slot_id: int,
    rand_seed: Tensor | None,
    philox_rounds: int,
    cu_seqlens: Tensor | None,
    seq_len: int,
    window: int,
    dt_min: float,
    dt_max: float,
) -> None:
    """See ``replayssm.mamba.checkpointing_ssu``; ``seq_len`` is T and ``window`` the window in force."""
    requests = plan(
        state_batch_indices, pad_slot_id, ring_start, prev_num_accepted_tokens, cu_seqlens, x, state, x_cache, seq_len,
        window,
    )  # fmt: skip
    noise = None
    if rand_seed is not None and philox_rounds > 0:
        noise = Noise(int(rand_seed.item()), philox_rounds)
    ring_len = x_cache.shape[2]
    A, D = A[:, 0, 0], None if D is None else D[:, 0]
    bias = None if dt_bias is None else dt_bias[:, 0]
    for row, number, start, live, first, length, flush in requests:
        row = 0 if cu_seqlens is not None else row
        slot = Slot(
            state[number], None if state_scale is None else state_scale[number], x_cache[number], B_cache[number],
            dt_cache[number],
        )  # fmt: skip
        S = replay(slot, A, start, live)
        if flush:
            codes, scale = store(slot, number, S.float(), noise)
            S = decode(codes, scale).double()
        for t in range(length):
            token = row, first + t
            dt_t = process_dt(dt[token][:, 0], bias, dt_softplus, dt_min, dt_max).float()  # as the ring holds it
            S = advance(S, x[token], dt_t, A, B[token])
            out[token] = read_out(S, x[token], C[token], D, None if z is None else z[token]).to(out.dtype)
            ring_row = (start + live + t) % ring_len
            slot.x[:, ring_row], slot.B[:, ring_row], slot.dt[:, ring_row] = x[token], B[token], dt_t


def replay(slot: Slot, A: Tensor, start: int, num_rows: int) -> Tensor:
    """The slot's state after ``num_rows`` rows of its ring from ``start`` on; fp64, new."""
    S, ring_len = decode(slot.state, slot.scale).double(), slot.x.shape[1]
    for i in range(num_rows):
        row = (start + i) % ring_len
        S = advance(S, slot.x[:, row], slot.dt[:, row], A, slot.B[:, row])
    return S


def _folded(source: Slot, A: Tensor, start: int, num_rows: int) -> Tensor:
    return replay(source, A, start, num_rows).float()


replayssm_materialize = partial(materialize_with, _folded)
