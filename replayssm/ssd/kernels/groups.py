"""Outputs of a chunk for several heads of a group, which share the products ``C_t B_j`` in registers."""

import triton
import triton.language as tl

from replayssm.ssd.kernels.arithmetic import finished, weights
from replayssm.ssd.kernels.constants import PER_CALL
from replayssm.ssd.kernels.rows import chunk_bounds, row_numbers, row_pointers


@triton.jit
def _products(C_rows, B_at, n_column, zero, m, j):
    """``C_t B_j`` of rows ``m`` and ``j``, zero where j is later."""
    B_rows = tl.load(B_at, mask=n_column, other=zero)
    return tl.where(m[:, None] >= j[None, :], tl.dot(C_rows, B_rows, input_precision="ieee"), 0.0)


@triton.jit
def _heads(
    x, B, C, D, z, old_x, old_B, numbers, entering, out, s_x, s_B, s_x_row, s_B_row, s_C, s_z, s_out, s_D_head,
    s_D_element, first, buffered, start, ring_len, origin, limit, p, chunk_size, count,
    P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, CAREFUL: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """``count`` heads from where the pointers stand, the chunk's first (``BLOCK`` 0) or second ``BT`` rows.

    Rows behind the last are read as the last: nothing of them is stored, and products with later rows are zero. So the
    loop over heads needs no masks, which would hold the predicates that keep several exponentials in flight. Only with
    ``CAREFUL`` may a later row of x or dt be no number: zero times that would reach an earlier output.
    """
    n = tl.arange(0, NP)
    j = tl.arange(0, BT)
    m = BLOCK * BT + j
    own = tl.minimum(m, limit - 1)
    inside = None  # masks of columns that are padding
    p_row = None
    n_row = None
    n_column = None
    zero = None
    if P % BP != 0 or N != NP:
        p_row = (p < P)[None, :]
        n_row = (n < N)[None, :]
        n_column = (n < N)[:, None]
        inside = n_column & p_row
        zero = 0.0
    new_row = (first + tl.maximum(origin + own, buffered) - buffered)[:, None]
    C_rows = tl.load(C + new_row * s_C + n[None, :], mask=n_row, other=zero)
    B_at = row_pointers(B, s_B, old_B, s_B_row, origin, own, first, buffered, start, ring_len)
    products = _products(C_rows, B_at[None, :] + n[:, None], n_column, zero, m, m)
    x_at = row_pointers(x, s_x, old_x, s_x_row, origin, own, first, buffered, start, ring_len)[:, None] + p[None, :]
    if BLOCK > 0:
        B_at = row_pointers(B, s_B, old_B, s_B_row, origin, j, first, buffered, start, ring_len)
        before = _products(C_rows, B_at[None, :] + n[:, None], n_column, zero, m, j)
        j_at = row_pointers(x, s_x, old_x, s_x_row, origin, j, first, buffered, start, ring_len)[:, None] + p[None, :]
    for i in tl.range(0, count, num_stages=STAGES):
        state_at = entering + i * (P * N) + n[:, None] * P + p[None, :]
        state = tl.load(state_at, mask=inside, other=zero)
        newest, _, dt_row, decay = row_numbers(numbers, i * chunk_size + own, None, BT)
        y = tl.dot(C_rows, state, input_precision="ieee") * decay[:, None]
        if BLOCK > 0:
            older, _, dt_older, _ = row_numbers(numbers, i * chunk_size + j, None, BT)
            w = weights(before, newest[:, None], older[None, :], dt_older[None, :]).to(OPERAND)
            x_rows = tl.load(j_at + i * P, mask=p_row, other=zero)
            y = tl.dot(w, x_rows, y, input_precision="ieee")
        w = weights(products, newest[:, None], newest[None, :], dt_row[None, :])
        x_rows = tl.load(x_at + i * P, mask=p_row, other=zero)
        if CAREFUL:
            w = tl.where(m[:, None] >= m[None, :], w, 0.0).to(OPERAND)
            earlier = y
            for r in range(0, BT):
                seen = tl.where((j <= r)[:, None], x_rows, 0.0).to(OPERAND)
                y = tl.where((j == r)[:, None], tl.dot(w, seen, earlier, input_precision="ieee"), y)
        else:
            y = tl.dot(w.to(OPERAND), x_rows, y, input_precision="ieee")
        skip = 0.0
        gate = y
        if D is not None:
            skip_at = D + i * s_D_head + (p * s_D_element)[None, :]
            skip = tl.load(skip_at, mask=p_row, other=zero).to(tl.float32)
        if z is not None:
            gate = tl.load(z + i * P + new_row * s_z + p[None, :], mask=p_row, other=zero)
        y = finished(y, x_rows, skip, gate, D is not None, z is not None)
        # Compared anew for every head, or the loop would hold the predicates after all.
        wanted = (m + i < limit + i) & (origin + m + i >= buffered + i)
        at = out + i * P + new_row * s_out + p[None, :]
        tl.store(at, y.to(out.dtype.element_ty), mask=wanted[:, None] & (p < P)[None, :])


@triton.jit(do_not_specialize=PER_CALL)
def group_outputs(
    x, B, C, D, z, x_buffer, B_buffer, numbers, entering, flags, cu_seqlens, slots, num_buffered, ring_start, out,
    s_x, s_B, s_C, s_z, s_out, s_x_slot, s_x_row, s_B_slot, s_B_row, s_D_head, s_D_element,
    num_tokens, sequences, nheads, heads_per_group, chunk_size, spare, ring_len, heads,
    P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr, BLOCKS: tl.constexpr,
    HEADS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Program (chunk, ``heads`` of a group and HEADS at most, block of rows and columns)."""
    chunk = tl.program_id(0)
    sequence, first, length, first_chunk, slot, buffered, start = chunk_bounds(
        chunk, cu_seqlens, slots, num_buffered, ring_start, num_tokens, sequences, chunk_size, spare, STEPS
    )
    programs = tl.cdiv(heads_per_group, heads)
    group = tl.program_id(1) // programs
    begin = tl.program_id(1) % programs * heads
    count = tl.minimum(heads, heads_per_group - begin)
    head = group * heads_per_group + begin
    PARTS: tl.constexpr = (P + BP - 1) // BP
    part = tl.program_id(2) % PARTS
    block = tl.program_id(2) // PARTS
    origin = (chunk - first_chunk) * chunk_size
    limit = tl.minimum(chunk_size, buffered + length - origin)
    if (slot < 0) | (block * BT >= limit) | (origin + tl.minimum(block * BT + BT, limit) <= buffered):
        return
    old_x = x_buffer
    old_B = B_buffer
    if x_buffer is not None:
        old_x += slot * s_x_slot + head * P
        old_B += slot * s_B_slot + group * N
    x += head * P
    B += group * N
    C += group * N
    out += head * P
    if D is not None:
        D += head * s_D_head
    if z is not None:
        z += head * P
    index = chunk.to(tl.int64) * nheads + head
    entering += index * (P * N)
    numbers += index * (chunk_size * 4)
    p = part * BP + tl.arange(0, BP)
    h = tl.arange(0, HEADS)
    flags += (sequence * nheads + head + h) * PARTS + part
    careful = tl.max(tl.load(flags, mask=h < count, other=0), 0)
    for BLOCK in tl.static_range(BLOCKS):
        if block == BLOCK:
            if careful != 0:
                _heads(
                    x, B, C, D, z, old_x, old_B, numbers, entering, out, s_x, s_B, s_x_row, s_B_row, s_C, s_z, s_out,
                    s_D_head, s_D_element, first, buffered, start, ring_len, origin, limit, p, chunk_size, count,
                    P, N, NP, BT, BP, BLOCK, 1, True, OPERAND,
                )  # fmt: skip
            else:
                _heads(
                    x, B, C, D, z, old_x, old_B, numbers, entering, out, s_x, s_B, s_x_row, s_B_row, s_C, s_z, s_out,
                    s_D_head, s_D_element, first, buffered, start, ring_len, origin, limit, p, chunk_size, count,
                    P, N, NP, BT, BP, BLOCK, STAGES, False, OPERAND,
                )  # fmt: skip
