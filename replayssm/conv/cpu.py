"""The convolution on the CPU: one gather of every token's window, then one product and one sum per tap."""

from __future__ import annotations

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
    count = sum(request.length for request in requests)
    if not count:
        return
    # The live requests' tokens, in the flattened x and out; None when those are all tokens, in order.
    owned = None
    if cu_seqlens is not None or count < x.shape[0] * x.shape[1]:
        owned = [t for request in requests for t in range(request.first, request.first + request.length)]
    tokens = x.reshape(-1, x.shape[2])
    result = _convolve(_exchange(rows, requests, tokens if owned is None else tokens[owned], weight), weight, bias)
    if activation == "silu":
        # silu(v) = v / (1 + exp(-v)), spelled out: torch's own silu rounds differently in its vector and scalar
        # loops, and which of them an element meets depends on the shape.
        result /= result.neg().exp_().add_(1)
    if owned is None:
        out.copy_(result.view(out.shape))
    else:
        own = torch.tensor(owned)
        out[own // x.shape[1], own % x.shape[1]] = result.to(out.dtype)


class _Request(NamedTuple):
    """A request that is not padding: its slot, the first row of its history, its tokens in the flattened x."""

    slot: int
    start: int
    first: int
    length: int


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
        first, length = b * num_tokens, num_tokens
        if bounds is not None:
            first, length = bounds[b], bounds[b + 1] - bounds[b]
            if not 0 <= length <= max_seqlen:
                raise ValueError(
                    f"cu_seqlens: expected 0 to max_seqlen={max_seqlen} tokens a request, got {length} at [{b}]"
                )
            if first < 0 or bounds[b + 1] > num_tokens:
                raise ValueError(
                    f"cu_seqlens: expected tokens within x's {num_tokens}, got {first}..{bounds[b + 1]} at [{b}]"
                )
        seen.add(slot)
        requests.append(_Request(slot, starts[slot], first, length))
    return requests


def _exchange(rows: Tensor, requests: list[_Request], tokens: Tensor, weight: Tensor) -> Tensor:
    """Write the tokens into the ring and return every token's window ``[tokens, width, channels]``.

    Args:
        rows: the ring, written in place.
        requests: whose tokens they are, in order.
        tokens: ``[sum of the lengths, channels]``.
        weight: ``[channels, width]``, for its width.
    """
    slots, conv_len, channels = rows.shape
    width = weight.shape[1]
    flat = rows.stride(0) % channels == 0  # then the pool is a table of rows, and one index is enough
    pitch = rows.stride(0) // channels if flat else conv_len
    index = torch.tensor(
        [
            slot * pitch + (start + row) % conv_len
            for slot, start, _, length in requests
            for token in range(length)
            for row in range(token, token + width)
        ]
    )
    newest = slice(width - 1, None, width)
    if flat:
        table = rows.as_strided(((slots - 1) * pitch + conv_len, channels), (channels, 1))
        table.index_copy_(0, index[newest], tokens)
        gathered = table.index_select(0, index)
    else:
        slot, row = index // conv_len, index % conv_len
        rows[slot[newest], row[newest]] = tokens
        gathered = rows[slot, row]
    return gathered.view(-1, width, channels)


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
