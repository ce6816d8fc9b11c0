"""``replayssm.mamba`` on the CPU: the window form, one request after the other, in fp32 for every storage type."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from replayssm.mamba.copies import materialize_with
from replayssm.mamba.requests import Request, plan
from replayssm.mamba.slots import Noise, Slot, store
from replayssm.mamba.window import fold, read_rows, score, write_rows
from replayssm.rounding import decode


class _Parameters(NamedTuple):
    """What all requests share: per head ``A [H, 1]``, ``D [H, 1, 1]``, ``bias [H]``, fp32, and how dt is processed."""

    A: Tensor
    D: Tensor | None
    bias: Tensor | None
    softplus: bool
    dt_min: float
    dt_max: float


class _Tokens(NamedTuple):
    """New tokens of one request, token axis first."""

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    z: Tensor | None


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
    parameters = _Parameters(
        _per_head(A, 2), None if D is None else _per_head(D, 3), None if dt_bias is None else _per_head(dt_bias, 1),
        dt_softplus, dt_min, dt_max,
    )  # fmt: skip
    new = x, dt.select(3, 0), B, C, z
    for request in requests:
        slot = Slot(
            state.select(0, request.slot), None if state_scale is None else state_scale.select(0, request.slot),
            x_cache.select(0, request.slot), B_cache.select(0, request.slot), dt_cache.select(0, request.slot),
        )  # fmt: skip
        if cu_seqlens is None:
            tokens = _Tokens._make([None if t is None else t.select(0, request.row) for t in new])
            _step(request, slot, tokens, parameters, noise, out.select(0, request.row))
        else:
            rows = slice(request.first, request.first + request.length)
            tokens = _Tokens._make(None if t is None else _padded(t[0, rows], seq_len) for t in new)
            padded = out.new_empty(seq_len, *out.shape[2:])
            _step(request, slot, tokens, parameters, noise, padded)
            out[0, rows] = padded[: request.length]


def _step(
    request: Request, slot: Slot, new: _Tokens, parameters: _Parameters, noise: Noise | None, out: Tensor
) -> None:
    """Write the new rows into the slot's rings, flush when due; write the outputs into ``out [seq_len, H, P]``."""
    seq_len = new.x.shape[0]
    new_x = new.x.transpose(0, 1)
    rows = new_x, new.B.transpose(0, 1), _processed(new.dt, parameters).t()
    rings: tuple[Tensor, ...] = (slot.x, slot.B, slot.dt)
    end = request.start + request.live
    if request.length < seq_len:
        # A copy takes the filled-up rows and is read below, from the same strides as the ring: the same bits.
        for ring, row in zip(rings, rows, strict=True):
            write_rows(ring, end, row.narrow(1, 0, request.length))
        rings = tuple(ring.clone() for ring in rings)
    for ring, row in zip(rings, rows, strict=True):
        write_rows(ring, end, row)
    if request.flush:
        old_x, old_B, old_dt = (read_rows(ring, request.start, request.live) for ring in rings)
        codes, scale = _flush(request.slot, slot, old_x, old_B, old_dt, parameters.A, noise)
        start, count = end, seq_len
    else:
        codes, scale = slot.state.float(), slot.scale
        start, count = request.start, request.live + seq_len
    x, B, dt = (read_rows(ring, start, count) for ring in rings)
    y = score(codes, scale, x, B, new.C.transpose(0, 1).float(), dt, parameters.A)
    if new.z is not None:
        if parameters.D is not None:
            y.addcmul_(new_x, parameters.D)
        torch.mul(y, functional.silu(new.z.float().contiguous()).transpose(0, 1), out=out.transpose(0, 1))
    elif parameters.D is not None:
        torch.addcmul(y, new_x, parameters.D, out=out.transpose(0, 1))
    else:
        out.transpose(0, 1).copy_(y)


def _flush(
    index: int, slot: Slot, x: Tensor, B: Tensor, dt: Tensor, A: Tensor, noise: Noise | None
) -> tuple[Tensor, Tensor | None]:
    """Fold the live rows into a slot's state and scale, in place; return what the output reads of the new state.

    That is the state rounded to nearest, also when the stored one is rounded stochastically: an output must not depend
    on the seed.
    """
    if slot.state.dtype == torch.float32:
        return fold(slot.state, x, B, dt, A), None
    codes, scale = store(slot, index, fold(decode(slot.state, slot.scale), x, B, dt, A), noise)
    return codes.float(), scale


def _per_head(broadcast: Tensor, rank: int) -> Tensor:
    """fp32 ``[H, 1, ...]`` of a tensor that repeats one value per head along its other axes."""
    ones = (1,) * (rank - 1)
    return broadcast.as_strided((broadcast.shape[0], *ones), (broadcast.stride(0), *ones)).float()


def _padded(rows: Tensor, seq_len: int) -> Tensor:
    """The rows filled up with zeros to ``seq_len``: products keep the shape, hence the bits, of a padded batch."""
    if rows.shape[0] == seq_len:
        return rows
    padded = rows.new_zeros(seq_len, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    return padded


def _processed(dt: Tensor, parameters: _Parameters) -> Tensor:
    """The dt after bias, softplus (the identity above 20) and the limits; ``[seq_len, H]``, fp32.

    Packed before softplus, which is vectorised, with other bits, on packed input only. The same holds for SiLU.
    """
    dt = dt.float() if parameters.bias is None else dt + parameters.bias
    if parameters.softplus:
        dt = functional.softplus(dt.contiguous())
    if parameters.dt_min > 0.0 or parameters.dt_max != torch.inf:
        dt = dt.clamp(parameters.dt_min, parameters.dt_max)
    return dt


def _folded(source: Slot, A: Tensor, start: int, num_rows: int) -> Tensor:
    x, B, dt = (read_rows(ring, start, num_rows) for ring in (source.x, source.B, source.dt))
    return fold(decode(source.state, source.scale), x, B, dt, A.float().unsqueeze(1))


replayssm_materialize = partial(materialize_with, _folded)
