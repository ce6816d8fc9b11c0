"""The checked mode (``REPLAYSSM_CHECK=1``): read everything a call will read, and refuse what cannot be right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from replayssm.checks import check_finite
from replayssm.mamba.copies import planned
from replayssm.mamba.requests import Request, plan


def check_values(
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
    """Raise ValueError for a slot, cursor or length out of range, a slot used twice, or a number that is not finite.

    The arguments are those of ``cpu.checkpointing_ssu``; memory that the call does not read is not looked at.
    """
    requests = plan(
        state_batch_indices, pad_slot_id, ring_start, prev_num_accepted_tokens, cu_seqlens, x, state, x_cache, seq_len,
        window,
    )  # fmt: skip
    for name, parameter in {"A": A, "D": D, "dt_bias": dt_bias}.items():
        if parameter is not None:
            check_finite(name, parameter, "")
    rings = {"x_cache": x_cache, "B_cache": B_cache, "dt_cache": dt_cache}
    tokens = {"x": x, "dt": dt, "B": B, "C": C, "z": z}
    for request in requests:
        _check_request(request, state, state_scale, rings, tokens, cu_seqlens is not None)


def check_copies(*arguments: Any) -> None:
    """Raise ValueError for a table, slot, cursor or length that is wrong; on the CPU also for a number not finite.

    The arguments are those of ``replayssm_materialize`` as the op takes them. Only host addresses can be read here.
    """
    tables, copies = planned(*arguments)
    if arguments[0].device.type != "cpu":
        return
    for copy in copies:
        source, where = tables.slot(copy.layer, copy.src), f" of slot {copy.src} in layer {copy.layer}"
        check_finite("state", source.state.float(), where)
        if source.scale is not None:
            check_finite("state_scale", source.scale, where)
        rows = (copy.start + torch.arange(copy.num_rows)) % source.x.shape[1]
        for name, ring in (("x_cache", source.x), ("B_cache", source.B), ("dt_cache", source.dt)):
            check_finite(name, ring[:, rows], f" of the replayed rows{where}")
        if copy.num_rows:
            check_finite("A", tables.A(copy.layer), f" of layer {copy.layer}")


def _check_request(
    request: Request,
    state: Tensor,
    scale: Tensor | None,
    rings: dict[str, Tensor],
    tokens: dict[str, Tensor | None],
    varlen: bool,
) -> None:
    slot = request.slot
    check_finite("state", state[slot].float(), f" of slot {slot}")
    if scale is not None:
        check_finite("state_scale", scale[slot], f" of slot {slot}")
    for name, ring in rings.items():
        rows = (request.start + torch.arange(request.live, device=ring.device)) % ring.shape[2]
        check_finite(name, ring[slot][:, rows], f" of the live rows of slot {slot}")
    for name, tensor in tokens.items():
        if tensor is not None:
            own = tensor[0, request.first : request.first + request.length] if varlen else tensor[request.row]
            check_finite(name, own, f" of request {request.row}")
