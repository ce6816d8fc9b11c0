"""The first launch of a step for many lanes: products of B and C, and the new rows stored, with dt and its sums.

What the rows of a chunk weigh is formed from these by the other launch, while its states are on their way.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from replayssm.batch_invariant_decode.kernels.lanes import place
from replayssm.ssd.kernels.arithmetic import lane_sums, multiply, processed
from replayssm.ssd.kernels.constants import PER_CALL


@triton.jit
def _old_dt(
    sums, dt_rows, bias, head, h_in, s_dt_row, start, row, stored, ring_len, known, dt_min, dt_max,
    SOFTPLUS: tl.constexpr, LAZY: tl.constexpr,
):  # fmt: skip
    """Processed dt [heads, rows] of rows below ``stored``, zero behind them."""
    at = place(start, row, ring_len, LAZY)
    inside = h_in[:, None] & (row < stored)[None, :]
    if known:
        dt = tl.load(sums[:, None] + (at * 2)[None, :], mask=inside, other=0.0)
    else:
        raw = tl.load(dt_rows + (at * s_dt_row)[None, :] + head[:, None], mask=inside, other=0.0).to(tl.float32)
        dt = tl.where(inside, processed(raw, bias, dt_min, dt_max, SOFTPLUS), 0.0)
    return dt


@triton.jit
def _keep(sums, dt, total, h_in, start, row, since, until, ring_len, LAZY: tl.constexpr):
    """Store processed dt and its sum [heads, rows] of the rows ``since..until``."""
    to = sums[:, None] + (place(start, row, ring_len, LAZY) * 2)[None, :]
    mask = h_in[:, None] & ((row >= since) & (row < until))[None, :]
    tl.store(to, dt, mask=mask)
    tl.store(to + 1, total, mask=mask)


@triton.jit
def _keep_sums(
    sums, dt_rows, new, bias, A, head, h_in, s_dt_row, start, live, seq_len, ring_len, chunk_size, known,
    dt_min, dt_max, ROWS: tl.constexpr, SOFTPLUS: tl.constexpr, LAZY: tl.constexpr,
):  # fmt: skip
    """Store processed dt and its sums of the new rows, and of the live ones where they are not known.

    ``new`` is the processed dt [heads, tokens] of the new rows, ``sums`` points to each head's rows.
    """
    PER: tl.constexpr = 1 if ROWS == 16 else 2 if ROWS == 32 else 4
    t = tl.arange(0, new.shape[1])
    since = tl.where(known, live, 0)
    for first in range(tl.where(known & (live >= chunk_size), chunk_size, 0), live + seq_len, chunk_size):
        until = tl.minimum(first + chunk_size, live + seq_len)
        stored = tl.minimum(first + chunk_size, live)
        row = first + tl.arange(0, ROWS // PER) * PER
        row1 = row + 1 % PER
        row2 = row + 2 % PER
        row3 = row + 3 % PER
        v0 = _old_dt(
            sums, dt_rows, bias, head, h_in, s_dt_row, start, row, stored, ring_len, known, dt_min, dt_max,
            SOFTPLUS, LAZY,
        )  # fmt: skip
        v1 = _old_dt(
            sums, dt_rows, bias, head, h_in, s_dt_row, start, row1, stored, ring_len, known, dt_min, dt_max,
            SOFTPLUS, LAZY,
        )  # fmt: skip
        v2 = _old_dt(
            sums, dt_rows, bias, head, h_in, s_dt_row, start, row2, stored, ring_len, known, dt_min, dt_max,
            SOFTPLUS, LAZY,
        )  # fmt: skip
        v3 = _old_dt(
            sums, dt_rows, bias, head, h_in, s_dt_row, start, row3, stored, ring_len, known, dt_min, dt_max,
            SOFTPLUS, LAZY,
        )  # fmt: skip
        for i in range(tl.maximum(first - live, 0), until - live):
            dt = tl.sum(tl.where((t == i)[None, :], new, 0.0), 1)[:, None]
            v0 = tl.where((row == live + i)[None, :], dt, v0)
            v1 = tl.where((row1 == live + i)[None, :], dt, v1)
            v2 = tl.where((row2 == live + i)[None, :], dt, v2)
            v3 = tl.where((row3 == live + i)[None, :], dt, v3)
        s0, s1, s2, s3 = lane_sums((v0, v1, v2, v3), v3, A, True, ROWS)
        _keep(sums, v0, s0, h_in, start, row, since, until, ring_len, LAZY)
        if PER > 1:
            _keep(sums, v1, s1, h_in, start, row1, since, until, ring_len, LAZY)
        if PER > 2:
            _keep(sums, v2, s2, h_in, start, row2, since, until, ring_len, LAZY)
            _keep(sums, v3, s3, h_in, start, row3, since, until, ring_len, LAZY)


@triton.jit
def _only_token(new, count, TP: tl.constexpr, WIDTH: tl.constexpr):
    """The first ``count`` elements of the new row where there is one, loaded early."""
    if TP == 1:
        e = tl.arange(0, WIDTH)
        return tl.load(new + e, mask=e < count, other=0.0)
    else:
        return 0.0


@triton.jit
def _append(
    rows, new, only, s_row, s_new, start, live, seq_len, ring_len, count,
    TP: tl.constexpr, WIDTH: tl.constexpr, LAZY: tl.constexpr,
):  # fmt: skip
    """Store the first ``count`` elements of the new rows behind the live ones, which nobody reads in this launch."""
    e = tl.arange(0, WIDTH)
    if TP == 1:
        tl.store(rows + place(start, live, ring_len, LAZY) * s_row + e, only, mask=e < count)
    else:
        TOGETHER: tl.constexpr = min(TP, 4)
        for t0 in range(0, seq_len, TOGETHER):
            t = t0 + tl.arange(0, TOGETHER)
            mask = (t < seq_len)[:, None] & (e < count)[None, :]
            value = tl.load(new + (t * s_new)[:, None] + e[None, :], mask=mask)
            at = place(start, live + t, ring_len, LAZY) * s_row
            tl.store(rows + at[:, None] + e[None, :], value, mask=mask)


@triton.jit
def _store_products(
    products, B_rows, B, C, s_B_row, s_B, s_C, start, live, seq_len, ring_len, chunk_size, row,
    N: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, LAZY: tl.constexpr,
):  # fmt: skip
    """Store ``B_j C_t`` of the rows ``row`` of each chunk and the new tokens in it; ``products`` is [tokens, ROWS]."""
    t = tl.arange(0, TOKENS)
    for first in range(tl.where(live >= chunk_size, chunk_size, 0), live + seq_len, chunk_size):
        until = tl.minimum(first + chunk_size, live + seq_len)
        inside = first + row < until
        if tl.max(inside.to(tl.int32), 0) != 0:
            old = B_rows + place(start, first + row, ring_len, LAZY) * s_B_row
            at = tl.where(first + row < live, old, B + (first + row - live) * s_B)
            y = tl.zeros((row.shape[0], TOKENS), tl.float32)
            for n0 in tl.static_range(0, N, BN):
                n = n0 + tl.arange(0, BN)
                B_tile = tl.load(at[:, None] + n[None, :], mask=inside[:, None] & (n < N)[None, :], other=0.0)
                C_at = C + (t * s_C)[None, :] + n[:, None]
                C_tile = tl.load(C_at, mask=(t < seq_len)[None, :] & (n < N)[:, None], other=0.0)
                y = multiply(B_tile, C_tile, y, True)
            of = (t >= first - live) & (t < until - live)
            tl.store(products + (t * ROWS)[None, :] + row[:, None], y, mask=inside[:, None] & of[None, :])


@triton.jit(do_not_specialize=PER_CALL)
def prepare_kernel(
    x_rows, z_rows, dt_rows, B_rows, C_rows, x, z, dt, B, C, A, dt_bias, num_buffered, ring_start, slots,
    sums, num_summed, cursors, products,
    s_x_slot, s_z_slot, s_dt_slot, s_B_slot, s_C_slot, s_x_row, s_dt_row, s_B_row,
    s_x_lane, s_z_lane, s_dt_lane, s_B_lane, s_C_lane, s_x, s_z, s_dt, s_B, s_C, s_sums_slot, s_sums_head,
    seq_len, ring_len, ngroups, heads_per_group, chunk_size, dt_min, dt_max,
    P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, TP: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, SOFTPLUS: tl.constexpr,
    LAZY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (lane, group, part): a block of the chunk's rows, and, counted from the other end, some of the heads.

    So the part that has no rows, while a chunk is young, is one that stores. What the lane's slot does not settle is
    loaded while the slot is on its way.
    """
    if OVERLAP:
        gdc_launch_dependents()
    lane = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    part = tl.program_id(2)
    block = tl.num_programs(2) - 1 - part
    first_head = group * heads_per_group + block * HEADS
    count = tl.minimum(HEADS, heads_per_group - block * HEADS)
    slot = tl.load(slots + lane).to(tl.int64)
    h = tl.arange(0, HEADS)
    h_in = h < count
    head = first_head + h
    tp = tl.arange(0, TP)
    x += lane * s_x_lane + first_head * P
    B += lane * s_B_lane + group * N
    C += lane * s_C_lane + group * N
    x_only = _only_token(x, count * P, TP, WIDTH)
    B_only = _only_token(B, N, TP, NP)
    if z_rows is not None and z is not None:
        z += lane * s_z_lane + first_head * P
        z_only = _only_token(z, count * P, TP, WIDTH)
    if C_rows is not None:
        C_only = _only_token(C, N, TP, NP)
    new_in = h_in[:, None] & (tp < seq_len)[None, :]
    raw = tl.load(dt + lane * s_dt_lane + (tp * s_dt)[None, :] + head[:, None], mask=new_in, other=0.0)
    bias = 0.0
    if dt_bias is not None:
        bias = tl.load(dt_bias + head, mask=h_in, other=0.0).to(tl.float32)[:, None]
    decay = tl.load(A + head, mask=h_in, other=0.0).to(tl.float32)[:, None]
    if slot < 0:
        return
    live = tl.load(num_buffered + slot)
    known = tl.load(num_summed + slot) >= live
    start = slot * 0
    if LAZY:
        start = tl.load(ring_start + slot).to(tl.int64)
    if (group == 0) & (part == 0):  # the other launch moves the originals while it still reads
        tl.store(cursors + 2 * lane, start.to(tl.int32))
        tl.store(cursors + 2 * lane + 1, live)
    B_rows += slot * s_B_slot + group * N
    if count > 0:
        x_rows += slot * s_x_slot + first_head * P
        dt_rows += slot * s_dt_slot
        _append(x_rows, x, x_only, s_x_row, s_x, start, live, seq_len, ring_len, count * P, TP, WIDTH, LAZY)
        if z_rows is not None and z is not None:
            z_rows += slot * s_z_slot + first_head * P
            _append(z_rows, z, z_only, s_x_row, s_z, start, live, seq_len, ring_len, count * P, TP, WIDTH, LAZY)
        at = place(start, live + tp, ring_len, LAZY) * s_dt_row
        tl.store(dt_rows + at[None, :] + head[:, None], raw, mask=new_in)
        if block == 0:
            _append(B_rows, B, B_only, s_B_row, s_B, start, live, seq_len, ring_len, N, TP, NP, LAZY)
            if C_rows is not None:
                C_rows += slot * s_C_slot + group * N
                _append(C_rows, C, C_only, s_B_row, s_C, start, live, seq_len, ring_len, N, TP, NP, LAZY)
        new = tl.where(new_in, processed(raw.to(tl.float32), bias, dt_min, dt_max, SOFTPLUS), 0.0)
        _keep_sums(
            sums + slot * s_sums_slot + head * s_sums_head, dt_rows, new, bias, decay, head, h_in, s_dt_row,
            start, live, seq_len, ring_len, chunk_size, known, dt_min, dt_max, ROWS, SOFTPLUS, LAZY,
        )  # fmt: skip
    row = part * BR + tl.arange(0, BR)
    if part * BR < chunk_size:
        _store_products(
            products + (lane * ngroups + group) * seq_len * ROWS, B_rows, B, C, s_B_row, s_B, s_C,
            start, live, seq_len, ring_len, chunk_size, row, N, BN, ROWS, TOKENS, LAZY,
        )  # fmt: skip
