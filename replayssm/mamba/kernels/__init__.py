"""``replayssm.mamba`` in Triton, for CUDA devices."""

from replayssm.mamba.kernels.materialize import replayssm_materialize
from replayssm.mamba.kernels.step import checkpointing_ssu

__all__ = ["checkpointing_ssu", "replayssm_materialize"]
