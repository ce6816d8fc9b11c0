"""The normalisation in FP64: the truth that the other implementations are compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    out: Tensor, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, offset: float, gate_first: bool
) -> None:
    """See :func:`replayssm.rms_norm.rms_norm`."""
    value = x.double()
    factor = None if gate is None else gate.double() * torch.sigmoid(gate.double())
    if factor is not None and gate_first:
        value = value * factor
    value = value / (value.square().mean(-1, keepdim=True) + eps).sqrt() * (offset + weight.double())
    if factor is not None and not gate_first:
        value = value * factor
    out.copy_(value)
