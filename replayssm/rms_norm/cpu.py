"""The normalisation on the CPU, in the operations and the order that transformers' own modules have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(
    out: Tensor, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, offset: float, gate_first: bool
) -> None:
    """See :func:`replayssm.rms_norm.rms_norm`."""
    if gate is not None and gate_first:
        x = x * F.silu(gate)
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    weight = weight.float() if offset == 0 else offset + weight.float()
    if gate is not None and not gate_first:
        torch.mul(weight * normed, F.silu(gate), out=out)
    else:
        torch.mul(weight, normed, out=out)
