"""The noise in torch's operations."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.gumbel.configs import STREAM
from replayssm.rounding import WORD, philox4x32


def gumbel_noise(out: Tensor, seeds: Tensor, requests: Tensor, positions: Tensor) -> None:
    """See :func:`replayssm.gumbel.gumbel_noise`; places are ``[rows, tokens]``, ``out`` ``[rows, tokens, vocab]``."""
    vocab_size = out.shape[-1]
    blocks = torch.arange((vocab_size + 3) // 4, dtype=torch.int64, device=out.device)
    counter = torch.broadcast_tensors(
        blocks, positions[..., None] & WORD, requests[..., None] & WORD, torch.full_like(blocks, STREAM)
    )
    key = (seeds[..., None] & WORD, (seeds[..., None] >> 32) & WORD)
    words = torch.stack(philox4x32(counter, key), dim=-1).flatten(-2)[..., :vocab_size]
    out.copy_(words)
    out.add_(0.5).mul_(2.0**-32).log_().neg_().log_().neg_()
