"""Outputs of a chunk from the state that enters it and its own rows."""

import triton
import triton.language as tl

from replayssm.ssd.kernels.arithmetic import finished, weights
from replayssm.ssd.kernels.constants import PER_CALL
from replayssm.ssd.kernels.rows import buffered_rows, row_numbers, row_pointers, sequence_bounds, sequence_of


@triton.jit
def _chunk_rows(
    y, x, B, old_x, old_B, C_at, numbers, newest, m, p, p_in, wanted, first, buffered, start, origin, limit, m0,
    s_x, s_x_row, s_B, s_B_row, ring_len,
    N: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, CAREFUL: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """``y`` plus the chunk's rows up to ``m`` under their weights.

    With ``CAREFUL`` a row of x may be no number. Loads are then not read ahead: Triton 3.6 reads into the memory of a
    product that stands in a branch.
    """
    token = tl.arange(0, BT)
    for j0 in tl.range(0, m0 + BT, BT, num_stages=1 if CAREFUL else 2):
        j = j0 + token
        j_in = j < limit
        products = tl.zeros((BT, BT), tl.float32)
        B_at = row_pointers(B, s_B, old_B, s_B_row, origin, j, first, buffered, start, ring_len)
        for n0 in tl.static_range(0, N, BN):
            n = n0 + tl.arange(0, BN)
            C_rows = tl.load(C_at + n[None, :], mask=wanted[:, None] & (n < N)[None, :], other=0.0)
            B_rows = tl.load(B_at[:, None] + n[None, :], mask=j_in[:, None] & (n < N)[None, :], other=0.0)
            products = tl.dot(C_rows, tl.trans(B_rows), products, input_precision="ieee")
        older, _, dt_row, _ = row_numbers(numbers, j, j_in, BT)
        w = weights(products, newest[:, None], older[None, :], dt_row[None, :])
        w = tl.where(m[:, None] >= j[None, :], w, 0.0).to(OPERAND)
        x_at = row_pointers(x, s_x, old_x, s_x_row, origin, j, first, buffered, start, ring_len)
        x_rows = tl.load(x_at[:, None] + p[None, :], mask=j_in[:, None] & p_in[None, :], other=0.0)
        if CAREFUL:
            # Zero times a later row that is no number would reach an earlier output.
            if j0 == m0:
                before = y
                for i in range(0, BT):
                    seen = tl.where((token <= i)[:, None], x_rows, 0.0).to(OPERAND)
                    y = tl.where((token == i)[:, None], tl.dot(w, seen, before, input_precision="ieee"), y)
            else:
                y = tl.dot(w, x_rows, y, input_precision="ieee")
        else:
            y = tl.dot(w, x_rows, y, input_precision="ieee")
    return y


@triton.jit(do_not_specialize=PER_CALL)
def chunk_outputs(
    x, B, C, D, z, x_buffer, B_buffer, numbers, entering, flags, cu_seqlens, slots, num_buffered, ring_start, out,
    s_x, s_B, s_C, s_z, s_out, s_x_slot, s_x_row, s_B_slot, s_B_row, s_D_head, s_D_element,
    num_tokens, sequences, nheads, heads_per_group, chunk_size, spare, ring_len,
    P: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """Program (chunk, head, block of rows and columns)."""
    chunk = tl.program_id(0)
    sequence = chunk * 0
    if cu_seqlens is not None:
        sequence = sequence_of(chunk, cu_seqlens, sequences, chunk_size, spare, STEPS)
    first, length, first_chunk = sequence_bounds(sequence, cu_seqlens, num_tokens, chunk_size, spare)
    slot, buffered, start = buffered_rows(sequence, slots, num_buffered, ring_start)
    head = tl.program_id(1)
    group = head // heads_per_group
    columns: tl.constexpr = (P + BP - 1) // BP
    m0 = tl.program_id(2) // columns * BT
    origin = (chunk - first_chunk) * chunk_size
    limit = tl.minimum(chunk_size, buffered + length - origin)
    if (slot < 0) | (m0 >= limit) | (origin + m0 + BT <= buffered):
        return
    token = tl.arange(0, BT)
    m = m0 + token
    p = tl.program_id(2) % columns * BP + tl.arange(0, BP)
    p_in = p < P
    old_x = x_buffer
    old_B = B_buffer
    if x_buffer is not None:
        old_x += slot * s_x_slot + head * P
        old_B += slot * s_B_slot + group * N
    x += head * P
    B += group * N
    new_row = first + origin + m - buffered
    wanted = (m < limit) & (origin + m >= buffered)
    C_at = (C + group * N + new_row * s_C)[:, None]
    careful = tl.load(flags + (sequence * nheads + head) * columns + tl.program_id(2) % columns) != 0
    entering += (chunk.to(tl.int64) * nheads + head) * (P * N)
    numbers += (chunk.to(tl.int64) * nheads + head) * (chunk_size * 4)
    newest, _, _, decay = row_numbers(numbers, m, m < limit, BT)
    y = tl.zeros((BT, BP), tl.float32)
    for n0 in tl.static_range(0, N, BN):
        n = n0 + tl.arange(0, BN)
        C_rows = tl.load(C_at + n[None, :], mask=wanted[:, None] & (n < N)[None, :], other=0.0)
        state = tl.load(entering + n[:, None] * P + p[None, :], mask=p_in[None, :] & (n < N)[:, None], other=0.0)
        y = tl.dot(C_rows, state, y, input_precision="ieee")
    y = y * decay[:, None]
    if careful:
        y = _chunk_rows(
            y, x, B, old_x, old_B, C_at, numbers, newest, m, p, p_in, wanted, first, buffered, start, origin,
            limit, m0, s_x, s_x_row, s_B, s_B_row, ring_len, N, BT, BN, True, OPERAND,
        )  # fmt: skip
    else:
        y = _chunk_rows(
            y, x, B, old_x, old_B, C_at, numbers, newest, m, p, p_in, wanted, first, buffered, start, origin,
            limit, m0, s_x, s_x_row, s_B, s_B_row, ring_len, N, BT, BN, False, OPERAND,
        )  # fmt: skip
    at = new_row[:, None]
    mask = wanted[:, None] & p_in[None, :]
    skip = 0.0
    x_new = y
    gate = y
    if D is not None:
        skip = tl.load(D + head * s_D_head + p * s_D_element, mask=p_in, other=0.0).to(tl.float32)[None, :]
        x_new = tl.load(x + at * s_x + p[None, :], mask=mask, other=0.0)
    if z is not None:
        gate = tl.load(z + head * P + at * s_z + p[None, :], mask=mask, other=0.0)
    y = finished(y, x_new, skip, gate, D is not None, z is not None)
    tl.store(out + head * P + at * s_out + p[None, :], y.to(out.dtype.element_ty), mask=mask)
