"""The convolution token by token in FP64: the truth that the other implementations are compared with."""

from __future__ import annotations

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
    conv_len, width = rows.shape[1], weight.shape[1]
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    for b in range(batch):
        slot = b if state_batch_indices is None else int(state_batch_indices[b])
        if slot < 0 or slot == pad_slot_id:
            continue
        if cu_seqlens is None:
            tokens, outputs = x[b], out[b]
        else:
            own = slice(int(cu_seqlens[b]), int(cu_seqlens[b + 1]))
            tokens, outputs = x[0, own], out[0, own]
        start = int(conv_start[slot])
        for i in range(tokens.shape[0]):
            rows[slot, (start + width - 1 + i) % conv_len] = tokens[i]
            total = torch.zeros(x.shape[2], dtype=torch.float64, device="cpu") if bias is None else bias.double()
            for tap in range(width):
                total = total + rows[slot, (start + i + tap) % conv_len].double() * weight[:, tap].double()
            outputs[i] = total * torch.sigmoid(total) if activation == "silu" else total
