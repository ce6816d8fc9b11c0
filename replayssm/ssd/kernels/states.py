"""The walk over the chunks of a sequence with the state of one head."""

import triton
import triton.language as tl

from replayssm.ssd.kernels.arithmetic import fold_columns, fold_scale, holds_no_number
from replayssm.ssd.kernels.constants import PER_CALL
from replayssm.ssd.kernels.rows import buffered_rows, row_pointers, sequence_bounds


@triton.jit(do_not_specialize=PER_CALL)
def chunk_boundaries(
    x, B, x_buffer, B_buffer, dt, sums, cu_seqlens, slots, num_buffered, ring_start,
    initial_states, entering, flags, final_states, boundary_states, chunk_states,
    s_x, s_B, s_x_slot, s_x_row, s_B_slot, s_B_row, s_final, s_boundary, s_chunk,
    num_tokens, nheads, heads_per_group, chunk_size, spare, ring_len,
    P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, TILES: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """Program (sequence and head, block of the state): store the state that enters each chunk, rounded.

    ``entering`` is ``[chunks, nheads, P, N]`` of the dtype of x. ``flags``, int32 ``[chunks, nheads, blocks of P]``, is
    not zero where one of the chunk's rows may hold an x that is no number. Only the state between chunks is carried:
    the new part of each is a sum of its own, to which the decayed carry is added once.
    """
    sequence = tl.program_id(0) // nheads
    head = tl.program_id(0) % nheads
    group = head // heads_per_group
    slot, buffered, start = buffered_rows(sequence, slots, num_buffered, ring_start)
    if slot < 0:
        return
    first, length, first_chunk = sequence_bounds(sequence, cu_seqlens, num_tokens, chunk_size, spare)
    total = buffered + length
    columns: tl.constexpr = (N + BN - 1) // BN
    p = tl.program_id(1) // columns * BP + tl.arange(0, BP)
    n = tl.program_id(1) % columns * BN + tl.arange(0, BN)
    token = tl.arange(0, BT)
    inside = (p < P)[:, None] & (n < N)[None, :]
    block = p[:, None] * N + n[None, :] + head * (P * N)
    old_x = x_buffer
    old_B = B_buffer
    if x_buffer is not None:
        old_x += slot * s_x_slot + head * P
        old_B += slot * s_B_slot + group * N
    x += head * P
    B += group * N
    state = tl.zeros((BP, BN), tl.float32)
    if initial_states is not None:
        at = initial_states + sequence.to(tl.int64) * (nheads * P * N) + block
        state = tl.load(at, mask=inside, other=0.0)
    reached = state  # after the newest row
    chunks = tl.cdiv(total, chunk_size)
    for c in range(0, chunks):
        index = (first_chunk + c).to(tl.int64) * nheads
        limit = tl.minimum(chunk_size, total - c * chunk_size)
        tl.store(entering + index * (P * N) + block, state.to(OPERAND), mask=inside)
        rows = (index + head) * chunk_size
        newest = tl.load(sums + rows + chunk_size - 1)
        added = tl.zeros((BP, BN), tl.float32)
        for tile in tl.static_range(TILES):
            row = tile * BT + token
            position = c * chunk_size + row
            row_in = row < limit
            x_at = row_pointers(x, s_x, old_x, s_x_row, position, first, buffered, start, ring_len)
            B_at = row_pointers(B, s_B, old_B, s_B_row, position, first, buffered, start, ring_len)
            x_rows = tl.load(x_at[:, None] + p[None, :], mask=row_in[:, None] & (p < P)[None, :], other=0.0)
            B_rows = tl.load(B_at[:, None] + n[None, :], mask=row_in[:, None] & (n < N)[None, :], other=0.0)
            scale = fold_scale(
                newest,
                tl.load(sums + rows + row, mask=row_in, other=0.0),
                tl.load(dt + rows + row, mask=row_in, other=0.0),
            )
            scaled = fold_columns(B_rows, scale, OPERAND)
            added = tl.dot(tl.trans(x_rows), scaled, added, input_precision="ieee")
        reached = tl.fma(tl.exp(newest), state, added)
        if tl.program_id(1) % columns == 0:
            flag_at = (index + head) * (tl.num_programs(1) // columns) + tl.program_id(1) // columns
            tl.store(flags + flag_at, holds_no_number(added))
        if limit == chunk_size:
            state = reached
            if chunk_states is not None:
                number = (c + 1) * chunk_size
                if number > buffered:
                    row_out = first // chunk_size + sequence + c - buffered // chunk_size
                    tl.store(chunk_states + row_out * s_chunk + block, state, mask=inside)
    if boundary_states is not None:
        tl.store(boundary_states + sequence.to(tl.int64) * s_boundary + block, state, mask=inside)
    if final_states is not None:
        tl.store(final_states + sequence.to(tl.int64) * s_final + block, reached, mask=inside)
