"""The walk over the chunks of a sequence with the state of one head."""

import triton
import triton.language as tl

from replayssm.ssd.kernels.arithmetic import holds_no_number, multiply, times
from replayssm.ssd.kernels.constants import PER_CALL
from replayssm.ssd.kernels.rows import buffered_rows, row_numbers, row_pointers, sequence_bounds


@triton.jit
def _add_rows(
    added, x, B, old_x, old_B, rows, row, limit, n, p, origin, first, buffered, start, s_x, s_x_row, s_B, s_B_row,
    ring_len, P: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """``added`` [columns, rows of the state] plus rows ``row`` of a chunk."""
    row_in = row < limit
    _, scale, _, _ = row_numbers(rows, row, row_in, BT)
    B_at = row_pointers(B, s_B, old_B, s_B_row, origin, row, first, buffered, start, ring_len)
    x_at = row_pointers(x, s_x, old_x, s_x_row, origin, row, first, buffered, start, ring_len)
    B_rows = tl.load(B_at[None, :] + n[:, None], mask=row_in[None, :] & (n < N)[:, None], other=0.0)
    x_rows = tl.load(x_at[:, None] + p[None, :], mask=row_in[:, None] & (p < P)[None, :], other=0.0)
    scaled = times(B_rows.to(tl.float32), scale[None, :], OPERAND).to(OPERAND)
    return multiply(scaled, x_rows, added, False)


@triton.jit(do_not_specialize=PER_CALL)
def chunk_boundaries(
    x, B, x_buffer, B_buffer, numbers, cu_seqlens, slots, num_buffered, ring_start,
    initial_states, entering, flags, final_states, boundary_states, chunk_states,
    s_x, s_B, s_x_slot, s_x_row, s_B_slot, s_B_row, s_final, s_boundary, s_chunk,
    num_tokens, nheads, heads_per_group, chunk_size, spare, ring_len,
    P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, TILES: tl.constexpr,
    STAGES: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Program (sequence and head, block of the state): store the state that enters each chunk, rounded.

    ``entering`` is ``[chunks, nheads, N, P]`` of the dtype of x: transposed, so that the scaled rows of B are the
    operand that a product takes from registers. ``flags``, int32 ``[sequences, nheads, blocks of P]``, is not zero
    where a row may hold an x that is no number: what is none stays so in the state. Only the state between chunks is
    carried: the new part of each is a sum of its own, to which the decayed carry is added once.
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
    inside = (n < N)[:, None] & (p < P)[None, :]
    block = p[None, :] * N + n[:, None] + head * (P * N)
    entering += head * (P * N) + n[:, None] * P + p[None, :]
    old_x = x_buffer
    old_B = B_buffer
    if x_buffer is not None:
        old_x += slot * s_x_slot + head * P
        old_B += slot * s_B_slot + group * N
    x += head * P
    B += group * N
    state = tl.zeros((BN, BP), tl.float32)
    if initial_states is not None:
        at = initial_states + sequence.to(tl.int64) * (nheads * P * N) + block
        state = tl.load(at, mask=inside, other=0.0)
    boundary_at = boundary_states
    if boundary_states is not None:
        boundary_at = boundary_states + sequence.to(tl.int64) * s_boundary + block
    chunks = tl.cdiv(total, chunk_size)
    for c in tl.range(0, chunks, num_stages=STAGES):
        index = (first_chunk + c).to(tl.int64) * nheads
        origin = c * chunk_size
        limit = tl.minimum(chunk_size, total - origin)
        rows = numbers + (index + head) * (chunk_size * 4)
        decay = tl.load(rows + chunk_size * 4 - 1)
        added = tl.zeros((BN, BP), tl.float32)
        if tl.float32 == OPERAND:
            for row in tl.range(0, limit, BT, num_stages=STAGES):
                added = _add_rows(
                    added, x, B, old_x, old_B, rows, row + token, limit, n, p, origin, first, buffered, start,
                    s_x, s_x_row, s_B, s_B_row, ring_len, P, N, BT, OPERAND,
                )  # fmt: skip
        else:
            for tile in tl.static_range(TILES):
                added = _add_rows(
                    added, x, B, old_x, old_B, rows, tile * BT + token, limit, n, p, origin, first, buffered, start,
                    s_x, s_x_row, s_B, s_B_row, ring_len, P, N, BT, OPERAND,
                )  # fmt: skip
        tl.store(entering + index * (P * N), state.to(OPERAND), mask=inside)
        if boundary_states is not None:  # noqa: SIM102 - one is known when compiling, the other is not
            if limit < chunk_size:
                tl.store(boundary_at, state, mask=inside)
        state = tl.fma(decay, state, added)
        if chunk_states is not None:
            number = origin + chunk_size
            if (limit == chunk_size) & (number > buffered):
                row_out = first // chunk_size + sequence + c - buffered // chunk_size
                tl.store(chunk_states + row_out * s_chunk + block, state, mask=inside)
    if boundary_states is not None:  # noqa: SIM102 - one is known when compiling, the other is not
        if total == chunks * chunk_size:
            tl.store(boundary_at, state, mask=inside)
    if final_states is not None:
        tl.store(final_states + sequence.to(tl.int64) * s_final + block, state, mask=inside)
    if tl.program_id(1) % columns == 0:
        flag_at = tl.program_id(0) * (tl.num_programs(1) // columns) + tl.program_id(1) // columns
        tl.store(flags + flag_at, holds_no_number(state))
