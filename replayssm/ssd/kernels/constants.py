"""What launchers and kernels share that is not code."""

import triton.language as tl

from replayssm.ssd import configs

# Heads of one cumulative sum and warps of its program: they settle the order in which it adds.
SUM_HEADS, SUM_WARPS = 8, 4
# Heads that a program of outputs goes through at most.
MOST_HEADS = 16
# Numbers that are not worth a compilation of their own: no address is aligned by them.
PER_CALL = [
    "num_tokens", "sequences", "spare", "ring_len", "seq_len", "nheads", "ngroups", "heads_per_group", "heads",
]  # fmt: skip
TERMS = tl.constexpr(configs.TERMS)
NAN_STAYS = tl.constexpr(tl.PropagateNan.ALL)
