"""The text models of Qwen3.5 and its mixture of experts: four input projections with consecutive heads."""

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
MIXERS = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
GATED = ("Qwen3_5MLP",)
ROUTED = ("Qwen3_5MoeSparseMoeBlock",)


def linears(mixer: Any) -> list[nn.Linear]:
    """The mixer's linear layers."""
    return [mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a, mixer.out_proj]


def prepare(mixer: Any, pack: bool) -> Weights:
    """Compute a mixer's ``Weights`` from the parameters it has now; ``pack`` is that of ``RowProduct``."""
    return gdn.prepare(mixer, linears(mixer)[:-1], None, pack)
