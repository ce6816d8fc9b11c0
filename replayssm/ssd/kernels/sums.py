"""What is known of a row before its chunk is read: dt, its sum, and what follows from them."""

import triton
import triton.language as tl

from replayssm.ssd.kernels.arithmetic import fold_scale, processed, sums
from replayssm.ssd.kernels.constants import PER_CALL
from replayssm.ssd.kernels.rows import chunk_bounds, row_pointers


@triton.jit(do_not_specialize=PER_CALL)
def chunk_sums(
    dt, A, dt_bias, cu_seqlens, slots, num_buffered, ring_start, dt_buffer, numbers,
    s_dt, s_dt_slot, s_dt_row, num_tokens, sequences, nheads, chunk_size, spare, ring_len, dt_min, dt_max,
    HEADS: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr, STEPS: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """Program (chunk, heads): rows behind the sequence's end count zero.

    ``numbers`` is ``[chunks, nheads, chunk_size, 4]``: sum, dt, the row's factor in the state after the chunk, and that
    of the state before the chunk in the row. So a program that needs several of them takes one load of 16 bytes a row.
    """
    chunk = tl.program_id(0)
    _, first, length, first_chunk, slot, buffered, start = chunk_bounds(
        chunk, cu_seqlens, slots, num_buffered, ring_start, num_tokens, sequences, chunk_size, spare, STEPS
    )
    origin = (chunk - first_chunk) * chunk_size
    if (slot < 0) | (origin >= buffered + length):
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    row = tl.arange(0, ROWS)
    stored = (row < chunk_size)[None, :]
    inside = stored & (origin + row < buffered + length)[None, :]
    if not WHOLE:  # a mask that knows nothing of heads leaves loads of several heads whole
        stored = stored & (head < nheads)[:, None]
        inside = inside & (head < nheads)[:, None]
    old = dt_buffer
    if dt_buffer is not None:
        old += slot * s_dt_slot
    at = row_pointers(dt, s_dt, old, s_dt_row, origin, row, first, buffered, start, ring_len)
    value = tl.load(at[None, :] + head[:, None], mask=inside, other=0.0).to(tl.float32)
    bias = 0.0
    if dt_bias is not None:
        bias = tl.load(dt_bias + head, mask=head < nheads, other=0.0).to(tl.float32)[:, None]
    value = tl.where(inside, processed(value, bias, dt_min, dt_max, SOFTPLUS), 0.0)
    decay = tl.load(A + head, mask=head < nheads, other=0.0).to(tl.float32)
    total = sums(value, decay)
    newest = tl.sum(tl.where(row[None, :] == chunk_size - 1, total, 0.0), 1)
    first_pair, second_pair = tl.join(total, fold_scale(newest[:, None], total, value)), tl.join(value, tl.exp(total))
    four = tl.reshape(tl.join(first_pair, second_pair), (HEADS, ROWS, 4))
    out = ((chunk.to(tl.int64) * nheads + head)[:, None] * chunk_size + row[None, :]) * 4
    tl.store(numbers + out[:, :, None] + tl.arange(0, 4)[None, None, :], four, mask=stored[:, :, None])
