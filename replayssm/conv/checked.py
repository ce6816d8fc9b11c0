"""The checked mode (``REPLAYSSM_CHECK=1``): read everything a call will read, and refuse what cannot be right."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.checks import check_finite
from replayssm.conv.requests import plan


def check_values(
    rows: Tensor,
    conv_start: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    state_batch_indices: Tensor | None,
    pad_slot_id: int,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    out: Tensor,
) -> None:
    """Raise ValueError for a slot, cursor or length out of range, a slot used twice, or a number that is not finite.

    The arguments are those of ``cpu.causal_conv1d_replay``; memory that the call does not read is not looked at.
    """
    requests = plan(rows, conv_start, x, state_batch_indices, pad_slot_id, cu_seqlens, max_seqlen)
    check_finite("weight", weight, "")
    if bias is not None:
        check_finite("bias", bias, "")
    history = torch.arange(weight.shape[1] - 1, device=rows.device)
    for request in requests:
        own = rows[request.slot][(request.start + history) % rows.shape[1]]
        check_finite("rows", own, f" of the history of slot {request.slot}")
        check_finite("x", request.tokens_of(x), f" of request {request.row}")
