"""What launchers and kernels share that is not code."""

import triton.language as tl

# Heads of one cumulative sum and warps of its program: they settle the order in which it adds.
SUM_HEADS, SUM_WARPS = 8, 4
# Numbers that change from call to call: none of them is worth a compilation of its own.
PER_CALL = ["num_tokens", "sequences", "spare", "ring_len", "seq_len", "lanes"]
NAN_STAYS = tl.constexpr(tl.PropagateNan.ALL)
