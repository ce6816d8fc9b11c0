"""From raw inputs to what the recurrence takes: log decay, decay, beta, normalised keys and queries.

A token's numbers must not depend on how many tokens a call has, while torch rounds some functions differently in the
vectorised and the remaining elements of an array. Hence only functions without that difference are used, and the
transcendental ones run in fp64 and are rounded to fp32 once. These arrays are tiny beside the state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NORM_EPSILON = 1e-6
_SOFTPLUS_IDENTITY = 20.0


class Tokens(NamedTuple):
    """Tokens of one request as the recurrence takes them, head axis first, fp32; each token's row is packed.

    Attributes:
        k: keys ``[H, n, K]``, normalised where the model does so.
        v: values ``[HV, n, V]``.
        decay: ``[HV, n, 1]``, or ``[HV, n, K]`` for a gate per key channel; 0..1.
        beta: ``[HV, n]``.
    """

    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor

    @classmethod
    def of_request(cls, batch: Tokens, row: int) -> Tokens:
        """The tokens of one request of a batch that was prepared with axes ``[batch, token, head, ...]``."""
        return cls(*(tensor[row].transpose(0, 1) for tensor in batch))


def log_decay(A_log: Tensor, a: Tensor, dt_bias: Tensor) -> Tensor:
    """``g = -exp(A_log) softplus(a + dt_bias)``, where softplus is the identity above 20; fp32, <= 0.

    Args:
        A_log: broadcastable to ``a``.
        a: ``[..., HV]``, or ``[..., HV, K]`` for a gate per key channel.
        dt_bias: broadcastable to ``a``.

    Returns:
        fp32, shaped like ``a``, packed.

    Example:
        >>> log_decay(torch.zeros(1), torch.tensor([[-1e4], [0.0], [1e4]]), torch.zeros(1)).flatten().tolist()
        [-0.0, -0.6931471824645996, -10000.0]
    """
    x = a.double() + dt_bias.double()
    softplus = torch.where(x > _SOFTPLUS_IDENTITY, x, torch.log1p(torch.exp(x.clamp(max=_SOFTPLUS_IDENTITY))))
    return (-torch.exp(A_log.double()) * softplus).float().contiguous()


def strength(b: Tensor) -> Tensor:
    """``beta = sigmoid(b)``, fp32: rounded to 16 bits it would let the state drift with the length of the text."""
    return torch.reciprocal(1.0 + torch.exp(-b.double())).float().contiguous()


def decay(g: Tensor) -> Tensor:
    """``exp(g)`` of an fp32 log decay; -inf gives 0."""
    return torch.exp(g.double()).float().contiguous()


def normalised(x: Tensor) -> Tensor:
    """``x / sqrt(sum(x^2) + 1e-6)`` over the last axis, packed fp32 in, packed fp32 out."""
    return x * ((x * x).sum(-1, keepdim=True) + NORM_EPSILON).sqrt().reciprocal()


def prepared(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, use_qk_l2norm: bool) -> Tokens:
    """The tokens of raw records.

    Args:
        k: ``[..., K]``, any float dtype and strides, as all.
        v: ``[..., V]``.
        g: fp32 log decay ``[...]``, or ``[..., K]`` for a gate per key channel.
        beta: fp32 ``[...]``.
        use_qk_l2norm: normalise the keys.

    Returns:
        Tokens with the same axes in front of K and V.
    """
    k = k.float().contiguous()
    if g.dim() == beta.dim():
        g = g.unsqueeze(-1)
    return Tokens(normalised(k) if use_qk_l2norm else k, v.float().contiguous(), decay(g), beta.contiguous())


def prepared_queries(q: Tensor, scale: float, use_qk_l2norm: bool) -> Tensor:
    """Scaled queries, fp32 and packed; normalised before the scale if at all."""
    q = q.float().contiguous()
    return (normalised(q) if use_qk_l2norm else q) * scale
