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
    for t, (k, v, decay, beta) in enumerate(zip(*_steps(tokens, HV // H), strict=True)):
        # S = decay S, u = beta (v - S k), S = S + u k^T
        S.mul_(decay)
        torch.mul(S, k, out=scratch)
        u = (v - scratch.sum(-1)).mul_(beta)
        S.addcmul_(u.unsqueeze(-1), k)
        if q is not None and out is not None and t >= first_query:
            torch.mul(S, q[t - first_query, :, None, None], out=scratch)
            out[t - first_query] = scratch.sum(-1).view(HV, V)
        if t in wanted:
            states[t] = S.view(HV, V, K).clone() if t < n - 1 else S.view(HV, V, K)
    return states


def _steps(tokens: Tokens, repeats: int) -> tuple[tuple[Tensor, ...], ...]:
    """Per token k ``[H, 1, 1, K]``, v ``[H, R, V]``, decay ``[H, R, 1, 1 or K]`` and beta ``[H, R, 1]``; views."""
    heads = (tokens.k.shape[0], repeats)
    return (
        tokens.k[:, :, None, None].unbind(1),
        tokens.v.unflatten(0, heads).unbind(2),
        tokens.decay.unflatten(0, heads).unsqueeze(3).unbind(2),
        tokens.beta.unflatten(0, heads).unsqueeze(3).unbind(2),
    )
