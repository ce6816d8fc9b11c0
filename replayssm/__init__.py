"""Replay decoding for state-space and linear-attention models.

The recurrent state is kept as a checkpoint, the inputs of the last few tokens in a ring, and what a step needs is
rebuilt from both. Importing the package loads nothing heavy: each family is imported on its own,
``from replayssm.mamba import checkpointing_ssu``.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = ["warmup"]

if TYPE_CHECKING:
    from replayssm.warming import warmup


def __getattr__(name: str) -> object:
    # Not imported above, since it loads torch.
    if name == "warmup":
        return importlib.import_module("replayssm.warming").warmup
    raise AttributeError(f"module 'replayssm' has no attribute {name!r}")
