"""Processed dt and cumulative sums of all chunks."""

import triton
import triton.language as tl

from replayssm.ssd.kernels.arithmetic import processed, sums
from replayssm.ssd.kernels.constants import PER_CALL
from replayssm.ssd.kernels.rows import buffered_rows, row_pointers, sequence_bounds, sequence_of


@triton.jit(do_not_specialize=PER_CALL)
def chunk_sums(
    dt, A, dt_bias, cu_seqlens, slots, num_buffered, ring_start, dt_buffer, dt_out, sums_out,
    s_dt, s_dt_slot, s_dt_row, num_tokens, sequences, nheads, chunk_size, spare, ring_len, dt_min, dt_max,
    HEADS: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """Program (chunk, heads): rows behind the sequence's end count zero. Outputs ``[chunks, nheads, chunk_size]``."""
    chunk = tl.program_id(0)
    sequence = chunk * 0
    if cu_seqlens is not None:
        sequence = sequence_of(chunk, cu_seqlens, sequences, chunk_size, spare, STEPS)
    first, length, first_chunk = sequence_bounds(sequence, cu_seqlens, num_tokens, chunk_size, spare)
    slot, buffered, start = buffered_rows(sequence, slots, num_buffered, ring_start)
    origin = (chunk - first_chunk) * chunk_size
    if (slot < 0) | (origin >= buffered + length):
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    row = tl.arange(0, ROWS)
    position = origin + row
    inside = (head < nheads)[:, None] & ((row < chunk_size) & (position < buffered + length))[None, :]
    old = dt_buffer
    if dt_buffer is not None:
        old += slot * s_dt_slot
    at = row_pointers(dt, s_dt, old, s_dt_row, position, first, buffered, start, ring_len)
    value = tl.load(at[None, :] + head[:, None], mask=inside, other=0.0).to(tl.float32)
    bias = 0.0
    if dt_bias is not None:
        bias = tl.load(dt_bias + head, mask=head < nheads, other=0.0).to(tl.float32)[:, None]
    value = tl.where(inside, processed(value, bias, dt_min, dt_max, SOFTPLUS), 0.0)
    out = (chunk.to(tl.int64) * nheads + head)[:, None] * chunk_size + row[None, :]
    stored = (head < nheads)[:, None] & (row < chunk_size)[None, :]
    tl.store(dt_out + out, value, mask=stored)
    decay = tl.load(A + head, mask=head < nheads, other=0.0).to(tl.float32)
    tl.store(sums_out + out, sums(value, decay), mask=stored)
