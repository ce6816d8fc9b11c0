"""The step itself: a program holds some rows of one head's state and scores the lane's new tokens on it.

The state is the large operand of a product whose columns are the tokens. Nearly every step needs no more than that and
the chunk's rows under their weights. A lane that has a chunk to fold, or whose tokens cross a boundary, goes through
its rows in smaller blocks, and folds before and between.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from replayssm.batch_invariant_decode.kernels.prepare import lane_rows, ring_row
from replayssm.ssd.kernels.arithmetic import finished, fold_columns, holds_no_number
from replayssm.ssd.kernels.constants import PER_CALL


@triton.jit
def _score(
    state, C, x_rows, weights, decays, p_in, p, start, first_row, last_row, x_row, seq_len, ring_len,
    ROWS: tl.constexpr, BT: tl.constexpr, ONE: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """``y`` [rows, tokens] before skip and gate.

    The chunk's rows are ``start + 0..last_row`` of the ring, those of this call begin with ``first_row``. Columns of
    tokens that lie in another chunk hold nothing of use.
    """
    TOKENS: tl.constexpr = C.shape[1]
    t = tl.arange(0, TOKENS)
    token = tl.arange(0, BT)
    decay = tl.load(decays + t, mask=t < seq_len, other=0.0)
    y = tl.dot(state.to(OPERAND), C, input_precision="ieee") * decay[None, :]
    for j0 in range(0, last_row + 1, BT):
        j = j0 + token
        w = tl.load(weights + (t * ROWS)[None, :] + j[:, None], mask=(t < seq_len)[None, :], other=0.0)
        x_at = x_rows + ring_row(start, j, ring_len) * x_row
        x = tl.load(x_at[:, None] + p[None, :], mask=(j <= last_row)[:, None] & p_in[None, :], other=0.0)
        if ONE:
            y = tl.dot(tl.trans(x), w, y, input_precision="ieee")
        else:
            # Zero times a later token that is no number would reach an earlier one.
            if j0 + BT > first_row + 1 and holds_no_number(x) != 0:
                before = y
                for i in range(0, seq_len):
                    seen = tl.where((j <= first_row + i)[:, None], x, 0.0).to(OPERAND)
                    y = tl.where((t == i)[None, :], tl.dot(tl.trans(seen), w, before, input_precision="ieee"), y)
            else:
                y = tl.dot(tl.trans(x), w, y, input_precision="ieee")
    return y


@triton.jit
def _folded(
    state, x_rows, B_rows, scales, decay, p_in, p, start, count, x_row, B_row, ring_len,
    N: tl.constexpr, BT: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """The state after the ``count`` rows of the chunk that begins at ring row ``start``."""
    added = tl.zeros(state.shape, tl.float32)
    n = tl.arange(0, state.shape[1])
    for j0 in range(0, count, BT):
        j = j0 + tl.arange(0, BT)
        j_in = j < count
        ring = ring_row(start, j, ring_len)
        x = tl.load(x_rows + (ring * x_row)[:, None] + p[None, :], mask=j_in[:, None] & p_in[None, :], other=0.0)
        B = tl.load(B_rows + (ring * B_row)[:, None] + n[None, :], mask=j_in[:, None] & (n < N)[None, :], other=0.0)
        scaled = fold_columns(B, tl.load(scales + j, mask=j_in, other=0.0), OPERAND)
        added = tl.dot(tl.trans(x), scaled, added, input_precision="ieee")
    return tl.fma(decay, state, added)


@triton.jit
def _write(y, x, z, D, out, p, p_in, first, last, s_x, s_z, s_out):
    """Skip, gate and store columns ``first..last - 1``."""
    t = tl.arange(0, y.shape[1])
    mask = p_in[:, None] & ((t >= first) & (t < last))[None, :]
    skip = 0.0
    x_new = y
    gate = y
    if D is not None:
        skip = D[:, None]
        x_new = tl.load(x + (t * s_x)[None, :] + p[:, None], mask=mask, other=0.0)
    if z is not None:
        gate = tl.load(z + (t * s_z)[None, :] + p[:, None], mask=mask, other=0.0)
    y = finished(y, x_new, skip, gate, D is not None, z is not None)
    tl.store(out + (t * s_out)[None, :] + p[:, None], y.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=PER_CALL)
def score_step(
    ssm_state, shadow, x_rows, B_rows, num_buffered, ring_start, target_rows, chunk_flags, out, x, z, C, D, slots,
    chunk_starts, cursors, row_weights, row_decays, fold_scales, fold_decays,
    s_state, s_shadow, s_x_slot, s_B_slot, s_x_row, s_B_row, s_out_lane, s_out, s_x_lane, s_z_lane, s_C_lane, s_x, s_z,
    s_C, s_D_head, s_D_element, seq_len, ring_len, nheads, heads_per_group, chunk_size,
    P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, BP: tl.constexpr,
    FP: tl.constexpr, BT: tl.constexpr, ONE: tl.constexpr, LAZY: tl.constexpr, FLAT: tl.constexpr,
    OPERAND: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (lane, head, block of rows). What the other launch leaves is read behind ``gdc_wait``."""
    PARTS: tl.constexpr = (P + BP - 1) // BP
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % nheads
    lane = (tl.program_id(0) // (PARTS * nheads)).to(tl.int64)
    group = head // heads_per_group
    leads = (head == 0) & (part == 0)
    t = tl.arange(0, TOKENS)
    n = tl.arange(0, NP)
    p = part * BP + tl.arange(0, BP)
    p_in = p < P
    out += lane * s_out_lane + head * P
    slot = tl.load(slots + lane).to(tl.int64)
    start = slot * 0
    live = 0
    if FLAT:
        slot, live, start = lane_rows(lane, slots, num_buffered, ring_start, chunk_starts, FLAT)
    if slot < 0:
        if OVERLAP:
            gdc_wait()
        if not FLAT:
            zero = tl.zeros((BP, TOKENS), out.dtype.element_ty)
            tl.store(out + (t * s_out)[None, :] + p[:, None], zero, mask=p_in[:, None] & (t < seq_len)[None, :])
            if leads:
                tl.store(target_rows + lane, -1)
                tl.store(chunk_flags + lane, 0)
        return
    ssm_state += slot * s_state + head * (P * N)
    inside = p_in[:, None] & (n < N)[None, :]
    if shadow is None:
        state = tl.load(ssm_state + p[:, None] * N + n[None, :], mask=inside, other=0.0)
    else:
        shadow += slot * s_shadow + head * (P * N)
        state = tl.load(shadow + p[:, None] * N + n[None, :], mask=inside, other=0.0)
    C_at = C + lane * s_C_lane + group * N + (t * s_C)[None, :] + n[:, None]
    x += lane * s_x_lane + head * P
    if z is not None:
        z += lane * s_z_lane + head * P
    if FLAT:
        slot = slot * 0
        C_at += (start + live) * s_C
        x += (start + live) * s_x
        if z is not None:
            z += (start + live) * s_z
    C_tile = tl.load(C_at, mask=(t < seq_len)[None, :] & (n < N)[:, None], other=0.0)
    if OVERLAP:
        gdc_wait()
    if not FLAT:
        start = tl.load(cursors + 2 * lane).to(tl.int64)
        live = tl.load(cursors + 2 * lane + 1)
    skip = None
    if D is not None:
        skip = tl.load(D + head * s_D_head + p * s_D_element, mask=p_in, other=0.0).to(tl.float32)
    x_rows += slot * s_x_slot + head * P
    B_rows += slot * s_B_slot + group * N
    row_weights += (lane * nheads + head) * seq_len * ROWS
    row_decays += (lane * nheads + head) * seq_len
    fold_scales += (lane * 2 * nheads + head) * ROWS
    fold_decays += lane * 2 * nheads + head
    if FLAT:
        folds = tl.load(chunk_flags + lane) != 0
        full = folds
    else:
        folds = live >= chunk_size
        full = live + seq_len > chunk_size if LAZY else live + seq_len >= chunk_size
    if folds | full:
        end = live + seq_len
        for q0 in range(0, BP, FP):
            q = part * BP + q0 + tl.arange(0, FP)
            q_in = q < P
            at = ssm_state + q[:, None] * N + n[None, :]
            block = tl.load(at, mask=q_in[:, None] & (n < N)[None, :], other=0.0)
            skip_q = None
            if D is not None:
                skip_q = tl.load(D + head * s_D_head + q * s_D_element, mask=q_in, other=0.0).to(tl.float32)
            for c in range(0, (end - 1) // chunk_size + 1):
                origin = ring_row(start, c * chunk_size, ring_len)
                before = live - c * chunk_size
                if before < chunk_size:
                    last = tl.minimum(before + seq_len, chunk_size)
                    y = _score(
                        block, C_tile, x_rows, row_weights, row_decays, q_in, q, origin, before, last - 1, s_x_row,
                        seq_len, ring_len, ROWS, BT, ONE, OPERAND,
                    )  # fmt: skip
                    _write(y, x, z, skip_q, out, q, q_in, tl.maximum(-before, 0), last - before, s_x, s_z, s_out)
                if end > (c + 1) * chunk_size or not LAZY:
                    block = _folded(
                        block, x_rows, B_rows, fold_scales + c * nheads * ROWS, tl.load(fold_decays + c * nheads), q_in,
                        q, origin, live + 1 if FLAT else chunk_size, s_x_row, s_B_row, ring_len, N, BT, OPERAND,
                    )  # fmt: skip
                    # Beyond the first chunk it is not known yet which tokens will stay.
                    if not LAZY or (c == 0 and folds):
                        tl.store(at, block, mask=q_in[:, None] & (n < N)[None, :])
                        if shadow is not None:
                            rounded = shadow + q[:, None] * N + n[None, :]
                            tl.store(rounded, block.to(OPERAND), mask=q_in[:, None] & (n < N)[None, :])
    else:
        y = _score(
            state, C_tile, x_rows, row_weights, row_decays, p_in, p, start, live, live + seq_len - 1, s_x_row, seq_len,
            ring_len, ROWS, BT, ONE, OPERAND,
        )  # fmt: skip
        _write(y, x, z, skip, out, p, p_in, 0, seq_len, s_x, s_z, s_out)
    if not FLAT:  # noqa: SIM102
        if leads:
            if LAZY:
                moved = tl.where(folds, chunk_size, 0)
                tl.store(target_rows + lane, live - moved)
                tl.store(chunk_flags + lane, folds.to(tl.int32))
                tl.store(ring_start + slot, ring_row(start, moved, ring_len).to(tl.int32))
                tl.store(num_buffered + slot, live - moved)
            else:
                tl.store(target_rows + lane, live)
                tl.store(chunk_flags + lane, full.to(tl.int32))
                tl.store(num_buffered + slot, tl.where(full, 0, live + 1))
