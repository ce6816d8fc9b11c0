"""The recurrence of Mamba-2, one token at a time in fp64 (``docs/maths.md`` §1): what the references are made of."""

from __future__ import annotations

import torch
from torch import Tensor


def advance(S: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """One step of the recurrence: ``S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t^T``.

    Args:
        S: ``[H, P, N]``, fp64, left as it is.
        x: ``[H, P]``.
        dt: ``[H]``, processed.
        A: ``[H]``.
        B: ``[G, N]``.

    Returns:
        The next state, fp64 ``[H, P, N]``.
    """
    H = S.shape[0]
    x, dt, A, B = x.double(), dt.double(), A.double(), per_head(B, H).double()
    return torch.exp(A * dt)[:, None, None] * S + (dt[:, None] * x)[:, :, None] * B[:, None, :]


def read_out(S: Tensor, x: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """The output of one token: ``y_t = S_t C_t + D x_t``, times ``z_t sigmoid(z_t)``.

    Args:
        S: the state after the token, ``[H, P, N]``, fp64.
        x: ``[H, P]``.
        C: ``[G, N]``.
        D: ``[H]`` or ``[H, P]``, or None.
        z: ``[H, P]`` or None.

    Returns:
        fp64 ``[H, P]``.
    """
    y = (S * per_head(C, S.shape[0]).double()[:, None, :]).sum(-1)
    if D is not None:
        y = y + (D.double() if D.dim() == 2 else D.double()[:, None]) * x.double()
    return y if z is None else y * z.double() * torch.sigmoid(z.double())


def per_head(grouped: Tensor, nheads: int) -> Tensor:
    """``[H, N]`` of ``[G, N]``: head h belongs to group ``h // (H / G)``."""
    return grouped.repeat_interleave(nheads // grouped.shape[0], 0)


def process_dt(dt: Tensor, bias: Tensor | None, softplus: bool, dt_min: float, dt_max: float) -> Tensor:
    """``clamp(softplus(dt + bias))``, softplus being the identity above 20, in fp64."""
    dt = dt.double() if bias is None else dt.double() + bias.double()
    if softplus:
        dt = torch.where(dt > 20.0, dt, torch.log1p(torch.exp(dt.clamp(max=20.0))))
    return dt.clamp(dt_min, dt_max)
