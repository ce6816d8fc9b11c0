"""Outputs of a chunk for several heads of a group, which share the products ``C_t B_j`` in registers."""

import triton
import triton.language as tl

from replayssm.ssd.kernels.arithmetic import finished, weights
from replayssm.ssd.kernels.constants import PER_CALL
from replayssm.ssd.kernels.rows import buffered_rows, row_pointers, sequence_bounds, sequence_of


@triton.jit
def _heads(
    x, B, C, D, z, old_x, old_B, dt, sums, entering, out, s_x, s_B, s_x_row, s_B_row, s_C, s_z, s_out, s_D_head,
    s_D_element, first, buffered, start, ring_len, origin, limit, m0, p, chunk_size, count,
    P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BT: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
    CAREFUL: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """``count`` heads from where the pointers stand, rows ``m0..m0 + BT`` of the chunk from rows ``0..K``."""
    n = tl.arange(0, NP)
    m = m0 + tl.arange(0, BT)
    j = tl.arange(0, K)
    p_in = p < P
    j_in = j < limit
    wanted = (m < limit) & (origin + m >= buffered)
    new_row = (first + origin + m - buffered)[:, None]
    C_rows = tl.load(C + new_row * s_C + n[None, :], mask=wanted[:, None] & (n < N)[None, :], other=0.0)
    B_at = row_pointers(B, s_B, old_B, s_B_row, origin + j, first, buffered, start, ring_len)
    B_rows = tl.load(B_at[:, None] + n[None, :], mask=j_in[:, None] & (n < N)[None, :], other=0.0)
    products = tl.dot(C_rows, tl.trans(B_rows), input_precision="ieee")
    x_at = row_pointers(x, s_x, old_x, s_x_row, origin + j, first, buffered, start, ring_len)[:, None] + p[None, :]
    stored = wanted[:, None] & p_in[None, :]
    for i in tl.range(0, count, num_stages=STAGES):
        newest = tl.load(sums + i * chunk_size + m, mask=m < limit, other=0.0)
        older = tl.load(sums + i * chunk_size + j, mask=j_in, other=0.0)
        dt_row = tl.load(dt + i * chunk_size + j, mask=j_in, other=0.0)
        state_at = entering + i * (P * N) + p[None, :] * N + n[:, None]
        state = tl.load(state_at, mask=p_in[None, :] & (n < N)[:, None], other=0.0)
        y = tl.dot(C_rows, state, input_precision="ieee") * tl.exp(newest)[:, None]
        w = weights(products, newest[:, None], older[None, :], dt_row[None, :])
        w = tl.where(m[:, None] >= j[None, :], w, 0.0).to(OPERAND)
        x_rows = tl.load(x_at + i * P, mask=j_in[:, None] & p_in[None, :], other=0.0)
        if CAREFUL:  # zero times a later row that is no number would reach an earlier output
            before = y
            for r in range(0, BT):
                seen = tl.where((j <= m0 + r)[:, None], x_rows, 0.0).to(OPERAND)
                y = tl.where((m == m0 + r)[:, None], tl.dot(w, seen, before, input_precision="ieee"), y)
        else:
            y = tl.dot(w, x_rows, y, input_precision="ieee")
        skip = 0.0
        x_new = y
        gate = y
        if D is not None:
            skip_at = D + i * s_D_head + p * s_D_element
            skip = tl.load(skip_at, mask=p_in, other=0.0).to(tl.float32)[None, :]
            x_new = tl.load(x + i * P + new_row * s_x + p[None, :], mask=stored, other=0.0)
        if z is not None:
            gate = tl.load(z + i * P + new_row * s_z + p[None, :], mask=stored, other=0.0)
        y = finished(y, x_new, skip, gate, D is not None, z is not None)
        tl.store(out + i * P + new_row * s_out + p[None, :], y.to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=PER_CALL)
def group_outputs(
    x, B, C, D, z, x_buffer, B_buffer, dt, sums, entering, flags, cu_seqlens, slots, num_buffered, ring_start, out,
    s_x, s_B, s_C, s_z, s_out, s_x_slot, s_x_row, s_B_slot, s_B_row, s_D_head, s_D_element,
    num_tokens, sequences, nheads, heads_per_group, chunk_size, spare, ring_len,
    P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, FLAGS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Program (chunk, some heads of a group, block of rows and columns)."""
    chunk = tl.program_id(0)
    sequence = chunk * 0
    if cu_seqlens is not None:
        sequence = sequence_of(chunk, cu_seqlens, sequences, chunk_size, spare, STEPS)
    first, length, first_chunk = sequence_bounds(sequence, cu_seqlens, num_tokens, chunk_size, spare)
    slot, buffered, start = buffered_rows(sequence, slots, num_buffered, ring_start)
    blocks = tl.cdiv(heads_per_group, HEADS)
    group = tl.program_id(1) // blocks
    begin = tl.program_id(1) % blocks * HEADS
    count = tl.minimum(HEADS, heads_per_group - begin)
    head = group * heads_per_group + begin
    PARTS: tl.constexpr = (P + BP - 1) // BP
    TILES: tl.constexpr = ROWS // BT
    part = tl.program_id(2) % PARTS
    m0 = tl.program_id(2) // PARTS * BT
    origin = (chunk - first_chunk) * chunk_size
    limit = tl.minimum(chunk_size, buffered + length - origin)
    if (slot < 0) | (m0 >= limit) | (origin + m0 + BT <= buffered):
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
    dt += index * chunk_size
    sums += index * chunk_size
    p = part * BP + tl.arange(0, BP)
    h = tl.arange(0, FLAGS)
    careful = tl.max(tl.load(flags + (index + h) * PARTS + part, mask=h < count, other=0), 0)
    if careful != 0:
        _heads(
            x, B, C, D, z, old_x, old_B, dt, sums, entering, out, s_x, s_B, s_x_row, s_B_row, s_C, s_z, s_out, s_D_head,
            s_D_element, first, buffered, start, ring_len, origin, limit, m0, p, chunk_size, count,
            P, N, NP, BT, ROWS, 1, True, OPERAND,
        )  # fmt: skip
    else:
        for tile in tl.static_range(TILES):
            if m0 == tile * BT:
                _heads(
                    x, B, C, D, z, old_x, old_B, dt, sums, entering, out, s_x, s_B, s_x_row, s_B_row, s_C, s_z, s_out,
                    s_D_head, s_D_element, first, buffered, start, ring_len, origin, limit, m0, p, chunk_size, count,
                    P, N, NP, BT, (tile + 1) * BT, STAGES, False, OPERAND,
                )  # fmt: skip
