"""``replayssm.ssd`` in Triton, for CUDA devices."""

from replayssm.ssd.kernels.launch import chunk_scan

__all__ = ["chunk_scan"]
