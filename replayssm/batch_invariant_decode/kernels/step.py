"""The step: a program scores the new tokens of a lane on the states of some heads that share B and C.

Nearly every lane stays within a chunk. Then the rows' weights are formed in registers, and the program reads head after
head, each state as the large operand of a product whose columns are the tokens.
"""

import triton
import triton.language as tl

from replayssm.batch_invariant_decode.kernels.fold import cross_chunks, skip_of, tokens_of
from replayssm.batch_invariant_decode.kernels.lanes import append, lane_rows, ring_row, row_pointers
from replayssm.batch_invariant_decode.kernels.prepare import chunk_decays, chunk_products, store_weights
from replayssm.ssd.kernels.arithmetic import finished, holds_no_number, weights
from replayssm.ssd.kernels.constants import PER_CALL


@triton.jit
def _score_heads(
    state, early, early_x, C, products, value, total, x_at, x, z, D, out, causal, inside, target, p, p_in, inside_state,
    count, s_x, s_z, s_out, s_D_head, s_D_element, seq_len, P: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    CAREFUL: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """The heads from where the pointers stand; ``value`` and ``total`` [heads, rows] are dt and its sums."""
    HEADS: tl.constexpr = total.shape[0]
    h = tl.arange(0, HEADS)
    t = tl.arange(0, C.shape[1])
    row = tl.arange(0, total.shape[1])
    is_target = row[:, None] == target[None, :]
    is_new = p_in[:, None] & (t < seq_len)[None, :]
    for i in tl.range(0, count, num_stages=STAGES):
        if HEADS == 1:
            values = early
            x_rows = early_x
        else:
            values = tl.load(state + i * (P * N), mask=inside_state, other=0.0)
            x_rows = tl.load(x_at + i * P, mask=inside[:, None] & p_in[None, :], other=0.0)
        skip = skip_of(D if D is None else D + i * s_D_head, p, p_in, s_D_element)
        x_new, gate = tokens_of(x + i * P, z if z is None else z + i * P, D, p, is_new, t, s_x, s_z)
        sums_row = tl.sum(tl.where((h == i)[:, None], total, 0.0), 0)
        dt_row = tl.sum(tl.where((h == i)[:, None], value, 0.0), 0)
        newest = tl.sum(tl.where(is_target, sums_row[:, None], 0.0), 0)
        y = tl.dot(values.to(OPERAND), C, input_precision="ieee") * tl.exp(newest)[None, :]
        w = weights(products, newest[None, :], sums_row[:, None], dt_row[:, None])
        w = tl.where(causal, w, 0.0).to(OPERAND)
        if CAREFUL:  # zero times a later token that is no number would reach an earlier one
            before = y
            for k in range(0, seq_len):
                last = tl.sum(tl.where(t == k, target, 0), 0)
                seen = tl.where((row <= last)[:, None], x_rows, 0.0).to(OPERAND)
                y = tl.where((t == k)[None, :], tl.dot(tl.trans(seen), w, before, input_precision="ieee"), y)
        else:
            y = tl.dot(tl.trans(x_rows), w, y, input_precision="ieee")
        y = finished(y, x_new, skip, gate, D is not None, z is not None)
        tl.store(out + i * P + (t * s_out)[None, :] + p[:, None], y.to(out.dtype.element_ty), mask=is_new)


@triton.jit
def _pad(out, target_rows, chunk_flags, lane, leads, p, p_in, count, seq_len, s_out, P: tl.constexpr,
         TOKENS: tl.constexpr):  # fmt: skip
    """What an inactive lane returns: exact zeros."""
    t = tl.arange(0, TOKENS)
    for i in range(0, count):
        at = out + i * P + (t * s_out)[None, :] + p[:, None]
        zero = tl.zeros((p.shape[0], TOKENS), out.dtype.element_ty)
        tl.store(at, zero, mask=p_in[:, None] & (t < seq_len)[None, :])
    if leads:
        tl.store(target_rows + lane, -1)
        tl.store(chunk_flags + lane, 0)


@triton.jit(do_not_specialize=PER_CALL)
def step_kernel(
    ssm_state, shadow, x_rows, z_rows, dt_rows, B_rows, C_rows, x, z, dt, B, C, A, D, dt_bias, out,
    num_buffered, ring_start, slots, chunk_starts, arrivals, target_rows, chunk_flags,
    row_weights, row_decays, fold_scales, fold_decays,
    s_state, s_shadow, s_x_slot, s_z_slot, s_dt_slot, s_B_slot, s_C_slot, s_x_row, s_dt_row, s_B_row,
    s_x_lane, s_z_lane, s_dt_lane, s_B_lane, s_C_lane, s_x, s_z, s_dt, s_B, s_C, s_out_lane, s_out,
    s_D_head, s_D_element, seq_len, ring_len, nheads, ngroups, heads_per_group, chunk_size, dt_min, dt_max,
    P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, BP: tl.constexpr, FP: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr,
    TOGETHER: tl.constexpr, ONE: tl.constexpr, SOFTPLUS: tl.constexpr, LAZY: tl.constexpr, FLAT: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """Program (lane, group, some of its heads, block of their rows)."""
    PARTS: tl.constexpr = (P + BP - 1) // BP
    blocks = tl.cdiv(heads_per_group, HEADS)
    part = tl.program_id(0) % PARTS
    block = tl.program_id(0) // PARTS % blocks
    group = tl.program_id(0) // (PARTS * blocks) % ngroups
    lane = (tl.program_id(0) // (PARTS * blocks * ngroups)).to(tl.int64)
    first_head = group * heads_per_group + block * HEADS
    count = tl.minimum(HEADS, heads_per_group - block * HEADS)
    leads = (group == 0) & (block == 0) & (part == 0)
    p = part * BP + tl.arange(0, BP)
    p_in = p < P
    n = tl.arange(0, NP)
    t = tl.arange(0, TOKENS)
    out += lane * s_out_lane + first_head * P
    slot, live, start = lane_rows(lane, slots, num_buffered, ring_start, chunk_starts, FLAT)
    if slot < 0:
        if not FLAT:
            _pad(out, target_rows, chunk_flags, lane, leads, p, p_in, count, seq_len, s_out, P, TOKENS)
        return
    in_state = p_in[:, None] & (n < N)[None, :]
    state = ssm_state + slot * s_state + first_head * (P * N)
    rounded = shadow
    read = state
    if shadow is not None:
        rounded += slot * s_shadow + first_head * (P * N)
        read = rounded
    read_at = read + p[:, None] * N + n[None, :]
    early = None
    if HEADS == 1:
        early = tl.load(read_at, mask=in_state, other=0.0)
    x += lane * s_x_lane + first_head * P
    dt += lane * s_dt_lane
    B += lane * s_B_lane + group * N
    C += lane * s_C_lane + group * N
    stored = live
    if FLAT:
        slot = slot * 0
        stored = live + 1
        x += (start + live) * s_x
        C += (start + live) * s_C
    if z is not None:
        z += lane * s_z_lane + first_head * P
        if FLAT:
            z += (start + live) * s_z
    if D is not None:
        D += first_head * s_D_head
    x_rows += slot * s_x_slot + first_head * P
    dt_rows += slot * s_dt_slot
    B_rows += slot * s_B_slot + group * N
    C_at = C + (t * s_C)[None, :] + n[:, None]
    C_tile = tl.load(C_at, mask=(t < seq_len)[None, :] & (n < N)[:, None], other=0.0)
    h = tl.arange(0, HEADS)
    head = first_head + h
    h_in = h < count
    end = live + seq_len
    if FLAT:
        folds = tl.load(chunk_flags + lane) != 0
        slow = folds
    else:
        folds = live >= chunk_size
        slow = end > chunk_size if LAZY else end >= chunk_size
    if slow:
        row_weights += lane * nheads * seq_len * ROWS
        row_decays += lane * nheads * seq_len
        fold_scales += lane * 2 * nheads * ROWS
        fold_decays += lane * 2 * nheads
        store_weights(
            dt_rows, B_rows, dt, B, C, A, dt_bias, row_weights, row_decays, fold_scales, fold_decays,
            s_dt_row, s_B_row, s_dt, s_B, s_C, start, live, seq_len, stored, ring_len, chunk_size, nheads, head, h_in,
            dt_min, dt_max, N, BN, ROWS, TOKENS, SOFTPLUS, FLAT, OPERAND,
        )  # fmt: skip
        tl.debug_barrier()
        for i in range(0, count):
            number = first_head + i
            cross_chunks(
                state + i * (P * N), rounded if shadow is None else rounded + i * (P * N), C_tile, x_rows + i * P,
                x + i * P, B_rows, B, z if z is None else z + i * P, D if D is None else D + i * s_D_head, out + i * P,
                row_weights + number * seq_len * ROWS, row_decays + number * seq_len, fold_scales + number * ROWS,
                fold_decays + number, folds, start, live, stored, s_x_row, s_x, s_B_row, s_B, s_z, s_out, s_D_element,
                seq_len, ring_len, nheads, chunk_size, part * BP, P, N, NP, ROWS, BP, FP, BT, LAZY, FLAT, OPERAND,
            )  # fmt: skip
    else:
        row = tl.arange(0, ROWS)
        inside = row < end
        target = live + t
        causal = (row[:, None] <= target[None, :]) & (t < seq_len)[None, :]
        x_at = row_pointers(x_rows, s_x_row, x, s_x, start, row, stored, ring_len)[:, None] + p[None, :]
        early_x = None
        if HEADS == 1:
            early_x = tl.load(x_at, mask=inside[:, None] & p_in[None, :], other=0.0)
        value, total = chunk_decays(
            dt_rows, dt, A, dt_bias, s_dt_row, s_dt, start, 0, end, stored, ring_len, chunk_size, head, h_in,
            dt_min, dt_max, ROWS, SOFTPLUS,
        )  # fmt: skip
        products = chunk_products(
            B_rows, B, C, s_B_row, s_B, s_C, start, 0, end, stored, ring_len, chunk_size, seq_len, N, BN, ROWS, TOKENS
        )
        careful = 0
        if not ONE:
            for i in range(0, count):
                new = tl.load(x + i * P + (t * s_x)[:, None] + p[None, :], mask=(t < seq_len)[:, None] & p_in[None, :])
                careful = tl.maximum(
                    careful, holds_no_number(tl.where((t < seq_len)[:, None] & p_in[None, :], new, 0.0))
                )
        if careful != 0:
            _score_heads(
                read_at, early, early_x, C_tile, products, value, total, x_at, x, z, D, out, causal, inside, target, p,
                p_in, in_state, count, s_x, s_z, s_out, s_D_head, s_D_element, seq_len, P, N, 1, True, OPERAND,
            )  # fmt: skip
        else:
            _score_heads(
                read_at, early, early_x, C_tile, products, value, total, x_at, x, z, D, out, causal, inside, target, p,
                p_in, in_state, count, s_x, s_z, s_out, s_D_head, s_D_element, seq_len, P, N, STAGES, False, OPERAND,
            )  # fmt: skip
    if not FLAT:
        _store_rows(
            x_rows, z_rows, dt_rows, B_rows, C_rows, x, z, dt, B, C, slot, first_head, group, count, block, part,
            s_x_row, s_dt_row, s_B_row, s_z_slot, s_C_slot, s_x, s_z, s_dt, s_B, s_C, start, live, seq_len, ring_len,
            P, N, NP, HEADS, BP, TOGETHER,
        )  # fmt: skip
        if leads:
            moved = tl.where(folds, chunk_size, 0)
            tl.store(target_rows + lane, live - moved)
            tl.store(chunk_flags + lane, (folds if LAZY else slow).to(tl.int32))
        # The last program of the lane moves the cursors, when all have read them.
        tl.debug_barrier()
        programs = PARTS * blocks * ngroups
        if tl.atomic_add(arrivals + lane, 1) == programs - 1:
            tl.store(arrivals + lane, 0)
            if LAZY:
                passed = tl.where(folds, chunk_size, 0)
                tl.store(ring_start + slot, ring_row(start, passed, ring_len).to(tl.int32))
                tl.store(num_buffered + slot, live - passed)
            else:
                tl.store(num_buffered + slot, tl.where(slow, 0, live + 1))


@triton.jit
def _store_rows(
    x_rows, z_rows, dt_rows, B_rows, C_rows, x, z, dt, B, C, slot, first_head, group, count, block, part,
    s_x_row, s_dt_row, s_B_row, s_z_slot, s_C_slot, s_x, s_z, s_dt, s_B, s_C, start, live, seq_len, ring_len,
    P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, HEADS: tl.constexpr, BP: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Store the new rows behind the live ones, which no program reads in this call."""
    first = part * BP
    width = tl.minimum(BP, P - first)
    for i in range(0, count):
        append(x_rows + i * P, x + i * P, s_x_row, s_x, start, live, seq_len, ring_len, first, width, TOGETHER, BP)
        if z_rows is not None and z is not None:
            z_at = z_rows + slot * s_z_slot + (first_head + i) * P
            append(z_at, z + i * P, s_x_row, s_z, start, live, seq_len, ring_len, first, width, TOGETHER, BP)
    if part == 0:
        append(dt_rows, dt, s_dt_row, s_dt, start, live, seq_len, ring_len, first_head, count, TOGETHER, HEADS)
        if block == 0:
            append(B_rows, B, s_B_row, s_B, start, live, seq_len, ring_len, 0, N, TOGETHER, NP)
            if C_rows is not None:
                C_to = C_rows + slot * s_C_slot + group * N
                append(C_to, C, s_B_row, s_C, start, live, seq_len, ring_len, 0, N, TOGETHER, NP)
