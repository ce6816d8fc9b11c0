"""A window of tokens at once: one pass over the state for all keys and queries, then a triangular solve. fp32.

``docs/maths.md`` §7 derives it. Each call handles one request, so a request's bits do not depend on the others.

Shapes: H key heads, R value heads of each, HV = H R, n tokens, T of them with queries, m <= n tokens of a prefix. A
gate per head and one per key channel differ in where a decay is applied: behind the sum over K or inside it.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.delta_rule.gates import Tokens


class _Products(NamedTuple):
    """Products of decays, so that no exponent is ever formed: a decay of 0 stays one.

    Attributes:
        prefix: decays up to and with token t, ``[HV, n, 1 or K]``.
        pair: decays after token j up to and with token t, ``[HV, n, n, 1 or K]``; 1 where j >= t.
    """

    prefix: Tensor
    pair: Tensor


def run(
    state: Tensor, tokens: Tokens, q: Tensor | None, out: Tensor | None, wanted: Collection[int]
) -> dict[int, Tensor]:
    """See ``replayssm.delta_rule.token_order.run``."""
    n = tokens.k.shape[1]
    S = _aligned(state.float())
    k = _aligned(tokens.k.contiguous())
    products = _products(tokens.decay)
    x = k if q is None else torch.cat((k, q.transpose(0, 1)), 1)
    read = _read(S, x, products.prefix)
    beta = tokens.beta.unsqueeze(2)
    system = (_scores(k, k, products.pair) * beta).tril_(-1)
    right = (tokens.v - read[:, :n]) * beta
    u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    if q is not None and out is not None:
        T = q.shape[0]
        weights = _scores(x[:, n:], k, products.pair[:, n - T :]).tril_(n - T)
        out.copy_(torch.baddbmm(read[:, n:], weights, u).transpose(0, 1))
    return {t: _state_after(S, t + 1, k, u, products) for t in wanted}


def _aligned(operand: Tensor) -> Tensor:
    """A packed operand of a matrix product, moved when its place in memory could change the product's bits.

    A product is summed differently off the multiples of 16 bytes: bits would depend on the slot and on the batch.
    """
    return operand.clone() if operand.data_ptr() % 16 else operand


def _products(decay: Tensor) -> _Products:
    """From decays ``[HV, n, 1 or K]``."""
    return _Products(decay.cumprod(1), torch.where(_later(decay.shape[1]), decay.unsqueeze(2), 1.0).cumprod(1))


@cache
def _later(n: int) -> Tensor:
    """Mask ``[n, n, 1]``: token t comes after token j."""
    return torch.ones(n, n, dtype=torch.bool, device="cpu").tril_(-1).unsqueeze(2)


def _read(S: Tensor, x: Tensor, prefix: Tensor) -> Tensor:
    """``S`` decayed up to each row's token, times the row: ``[HV, rows, V]``.

    Args:
        S: ``[HV, V, K]``.
        x: keys of the n tokens and queries of the newest, ``[H, rows, K]``.
        prefix: see ``_Products``.
    """
    HV, V, K = S.shape
    H, rows, _ = x.shape
    n = prefix.shape[1]
    prefix = torch.cat((prefix, prefix[:, 2 * n - rows :]), 1)
    if prefix.shape[2] > 1:
        x = x.repeat_interleave(HV // H, 0) * prefix
        return torch.bmm(x, S.transpose(1, 2))
    read = torch.bmm(x, S.view(H, HV // H * V, K).transpose(1, 2))  # one product for the value heads of a key head
    return read.view(H, rows, HV // H, V).transpose(1, 2).reshape(HV, rows, V).mul_(prefix)


def _scores(x: Tensor, k: Tensor, pair: Tensor) -> Tensor:
    """``x_t^T diag(pair_tj) k_j``: ``[HV, rows, n]`` of ``[H, rows, K]``, ``[H, n, K]``, ``[HV, rows, n, 1 or K]``."""
    repeats = pair.shape[0] // x.shape[0]
    if pair.shape[3] > 1:
        x, k = x.repeat_interleave(repeats, 0), k.repeat_interleave(repeats, 0)
        return torch.matmul(pair * k.unsqueeze(1), x.unsqueeze(3)).squeeze(3)
    H, rows, _ = x.shape
    scores = torch.bmm(x, k.transpose(1, 2)).unsqueeze(1) * pair.unflatten(0, (H, repeats)).squeeze(4)
    return scores.view(H * repeats, rows, k.shape[1])


def _state_after(S: Tensor, m: int, k: Tensor, u: Tensor, products: _Products) -> Tensor:
    """The state after m tokens, new ``[HV, V, K]``: the decayed checkpoint plus m decayed outer products."""
    repeats = S.shape[0] // k.shape[0]
    decays = products.pair[:, m - 1, :m]
    k, u = k[:, :m].repeat_interleave(repeats, 0), u[:, :m]
    if decays.shape[2] > 1:
        k = k * decays
    else:
        u = u * decays
    return torch.baddbmm(S * products.prefix[:, m - 1].unsqueeze(1), u.transpose(1, 2), k)
