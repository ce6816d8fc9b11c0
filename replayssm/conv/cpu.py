"""The convolution on the CPU: one gather of every token's window, then one product and one sum per tap."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from replayssm.conv.requests import Request, plan


def causal_conv1d_replay(
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
    """See :func:`replayssm.conv.causal_conv1d_replay`."""
    requests = plan(rows, conv_start, x, state_batch_indices, pad_slot_id, cu_seqlens, max_seqlen)
    if not requests:
        return
    result = _convolve(_exchange(rows, requests, x, weight.shape[1]), weight, bias)
    if activation == "silu":
        # silu(v) = v / (1 + exp(-v)), spelled out: torch's own silu rounds differently in its vector and scalar
        # loops, and which of them an element meets depends on the shape.
        result /= result.neg().exp_().add_(1)
    if result.shape[0] == out.shape[0] * out.shape[1] and cu_seqlens is None:
        out.copy_(result.view(out.shape))
    else:
        parts = result.split([request.length for request in requests])
        for request, part in zip(requests, parts, strict=True):
            request.tokens_of(out).copy_(part)


@lru_cache(maxsize=1024)
def _window_rows(conv_len: int, width: int, length: int) -> tuple[Tensor, Tensor]:
    """Ring rows by the row where the history begins: of the windows of ``length`` tokens, and of the tokens themselves.

    Returns:
        int64 ``[conv_len, length * width]`` and ``[conv_len, length]``.
    """
    # Named, because the table outlives a default device that the caller may have set.
    start = torch.arange(conv_len, device="cpu").view(-1, 1, 1)
    token = torch.arange(length, device="cpu").view(-1, 1)
    windows = (start + token + torch.arange(width, device="cpu")) % conv_len
    return windows.flatten(1), windows[:, :, -1].contiguous()


def _exchange(rows: Tensor, requests: list[Request], x: Tensor, width: int) -> Tensor:
    """Write the tokens into the rings and return every token's window ``[tokens, width, channels]``."""
    gathered = []
    for request in requests:
        ring = rows[request.slot]
        windows, newest = _window_rows(rows.shape[1], width, request.length)
        ring.index_copy_(0, newest[request.start], request.tokens_of(x))
        gathered.append(ring.index_select(0, windows[request.start]))
    every = gathered[0] if len(gathered) == 1 else torch.cat(gathered)
    return every.view(-1, width, rows.shape[2])


def _convolve(windows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``bias + sum of taps`` in FP32, ``[tokens, channels]``, oldest tap first.

    A product and then a sum, elementwise: ``addcmul`` would fuse them in its vector loop only, and a matrix product
    or a reduction orders the sum by the shape.
    """
    products = windows * weight.t().float().contiguous()
    if bias is None:
        oldest, *newer = products.unbind(1)
    else:
        oldest, newer = bias.float(), list(products.unbind(1))
    total = oldest + newer[0]
    for product in newer[1:]:
        total += product
    return total
