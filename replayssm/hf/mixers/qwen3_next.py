"""Qwen3-Next: two input projections, whose columns are interleaved by key head."""

from __future__ import annotations

from typing import Any

from torch import nn

from replayssm.hf.mixers import gdn
from replayssm.hf.mixers.gdn import Weights, derive, layer_shape, replay_forward, run_prompt

__all__ = [
    "GATED",
    "MIXERS",
    "OPS",
    "ROUTED",
    "Weights",
    "derive",
    "layer_shape",
    "linears",
    "prepare",
    "replay_forward",
    "run_prompt",
]

OPS = "gdn_decode"
MIXERS = ("Qwen3NextGatedDeltaNet",)
GATED = ("Qwen3NextMLP",)
ROUTED = ("Qwen3NextSparseMoeBlock",)


def linears(mixer: Any) -> list[nn.Linear]:
    """The mixer's linear layers."""
    return [mixer.in_proj_qkvz, mixer.in_proj_ba, mixer.out_proj]


def prepare(mixer: Any, pack: bool) -> Weights:
    """Compute a mixer's ``Weights`` from the parameters it has now; ``pack`` is that of ``RowProduct``."""
    heads, repeats = mixer.num_k_heads, mixer.num_v_heads // mixer.num_k_heads
    values = repeats * mixer.head_v_dim
    order = _grouped(heads, (mixer.head_k_dim, mixer.head_k_dim, values, values), 0)
    order += _grouped(heads, (repeats, repeats), len(order))
    return gdn.prepare(mixer, [mixer.in_proj_qkvz, mixer.in_proj_ba], order, pack)


def _grouped(heads: int, widths: tuple[int, ...], first: int) -> list[int]:
    """Columns from ``first`` on that lie head by head, each head's parts in turn: the order of part by part.

    Example:
        >>> _grouped(2, (2, 1), 10)
        [10, 11, 13, 14, 12, 15]
    """
    per_head, begin = sum(widths), first
    order: list[int] = []
    for width in widths:
        for head in range(heads):
            order += range(begin + head * per_head, begin + head * per_head + width)
        begin += width
    return order
