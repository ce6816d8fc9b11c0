"""Replay decoding for state-space and linear-attention models.

The recurrent state is kept as a checkpoint, the inputs of the last few tokens in a ring, and what a step needs is
rebuilt from both. Importing the package loads nothing heavy: each part is loaded when it is first used, by
``from replayssm.mamba import checkpointing_ssu`` or as ``replayssm.hf.generate``.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = ["warmup"]

if TYPE_CHECKING:
    from replayssm import (  # noqa: F401
        batch_invariant_decode,
        cache,
        conv,
        gdn_decode,
        gumbel,
        hf,
        mamba,
        models,
        rms_norm,
        row_product,
        ssd,
    )
    from replayssm.warming import warmup

_PARTS = (
    "batch_invariant_decode", "cache", "conv", "gdn_decode", "gumbel", "hf", "mamba", "models", "rms_norm",
    "row_product", "ssd",
)  # fmt: skip


def __getattr__(name: str) -> object:
    # Not imported above, since all of it loads torch.
    if name == "warmup":
        return importlib.import_module("replayssm.warming").warmup
    if name in _PARTS:
        return importlib.import_module(f"replayssm.{name}")
    raise AttributeError(f"module 'replayssm' has no attribute {name!r}")
