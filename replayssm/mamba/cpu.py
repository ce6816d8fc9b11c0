"""``replayssm.mamba`` on the CPU: the window form, one request after the other, in fp32 for every storage type."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from replayssm.mamba.requests import Request, plan
from replayssm.mamba.window import fold, join, ring_rows, score, write_rows
from replayssm.rounding import decode, encode, noise_bits


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
    varlen = cu_seqlens is not None
    batch = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else x.shape[0]
    requests = plan(
        state_batch_indices,
        pad_slot_id,
        ring_start,
        prev_num_accepted_tokens,
        cu_seqlens,
        batch,
        seq_len,
        x.shape[1],
        state.shape[0],
        x_cache.shape[2],
        window,
    )
    seed = int(rand_seed.item()) if rand_seed is not None and philox_rounds > 0 else None
    A = _first(A).float().unsqueeze(1)
    D = None if D is None else _first(D).float().view(-1, 1, 1)
    bias = None if dt_bias is None else _first(dt_bias).float()
    dt = dt.select(3, 0)
    for request in requests:
        slot = request.slot
        new_x, new_B, new_C = (_tokens(t, request, varlen, seq_len) for t in (x, B, C))
        new_dt = _processed(_tokens(dt, request, varlen, seq_len), bias, dt_softplus, dt_min, dt_max)
        rings = x_cache.select(0, slot), B_cache.select(0, slot), dt_cache.select(0, slot)
        new = new_x.transpose(0, 1), new_B.transpose(0, 1), new_dt.transpose(0, 1)
        slot_state, slot_scale = state.select(0, slot), None if state_scale is None else state_scale.select(0, slot)
        live: list[list[Tensor]] = [[], [], []]
        if request.live:
            live = [ring_rows(ring, request.start, request.live) for ring in rings]
        if request.flush:
            noise = None if seed is None else _noise(state, seed, slot, philox_rounds)
            codes, scale = _flush(slot_state, slot_scale, live, A, noise)
            live = [[], [], []]
        else:
            codes, scale = slot_state.float(), slot_scale
        window_x, window_B, window_dt = (join([*old, rows]) for old, rows in zip(live, new, strict=True))
        y = score(codes, scale, window_x, window_B, new_C.transpose(0, 1).float(), window_dt, A)
        if D is not None:
            y.addcmul_(window_x.narrow(1, window_x.shape[1] - seq_len, seq_len), D)
        for ring, rows in zip(rings, new, strict=True):
            write_rows(ring, request.start + request.live, rows.narrow(1, 0, request.length) if varlen else rows)
        y = y.transpose(0, 1)
        if z is not None:
            y = y * functional.silu(_tokens(z, request, varlen, seq_len).float())
        if varlen:
            out[0, request.first : request.first + request.length] = y[: request.length]
        else:
            out.select(0, request.row).copy_(y)


def _flush(
    state: Tensor, scale: Tensor | None, live: list[list[Tensor]], A: Tensor, noise: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Fold the live rows into a slot's state and scale, in place; return what the output reads of the new state.

    That is the state rounded to nearest, also when the stored one is rounded stochastically: an output must not depend
    on the seed.
    """
    x, B, dt = (join(rows) for rows in live)
    if state.dtype == torch.float32:
        return fold(state, x, B, dt, A), None
    folded = fold(decode(state, scale), x, B, dt, A)
    codes, new_scale = encode(folded, state.dtype)
    state.copy_(codes if noise is None else encode(folded, state.dtype, noise)[0])
    if scale is not None and new_scale is not None:
        scale.copy_(new_scale)
    return codes.float(), new_scale


def _noise(state: Tensor, seed: int, slot: int, rounds: int) -> Tensor | None:
    _, nheads, headdim, dstate = state.shape
    return None if state.dtype == torch.float32 else noise_bits(seed, slot, (nheads, headdim, dstate), rounds)


def _first(broadcast: Tensor) -> Tensor:
    """``[nheads]`` of a tensor that repeats one value per head along its other axes."""
    return broadcast.as_strided((broadcast.shape[0],), (broadcast.stride(0),))


def _tokens(tensor: Tensor, request: Request, varlen: bool, seq_len: int) -> Tensor:
    """The request's ``seq_len`` new tokens, axis 0; with ``cu_seqlens`` filled up with zeros.

    The filling keeps every product's shape, hence its bits, what they are in a padded batch.
    """
    if not varlen:
        return tensor.select(0, request.row)
    rows = tensor[0, request.first : request.first + request.length]
    if request.length == seq_len:
        return rows
    padded = rows.new_zeros(seq_len, *rows.shape[1:])
    padded[: request.length] = rows
    return padded


def _processed(dt: Tensor, bias: Tensor | None, softplus: bool, dt_min: float, dt_max: float) -> Tensor:
    """The dt after bias, softplus (the identity above 20) and the limits; ``[seq_len, nheads]``, packed, fp32.

    Packed before softplus, as its bits may differ between packed and strided input.
    """
    dt = dt.float().contiguous() if bias is None else dt + bias
    if softplus:
        dt = functional.softplus(dt.contiguous())
    if dt_min > 0.0 or dt_max != torch.inf:
        dt = dt.clamp(dt_min, dt_max)
    return dt
