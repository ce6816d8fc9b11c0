"""``gumbel_noise`` in Triton: a program fills some token ids of one place."""

import triton
import triton.language as tl
from torch import Tensor

from replayssm.gumbel.configs import STREAM, blocks_per_program


@triton.jit
def _fill(
    out, seeds, requests, positions, s_seeds, s_seeds_t, s_requests, s_requests_t, s_positions, s_positions_t,
    tokens, vocab_size, STREAM: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = place // tokens
    token = place % tokens
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    zero = block.to(tl.uint32) * 0
    seed = tl.load(seeds + row * s_seeds + token * s_seeds_t)
    # The low 32 bits of each.
    request = zero + tl.load(requests + row * s_requests + token * s_requests_t).to(tl.uint32)
    position = zero + tl.load(positions + row * s_positions + token * s_positions_t).to(tl.uint32)
    words = tl.philox(seed, block.to(tl.uint32), position, request, zero + STREAM)
    out += place * vocab_size
    for number in tl.static_range(4):
        uniform = (words[number].to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
        at = block * 4 + number
        tl.store(out + at, -tl.log(-tl.log(uniform)), mask=at < vocab_size)


def gumbel_noise(out: Tensor, seeds: Tensor, requests: Tensor, positions: Tensor) -> None:
    """See :func:`replayssm.gumbel.gumbel_noise`; places are ``[rows, tokens]``, ``out`` ``[rows, tokens, vocab]``."""
    rows, tokens, vocab_size = out.shape
    if rows * tokens == 0:
        return
    blocks = blocks_per_program(vocab_size)
    _fill[(rows * tokens, triton.cdiv(vocab_size, 4 * blocks))](
        out, seeds, requests, positions, *seeds.stride(), *requests.stride(), *positions.stride(), tokens, vocab_size,
        STREAM=STREAM, BLOCKS=blocks, num_warps=4,
    )  # fmt: skip
