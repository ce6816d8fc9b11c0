"""The gated delta rule as the papers write it: one token, in fp64. The truth of every other path.

``docs/maths.md`` §6; S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_decay(A_log: Tensor, a: Tensor, dt_bias: Tensor) -> Tensor:
    """``-exp(A_log) softplus(a + dt_bias)`` in fp64, rounded to the fp32 that a record holds."""
    x = a.double() + dt_bias.double()
    return (-A_log.double().exp() * torch.where(x > 20.0, x, x.clamp(max=20.0).exp().log1p())).float()


def strength(b: Tensor) -> Tensor:
    """``sigmoid(b)`` in fp64, rounded to the fp32 that a record holds."""
    return torch.sigmoid(b.double()).float()


def unit(x: Tensor, use_qk_l2norm: bool) -> Tensor:
    """``x / sqrt(sum x^2 + 1e-6)`` in fp64, or x itself."""
    x = x.double()
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() if use_qk_l2norm else x


def advance(S: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """One step: ``S' = S diag(exp g)``, ``u = beta (v - S' k)``, ``S_t = S' + u k^T``.

    Args:
        S: ``[HV, V, K]``, fp64, left as it is.
        k: ``[H, K]``, fp64, normalised where the model does so.
        v: ``[HV, V]``.
        g: ``[HV, 1]``, or ``[HV, K]`` for a gate per key channel.
        beta: ``[HV]``.

    Returns:
        The next state, fp64 ``[HV, V, K]``.
    """
    k, v, g, beta = per_value_head(k, S.shape[0]), v.double(), g.double(), beta.double()
    S = S * g.exp()[:, None, :]
    u = beta[:, None] * (v - (S * k[:, None, :]).sum(-1))
    return S + u[:, :, None] * k[:, None, :]


def read_out(S: Tensor, q: Tensor) -> Tensor:
    """``o = S q``, ``[HV, V]``; q ``[H, K]``, scaled."""
    return (S * per_value_head(q, S.shape[0])[:, None, :]).sum(-1)


def per_value_head(x: Tensor, value_heads: int) -> Tensor:
    """``[HV, K]`` of ``[H, K]``: value head h belongs to key head ``h // (HV / H)``."""
    return x.repeat_interleave(value_heads // x.shape[0], 0)
