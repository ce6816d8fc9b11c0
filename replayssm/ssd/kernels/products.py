"""``C_t B_j`` of a group, for kernels that compute outputs of one head."""

import triton
import triton.language as tl

from replayssm.ssd.kernels.arithmetic import multiply
from replayssm.ssd.kernels.constants import PER_CALL
from replayssm.ssd.kernels.rows import chunk_bounds, row_pointers


@triton.jit(do_not_specialize=PER_CALL)
def group_products(
    B, C, B_buffer, cu_seqlens, slots, num_buffered, ring_start, products,
    s_B, s_C, s_B_slot, s_B_row, num_tokens, sequences, ngroups, chunk_size, spare, ring_len,
    N: tl.constexpr, ROWS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Program (chunk, group, block of rows t and block of rows j): nothing is stored where all j are later than all t.

    ``products`` is fp32 ``[chunks, ngroups, ROWS, ROWS]``. It holds nothing of use where t lies behind the sequence's
    end or in the buffers.
    """
    chunk = tl.program_id(0)
    _, first, length, first_chunk, slot, buffered, start = chunk_bounds(
        chunk, cu_seqlens, slots, num_buffered, ring_start, num_tokens, sequences, chunk_size, spare, STEPS
    )
    group = tl.program_id(1)
    BLOCKS: tl.constexpr = ROWS // BT
    m0 = tl.program_id(2) // BLOCKS * BT
    j0 = tl.program_id(2) % BLOCKS * BT
    origin = (chunk - first_chunk) * chunk_size
    limit = tl.minimum(chunk_size, buffered + length - origin)
    if (slot < 0) | (j0 > m0) | (m0 >= limit) | (origin + m0 + BT <= buffered):
        return
    m = m0 + tl.arange(0, BT)
    j = j0 + tl.arange(0, BT)
    old_B = B_buffer
    if B_buffer is not None:
        old_B += slot * s_B_slot + group * N
    wanted = (m < limit) & (origin + m >= buffered)
    C_at = (C + group * N + (first + origin + m - buffered) * s_C)[:, None]
    B_at = row_pointers(B + group * N, s_B, old_B, s_B_row, origin, j, first, buffered, start, ring_len)[:, None]
    total = tl.zeros((BT, BT), tl.float32)
    for n0 in tl.range(0, N, BN):
        n = n0 + tl.arange(0, BN)
        C_rows = tl.load(C_at + n[None, :], mask=wanted[:, None] & (n < N)[None, :], other=0.0)
        B_rows = tl.load(B_at + n[None, :], mask=(j < limit)[:, None] & (n < N)[None, :], other=0.0)
        total = multiply(C_rows, tl.trans(B_rows), total, False)
    products += (chunk.to(tl.int64) * ngroups + group) * (ROWS * ROWS)
    tl.store(products + m[:, None] * ROWS + j[None, :], total)
