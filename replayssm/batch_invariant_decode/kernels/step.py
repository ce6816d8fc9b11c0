"""The step for few lanes, in one launch: a program scores a lane's new tokens on rows of one head's state.

The state is the large operand of a product whose columns are the tokens. Nearly every lane stays within a chunk; then
the weights of the chunk's rows are formed in registers while the state is on its way.
"""

import triton
import triton.language as tl

from replayssm.batch_invariant_decode.kernels.fold import cross_chunks, skip_of, tokens_of
from replayssm.batch_invariant_decode.kernels.lanes import lane_rows, move_cursors, pad, row_pointers, store_rows
from replayssm.batch_invariant_decode.kernels.prepare import chunk_decays, chunk_products, store_weights
from replayssm.ssd.kernels.arithmetic import finished, holds_no_number, weights
from replayssm.ssd.kernels.constants import PER_CALL


@triton.jit
def _weighted(y, x_rows, w, target, seq_len, OPERAND: tl.constexpr, ONE: tl.constexpr):
    """``y`` [rows of the state, tokens] plus the chunk's rows of x under their weights."""
    careful = 0
    if not ONE:
        careful = holds_no_number(x_rows)
    if careful != 0:  # zero times a later token that is no number would reach an earlier one
        row = tl.arange(0, x_rows.shape[0])
        t = tl.arange(0, y.shape[1])
        before = y
        for k in range(0, seq_len):
            last = tl.sum(tl.where(t == k, target, 0), 0)
            seen = tl.where((row <= last)[:, None], x_rows, 0.0).to(OPERAND)
            y = tl.where((t == k)[None, :], tl.dot(tl.trans(seen), w, before, input_precision="ieee"), y)
    else:
        y = tl.dot(tl.trans(x_rows), w, y, input_precision="ieee")
    return y


@triton.jit(do_not_specialize=PER_CALL)
def step_kernel(
    ssm_state, shadow, x_rows, z_rows, dt_rows, B_rows, C_rows, x, z, dt, B, C, A, D, dt_bias, out,
    num_buffered, ring_start, slots, chunk_starts, arrivals, target_rows, chunk_flags,
    row_weights, row_decays, fold_scales, fold_decays,
    s_state, s_shadow, s_x_slot, s_z_slot, s_dt_slot, s_B_slot, s_C_slot, s_x_row, s_dt_row, s_B_row,
    s_x_lane, s_z_lane, s_dt_lane, s_B_lane, s_C_lane, s_x, s_z, s_dt, s_B, s_C, s_out_lane, s_out,
    s_D_head, s_D_element, seq_len, ring_len, nheads, ngroups, heads_per_group, chunk_size, dt_min, dt_max,
    P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    BP: tl.constexpr, FP: tl.constexpr, BT: tl.constexpr, TOGETHER: tl.constexpr, ONE: tl.constexpr,
    SOFTPLUS: tl.constexpr, LAZY: tl.constexpr, FLAT: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Program (lane, head, block of its rows; scoring, or storing the new rows)."""
    PARTS: tl.constexpr = (P + BP - 1) // BP
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % nheads
    lane = (tl.program_id(0) // (PARTS * nheads)).to(tl.int64)
    group = head // heads_per_group
    leads = (head == 0) & (part == 0) & (tl.program_id(1) == 0)
    p = part * BP + tl.arange(0, BP)
    p_in = p < P
    n = tl.arange(0, NP)
    t = tl.arange(0, TOKENS)
    row = tl.arange(0, ROWS)
    out += lane * s_out_lane + head * P
    slot, live, start = lane_rows(lane, slots, num_buffered, ring_start, chunk_starts, FLAT)
    if slot < 0:
        if not FLAT:
            pad(out, target_rows, chunk_flags, lane, leads, p, p_in, seq_len, s_out, TOKENS)
        return
    if not FLAT:
        tl.debug_barrier()
        tl.atomic_add(arrivals + lane, 1)  # this program has read the cursors
    end = live + seq_len
    if FLAT:
        folds = tl.load(chunk_flags + lane) != 0
        slow = folds
    else:
        folds = live >= chunk_size
        slow = end > chunk_size if LAZY else end >= chunk_size
    x += lane * s_x_lane + head * P
    dt += lane * s_dt_lane
    B += lane * s_B_lane + group * N
    C += lane * s_C_lane + group * N
    stored = live
    if z is not None:
        z += lane * s_z_lane + head * P
    if D is not None:
        D += head * s_D_head
    state = ssm_state + slot * s_state + head * (P * N)
    rounded = shadow
    read = state
    if shadow is not None:
        rounded += slot * s_shadow + head * (P * N)
        read = rounded
    if FLAT:
        slot = slot * 0
        stored = end
        x += (start + live) * s_x
        C += (start + live) * s_C
        if z is not None:
            z += (start + live) * s_z
    x_rows += slot * s_x_slot + head * P
    dt_rows += slot * s_dt_slot
    B_rows += slot * s_B_slot + group * N
    heads = head + tl.arange(0, 1)
    if not FLAT and tl.program_id(1) == 1:
        store_rows(
            x_rows, z_rows, dt_rows, B_rows, C_rows, x, z, dt, B, C, slot, head, group, head % heads_per_group == 0,
            part, s_x_row, s_dt_row, s_B_row, s_z_slot, s_C_slot, s_x, s_z, s_dt, s_B, s_C, start, live, seq_len,
            ring_len, P, N, NP, BP, TOGETHER,
        )  # fmt: skip
    elif slow or tl.float32 == OPERAND:  # fp32 weights go through memory: a product takes few of them at a time
        C_tile = tl.load(C + (t * s_C)[None, :] + n[:, None], mask=(t < seq_len)[None, :] & (n < N)[:, None], other=0.0)
        row_weights += lane * nheads * seq_len * ROWS
        row_decays += lane * nheads * seq_len
        fold_scales += lane * 2 * nheads * ROWS
        fold_decays += lane * 2 * nheads
        store_weights(
            dt_rows, B_rows, dt, B, C, A, dt_bias, row_weights, row_decays, fold_scales, fold_decays,
            s_dt_row, s_B_row, s_dt, s_B, s_C, start, live, seq_len, stored, ring_len, chunk_size, nheads, heads,
            heads >= 0, dt_min, dt_max, N, BN, ROWS, TOKENS, SOFTPLUS, FLAT, OPERAND,
        )  # fmt: skip
        tl.debug_barrier()
        cross_chunks(
            state, rounded, C_tile, x_rows, x, B_rows, B, z, D, out, row_weights + head * seq_len * ROWS,
            row_decays + head * seq_len, fold_scales + head * ROWS, fold_decays + head, folds, start, live, stored,
            s_x_row, s_x, s_B_row, s_B, s_z, s_out, s_D_element, seq_len, ring_len, nheads, chunk_size, part * BP, slow,
            P, N, NP, ROWS, BP, FP, BT, LAZY, FLAT, OPERAND,
        )  # fmt: skip
    else:
        # Every load is written as early as its address is known, so that the program waits for few of them in turn.
        in_state = p_in[:, None] & (n < N)[None, :]
        values = tl.load(read + p[:, None] * N + n[None, :], mask=in_state, other=0.0)
        x_at = row_pointers(x_rows, s_x_row, x, s_x, start, row, stored, ring_len)
        x_tile = tl.load(x_at[:, None] + p[None, :], mask=(row < end)[:, None] & p_in[None, :], other=0.0)
        C_tile = tl.load(C + (t * s_C)[None, :] + n[:, None], mask=(t < seq_len)[None, :] & (n < N)[:, None], other=0.0)
        is_new = p_in[:, None] & (t < seq_len)[None, :]
        skip = skip_of(D, p, p_in, s_D_element)
        x_new, gate = tokens_of(x, z, D, p, is_new, t, s_x, s_z)
        value, total = chunk_decays(
            dt_rows, dt, A, dt_bias, s_dt_row, s_dt, start, 0, end, stored, ring_len, chunk_size, heads, heads >= 0,
            dt_min, dt_max, ROWS, SOFTPLUS,
        )  # fmt: skip
        products = chunk_products(
            B_rows, B, C, s_B_row, s_B, s_C, start, 0, end, stored, ring_len, chunk_size, seq_len, N, BN, ROWS, TOKENS
        )
        y = tl.dot(values.to(OPERAND), C_tile, input_precision="ieee")
        target = live + t
        sums_row = tl.sum(total, 0)  # of the one head
        newest = tl.sum(tl.where(row[:, None] == target[None, :], sums_row[:, None], 0.0), 0)
        y = y * tl.exp(newest)[None, :]
        w = weights(products, newest[None, :], sums_row[:, None], tl.sum(value, 0)[:, None])
        w = tl.where((row[:, None] <= target[None, :]) & (t < seq_len)[None, :], w, 0.0).to(OPERAND)
        y = _weighted(y, x_tile, w, target, seq_len, OPERAND, ONE)
        y = finished(y, x_new, skip, gate, D is not None, z is not None)
        tl.store(out + (t * s_out)[None, :] + p[:, None], y.to(out.dtype.element_ty), mask=is_new)
    if not FLAT:
        if leads:
            tl.store(target_rows + lane, live - tl.where(folds, chunk_size, 0))
            tl.store(chunk_flags + lane, (folds if LAZY else slow).to(tl.int32))
        # The last program of the lane waits for the others, which wait for nobody, and moves the cursors.
        programs = PARTS * nheads
        if (tl.program_id(1) == 1) & (tl.program_id(0) % programs == programs - 1):
            arrived = tl.atomic_add(arrivals + lane, 0)
            while arrived < 2 * programs:
                arrived = tl.atomic_add(arrivals + lane, 0)
            tl.store(arrivals + lane, 0)
            move_cursors(
                num_buffered, ring_start, slot, slot >= 0, start, live, ring_len, chunk_size, folds, slow, LAZY
            )
