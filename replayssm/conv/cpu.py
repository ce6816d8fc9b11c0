"""The convolution on the CPU: one gather of every token's window, then one product and one sum per tap."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


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
    requests = _plan(rows, conv_start, x, state_batch_indices, pad_slot_id, cu_seqlens, max_seqlen)
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


class _Request(NamedTuple):
    """A request with tokens that is not padding: its slot, the first row of its history, where its tokens are in x."""

    slot: int
    start: int
    row: int
    first: int
    length: int

    def tokens_of(self, x: Tensor) -> Tensor:
        """The request's part ``[length, channels]`` of x or out."""
        return x[self.row] if self.length == x.shape[1] else x[self.row, self.first : self.first + self.length]


def _plan(
    rows: Tensor,
    conv_start: Tensor,
    x: Tensor,
    state_batch_indices: Tensor | None,
    pad_slot_id: int,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> list[_Request]:
    """Read slots, cursors and lengths back and check their values, before anything is written."""
    (num_slots, conv_len, _), num_tokens = rows.shape, x.shape[1]
    starts = conv_start.tolist()
    bounds = None if cu_seqlens is None else cu_seqlens.tolist()
    batch = x.shape[0] if bounds is None else len(bounds) - 1
    requests, seen = [], set()
    for b, slot in enumerate(range(batch) if state_batch_indices is None else state_batch_indices.tolist()):
        if slot < 0 or slot == pad_slot_id:
            continue
        if slot >= num_slots:
            raise ValueError(f"state_batch_indices: expected values below slots={num_slots}, got {slot} at [{b}]")
        if slot in seen:
            raise ValueError(f"state_batch_indices: expected distinct slots, got {slot} more than once")
        if not 0 <= starts[slot] < conv_len:
            raise ValueError(
                f"conv_start: expected 0 <= conv_start < conv_len={conv_len}, got {starts[slot]} at slot {slot}"
            )
        row, first, length = b, 0, num_tokens
        if bounds is not None:
            row, first, length = 0, bounds[b], bounds[b + 1] - bounds[b]
            if not 0 <= length <= max_seqlen:
                raise ValueError(
                    f"cu_seqlens: expected 0 to max_seqlen={max_seqlen} tokens a request, got {length} at [{b}]"
                )
            if first < 0 or bounds[b + 1] > num_tokens:
                raise ValueError(
                    f"cu_seqlens: expected tokens within x's {num_tokens}, got {first}..{bounds[b + 1]} at [{b}]"
                )
        seen.add(slot)
        if length:
            requests.append(_Request(slot, starts[slot], row, first, length))
    return requests


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


def _exchange(rows: Tensor, requests: list[_Request], x: Tensor, width: int) -> Tensor:
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
