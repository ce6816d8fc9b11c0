"""The step for many lanes, in two launches: the first forms the rows' weights, the second only streams the states.

Where a batch fills the device, a head's weights would cost more time than its state if every program formed its own.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.batch_invariant_decode.kernels.fold import cross_chunks, score, skip_of, tokens_of
from replayssm.batch_invariant_decode.kernels.lanes import lane_rows, move_cursors, pad, store_rows
from replayssm.batch_invariant_decode.kernels.prepare import store_weights
from replayssm.ssd.kernels.arithmetic import finished, holds_no_number
from replayssm.ssd.kernels.constants import PER_CALL


@triton.jit(do_not_specialize=PER_CALL)
def prepare_kernel(
    x_rows, z_rows, dt_rows, B_rows, C_rows, x, z, dt, B, C, A, dt_bias, num_buffered, ring_start, slots,
    cursors, row_weights, row_decays, fold_scales, fold_decays,
    s_x_slot, s_z_slot, s_dt_slot, s_B_slot, s_C_slot, s_x_row, s_dt_row, s_B_row,
    s_x_lane, s_z_lane, s_dt_lane, s_B_lane, s_C_lane, s_x, s_z, s_dt, s_B, s_C,
    seq_len, ring_len, nheads, ngroups, heads_per_group, chunk_size, dt_min, dt_max,
    P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, BP: tl.constexpr, TOGETHER: tl.constexpr, SOFTPLUS: tl.constexpr, OVERLAP: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """Program (lane, group, some of its heads; forming weights, or storing the new rows)."""
    if OVERLAP:
        gdc_launch_dependents()
    blocks = tl.cdiv(heads_per_group, HEADS)
    block = tl.program_id(0) % blocks
    group = tl.program_id(0) // blocks % ngroups
    lane = (tl.program_id(0) // (blocks * ngroups)).to(tl.int64)
    slot, live, start = lane_rows(lane, slots, num_buffered, ring_start, None, False)
    if slot < 0:
        return
    first_head = group * heads_per_group + block * HEADS
    count = tl.minimum(HEADS, heads_per_group - block * HEADS)
    x += lane * s_x_lane + first_head * P
    dt += lane * s_dt_lane
    B += lane * s_B_lane + group * N
    C += lane * s_C_lane + group * N
    x_rows += slot * s_x_slot + first_head * P
    dt_rows += slot * s_dt_slot
    B_rows += slot * s_B_slot + group * N
    if z is not None:
        z += lane * s_z_lane + first_head * P
    if tl.program_id(1) == 1:
        store_rows(
            x_rows, z_rows, dt_rows, B_rows, C_rows, x, z, dt, B, C, slot, first_head, group, count, block, 0,
            s_x_row, s_dt_row, s_B_row, s_z_slot, s_C_slot, s_x, s_z, s_dt, s_B, s_C, start, live, seq_len, ring_len,
            P, N, NP, HEADS, BP, TOGETHER,
        )  # fmt: skip
    else:
        if (group == 0) & (block == 0):  # the other launch moves the originals while it still reads
            tl.store(cursors + 2 * lane, start.to(tl.int32))
            tl.store(cursors + 2 * lane + 1, live)
        h = tl.arange(0, HEADS)
        store_weights(
            dt_rows, B_rows, dt, B, C, A, dt_bias, row_weights + lane * nheads * seq_len * ROWS,
            row_decays + lane * nheads * seq_len, fold_scales + lane * 2 * nheads * ROWS,
            fold_decays + lane * 2 * nheads, s_dt_row, s_B_row, s_dt, s_B, s_C, start, live, seq_len, live, ring_len,
            chunk_size, nheads, first_head + h, h < count, dt_min, dt_max, N, BN, ROWS, TOKENS, SOFTPLUS, False,
            OPERAND,
        )  # fmt: skip


@triton.jit(do_not_specialize=PER_CALL)
def score_kernel(
    ssm_state, shadow, x_rows, B_rows, x, z, B, C, D, out, num_buffered, ring_start, slots, target_rows, chunk_flags,
    cursors, row_weights, row_decays, fold_scales, fold_decays,
    s_state, s_shadow, s_x_slot, s_B_slot, s_x_row, s_B_row, s_x_lane, s_z_lane, s_B_lane, s_C_lane,
    s_x, s_z, s_B, s_C, s_out_lane, s_out, s_D_head, s_D_element,
    seq_len, ring_len, nheads, heads_per_group, chunk_size,
    P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    BP: tl.constexpr, FP: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr, ONE: tl.constexpr,
    LAZY: tl.constexpr, OVERLAP: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Program (lane, head, block of rows). What the other launch leaves is read behind ``gdc_wait``."""
    PARTS: tl.constexpr = (P + BP - 1) // BP
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % nheads
    lane = (tl.program_id(0) // (PARTS * nheads)).to(tl.int64)
    group = head // heads_per_group
    leads = (head == 0) & (part == 0)
    p = part * BP + tl.arange(0, BP)
    p_in = p < P
    t = tl.arange(0, TOKENS)
    out += lane * s_out_lane + head * P
    slot = tl.load(slots + lane).to(tl.int64)
    if slot < 0:
        if OVERLAP:
            gdc_wait()
        pad(out, target_rows, chunk_flags, lane, leads, p, p_in, seq_len, s_out, TOKENS)
        return
    state = ssm_state + slot * s_state + head * (P * N)
    rounded = shadow
    read = state
    if shadow is not None:
        rounded += slot * s_shadow + head * (P * N)
        read = rounded
    C += lane * s_C_lane + group * N
    carried = tl.zeros((BP, TOKENS), tl.float32)
    for n0 in tl.range(0, N, BN, num_stages=STAGES):
        n = n0 + tl.arange(0, BN)
        values = tl.load(read + p[:, None] * N + n[None, :], mask=p_in[:, None] & (n < N)[None, :], other=0.0)
        C_at = C + (t * s_C)[None, :] + n[:, None]
        C_tile = tl.load(C_at, mask=(t < seq_len)[None, :] & (n < N)[:, None], other=0.0)
        carried = tl.dot(values.to(OPERAND), C_tile, carried, input_precision="ieee")
    x += lane * s_x_lane + head * P
    x_rows += slot * s_x_slot + head * P
    row_weights += (lane * nheads + head) * seq_len * ROWS
    row_decays += (lane * nheads + head) * seq_len
    if z is not None:
        z += lane * s_z_lane + head * P
    if D is not None:
        D += head * s_D_head
    if OVERLAP:
        gdc_wait()
    start = tl.load(cursors + 2 * lane).to(tl.int64)
    live = tl.load(cursors + 2 * lane + 1)
    end = live + seq_len
    folds = live >= chunk_size
    full = end > chunk_size if LAZY else end >= chunk_size
    if full:
        n_all = tl.arange(0, NP)
        C_all = C + (t * s_C)[None, :] + n_all[:, None]
        cross_chunks(
            state, rounded, tl.load(C_all, mask=(t < seq_len)[None, :] & (n_all < N)[:, None], other=0.0), x_rows, x,
            B_rows + slot * s_B_slot + group * N, B + lane * s_B_lane + group * N, z, D, out, row_weights, row_decays,
            fold_scales + (lane * 2 * nheads + head) * ROWS, fold_decays + lane * 2 * nheads + head, folds,
            start, live, live, s_x_row, s_x, s_B_row, s_B, s_z, s_out, s_D_element, seq_len, ring_len, nheads,
            chunk_size, part * BP, P, N, NP, ROWS, BP, FP, BT, LAZY, False, OPERAND,
        )  # fmt: skip
    else:
        is_new = p_in[:, None] & (t < seq_len)[None, :]
        skip = skip_of(D, p, p_in, s_D_element)
        x_new, gate = tokens_of(x, z, D, p, is_new, t, s_x, s_z)
        careful = 0
        if not ONE:
            fresh = tl.load(x + (t * s_x)[None, :] + p[:, None], mask=is_new, other=0.0)
            careful = holds_no_number(fresh)
        if careful != 0:
            y = score(
                carried, x_rows, x, row_weights, row_decays, p_in, p, start, 0, live, end, live, s_x_row, s_x, seq_len,
                ring_len, ROWS, BT, True, OPERAND,
            )  # fmt: skip
        else:
            y = score(
                carried, x_rows, x, row_weights, row_decays, p_in, p, start, 0, live, end, live, s_x_row, s_x, seq_len,
                ring_len, ROWS, BT, False, OPERAND,
            )  # fmt: skip
        y = finished(y, x_new, skip, gate, D is not None, z is not None)
        tl.store(out + (t * s_out)[None, :] + p[:, None], y.to(out.dtype.element_ty), mask=is_new)
    if leads:
        tl.store(target_rows + lane, live - tl.where(folds, chunk_size, 0))
        tl.store(chunk_flags + lane, (folds if LAZY else full).to(tl.int32))
        move_cursors(num_buffered, ring_start, slot, start, live, ring_len, chunk_size, folds, full, LAZY)
