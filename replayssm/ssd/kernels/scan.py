"""Outputs of a chunk from the state that enters it and its own rows."""

import triton
import triton.language as tl

from replayssm.ssd.kernels.arithmetic import finished, multiply, times, weights
from replayssm.ssd.kernels.constants import PER_CALL
from replayssm.ssd.kernels.rows import chunk_bounds, row_numbers, row_pointers


@triton.jit
def _chunk_rows(
    y, x, old_x, products, numbers, newest, m, p, p_in, wanted, first, buffered, start, origin, limit, m0,
    s_x, s_x_row, ring_len,
    ROWS: tl.constexpr, BT: tl.constexpr, BJ: tl.constexpr, CAREFUL: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """``y`` plus the chunk's rows up to ``m`` under their weights.

    With ``CAREFUL`` a row of x may be no number. Loads are then not read ahead: Triton 3.6 reads into the memory of a
    product that stands in a branch.
    """
    for j0 in tl.range(0, m0 + BT, BJ, num_stages=1 if CAREFUL else 2):
        j = j0 + tl.arange(0, BJ)
        j_in = j < limit
        product = tl.load(products + m[:, None] * ROWS + j[None, :], mask=wanted[:, None] & j_in[None, :], other=0.0)
        older, _, dt_row, _ = row_numbers(numbers, j, j_in, BJ)
        w = weights(product, newest[:, None], older[None, :], dt_row[None, :])
        w = tl.where(m[:, None] >= j[None, :], w, 0.0).to(OPERAND)
        x_at = row_pointers(x, s_x, old_x, s_x_row, origin, j, first, buffered, start, ring_len)
        x_rows = tl.load(x_at[:, None] + p[None, :], mask=j_in[:, None] & p_in[None, :], other=0.0)
        if CAREFUL:
            # Zero times a later row that is no number would reach an earlier output.
            if j0 + BJ > m0:
                before = y
                for i in range(m0, m0 + BT):
                    seen = tl.where((j <= i)[:, None], x_rows, 0.0).to(OPERAND)
                    y = tl.where((m == i)[:, None], multiply(w, seen, before, False), y)
            else:
                y = multiply(w, x_rows, y, False)
        else:
            y = multiply(w, x_rows, y, False)
    return y


@triton.jit(do_not_specialize=PER_CALL)
def chunk_outputs(
    x, C, D, z, x_buffer, products, numbers, entering, flags, cu_seqlens, slots, num_buffered, ring_start, out,
    s_x, s_C, s_z, s_out, s_x_slot, s_x_row, s_D_head, s_D_element,
    num_tokens, sequences, nheads, heads_per_group, chunk_size, spare, ring_len,
    P: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BT: tl.constexpr, BJ: tl.constexpr, BP: tl.constexpr,
    BN: tl.constexpr, STEPS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Program (chunk, head, block of rows and columns)."""
    chunk = tl.program_id(0)
    sequence, first, length, first_chunk, slot, buffered, start = chunk_bounds(
        chunk, cu_seqlens, slots, num_buffered, ring_start, num_tokens, sequences, chunk_size, spare, STEPS
    )
    head = tl.program_id(1)
    group = head // heads_per_group
    columns: tl.constexpr = (P + BP - 1) // BP
    m0 = tl.program_id(2) // columns * BT
    origin = (chunk - first_chunk) * chunk_size
    limit = tl.minimum(chunk_size, buffered + length - origin)
    if (slot < 0) | (m0 >= limit) | (origin + m0 + BT <= buffered):
        return
    m = m0 + tl.arange(0, BT)
    p = tl.program_id(2) % columns * BP + tl.arange(0, BP)
    p_in = p < P
    old_x = x_buffer
    if x_buffer is not None:
        old_x += slot * s_x_slot + head * P
    x += head * P
    new_row = first + origin + m - buffered
    wanted = (m < limit) & (origin + m >= buffered)
    C_at = (C + group * N + new_row * s_C)[:, None]
    products += (chunk.to(tl.int64) * (nheads // heads_per_group) + group) * (ROWS * ROWS)
    careful = tl.load(flags + (sequence * nheads + head) * columns + tl.program_id(2) % columns) != 0
    entering += (chunk.to(tl.int64) * nheads + head) * (P * N)
    numbers += (chunk.to(tl.int64) * nheads + head) * (chunk_size * 4)
    newest, _, _, decay = row_numbers(numbers, m, m < limit, BT)
    y = tl.zeros((BT, BP), tl.float32)
    for n0 in tl.static_range(0, N, BN):
        n = n0 + tl.arange(0, BN)
        C_rows = tl.load(C_at + n[None, :], mask=wanted[:, None] & (n < N)[None, :], other=0.0)
        state = tl.load(entering + n[:, None] * P + p[None, :], mask=p_in[None, :] & (n < N)[:, None], other=0.0)
        y = multiply(C_rows, state, y, False)
    y = times(y, decay[:, None], OPERAND)
    if careful:
        y = _chunk_rows(
            y, x, old_x, products, numbers, newest, m, p, p_in, wanted, first, buffered, start, origin, limit, m0,
            s_x, s_x_row, ring_len, ROWS, BT, BJ, True, OPERAND,
        )  # fmt: skip
    else:
        y = _chunk_rows(
            y, x, old_x, products, numbers, newest, m, p, p_in, wanted, first, buffered, start, origin, limit, m0,
            s_x, s_x_row, ring_len, ROWS, BT, BJ, False, OPERAND,
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
