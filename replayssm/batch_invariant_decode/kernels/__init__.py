"""``replayssm.batch_invariant_decode`` in Triton, for CUDA devices."""

from replayssm.batch_invariant_decode.kernels.launch import decode_rows, step
from replayssm.batch_invariant_decode.kernels.storage import commit, masked_update_rows, refresh, store_tails

__all__ = ["commit", "decode_rows", "masked_update_rows", "refresh", "step", "store_tails"]
