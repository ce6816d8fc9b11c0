"""One token after the other in fp32: the order of plain decoding, whose bits no grouping of tokens into calls changes.

Each operation has the same shape for every token, whatever the number of tokens and requests, and sums over K alone,
along packed rows. So the bits of a token follow from the state before it and from its own numbers.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from replayssm.delta_rule.gates import Tokens


def run(
    state: Tensor, tokens: Tokens, q: Tensor | None, out: Tensor | None, wanted: Collection[int]
) -> dict[int, Tensor]:
    """Apply tokens to a state; write the outputs of the newest ones and return states on the way.

    Args:
        state: ``[HV, V, K]``, any float dtype, packed. Not written.
        tokens: n tokens.
        q: scaled queries of the newest T <= n tokens, fp32 ``[T, H, K]``, packed, or None.
        out: ``[T, HV, V]``, any float dtype and strides; written when there are queries.
        wanted: tokens, 0..n-1, after which the state is returned.

    Returns:
        For every wanted token the state after it, fp32 ``[HV, V, K]``, new.
    """
    HV, V, K = state.shape
    H, n, _ = tokens.k.shape
    S = torch.empty((H, HV // H, V, K), dtype=torch.float32, device=state.device)
    S.view(HV, V, K).copy_(state)
    scratch = torch.empty_like(S)
    states: dict[int, Tensor] = {}
    first_query = n if q is None else n - q.shape[0]
    for t in range(n):
        _advance(S, scratch, *(tensor.select(1, t) for tensor in tokens))
        if q is not None and out is not None and t >= first_query:
            torch.mul(S, q[t - first_query, :, None, None], out=scratch)
            out[t - first_query] = scratch.sum(-1).view(HV, V)
        if t in wanted:
            states[t] = S.view(HV, V, K).clone() if t < n - 1 else S.view(HV, V, K)
    return states


def _advance(S: Tensor, scratch: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> None:
    """One step in place: ``S = decay S``, ``u = beta (v - S k)``, ``S = S + u k^T``."""
    H, R, V, _ = S.shape
    key = k[:, None, None]
    S.mul_(decay.view(H, R, 1, -1))
    torch.mul(S, key, out=scratch)
    u = (v.view(H, R, V) - scratch.sum(-1)).mul_(beta.view(H, R, 1))
    S.addcmul_(u.unsqueeze(-1), key)
