"""What all rows of a head share in a step: new rows into the ring, the weights of the chunk's rows, decays.

A program handles eight heads of one group of one lane: the tile in which sums of dt have the order of a prefill. The
weights that the scan forms from ``C_t B_j`` and the sums leave here rounded, as the product that follows reads them.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from replayssm.ssd.kernels.arithmetic import fold_scale, processed, sums, weights
from replayssm.ssd.kernels.constants import PER_CALL


@triton.jit
def ring_row(start, row, ring_len):
    """Ring row of the row that comes ``row`` (below ``2 * ring_len - start``) after the oldest."""
    row = start + row
    return tl.where(row >= ring_len, row - ring_len, row)


@triton.jit
def lane_rows(lane, slots, num_buffered, ring_start, chunk_starts, FLAT: tl.constexpr):
    """``(slot, live rows, oldest row int64)`` of a lane that is not padding; ``slot`` is negative where it is.

    In a flat call the cursors are given by lane: ``num_buffered`` holds the target rows, all rows are stored already.
    """
    slot = tl.load(slots + lane).to(tl.int64)
    if FLAT:
        live = tl.load(num_buffered + lane).to(tl.int32)
        start = tl.load(chunk_starts + lane).to(tl.int64)
        slot = tl.where(live < 0, live.to(tl.int64), slot)
    else:
        live = 0
        start = slot * 0
        if slot >= 0:
            live = tl.load(num_buffered + slot)
            if ring_start is not None:
                start = tl.load(ring_start + slot).to(tl.int64)
    return slot, live, start


@triton.jit
def _append(rows, new, slot, lane, live, start, s_slot, s_row, s_lane, s_token, seq_len, ring_len, first, count,
            TOKENS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Store elements ``first..first+count`` of every new row, some rows at a time."""
    e = tl.arange(0, WIDTH)
    for t0 in range(0, seq_len, TOKENS):
        t = t0 + tl.arange(0, TOKENS)
        mask = (t < seq_len)[:, None] & (e < count)[None, :]
        value = tl.load(new + lane * s_lane + first + (t * s_token)[:, None] + e[None, :], mask=mask)
        at = ring_row(start, live + t, ring_len) * s_row
        tl.store(rows + slot * s_slot + first + at[:, None] + e[None, :], value, mask=mask)


@triton.jit(do_not_specialize=PER_CALL)
def prepare_step(
    x_rows, z_rows, dt_rows, B_rows, C_rows, num_buffered, ring_start, slots, chunk_starts, x, z, dt, B, C, A, dt_bias,
    cursors, row_weights, row_decays, fold_scales, fold_decays,
    s_x_slot, s_z_slot, s_dt_slot, s_B_slot, s_C_slot, s_x_row, s_dt_row, s_B_row,
    s_x_lane, s_z_lane, s_dt_lane, s_B_lane, s_C_lane, s_x, s_z, s_dt, s_B, s_C,
    seq_len, ring_len, nheads, ngroups, heads_per_group, chunk_size, dt_min, dt_max,
    P: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    TOGETHER: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr, WIDTH_N: tl.constexpr, SOFTPLUS: tl.constexpr,
    FLAT: tl.constexpr, OPERAND: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (lane, group, eight of its heads)."""
    if OVERLAP:
        gdc_launch_dependents()
    blocks = tl.cdiv(heads_per_group, HEADS)
    block = tl.program_id(0) % blocks
    group = tl.program_id(0) // blocks % ngroups
    lane = (tl.program_id(0) // (blocks * ngroups)).to(tl.int64)
    slot, live, start = lane_rows(lane, slots, num_buffered, ring_start, chunk_starts, FLAT)
    if slot < 0:
        return
    first_head = group * heads_per_group + block * HEADS
    count = tl.minimum(HEADS, heads_per_group - block * HEADS)
    if FLAT:
        slot = slot * 0
        C += (start + live) * s_C
    else:
        if (group == 0) & (block == 0):  # the step moves the originals while other programs still read
            tl.store(cursors + 2 * lane, start.to(tl.int32))
            tl.store(cursors + 2 * lane + 1, live)
        _append(x_rows, x, slot, lane, live, start, s_x_slot, s_x_row, s_x_lane, s_x, seq_len, ring_len,
                first_head * P, count * P, TOGETHER, WIDTH)  # fmt: skip
        _append(dt_rows, dt, slot, lane, live, start, s_dt_slot, s_dt_row, s_dt_lane, s_dt, seq_len, ring_len,
                first_head, count, TOGETHER, HEADS)  # fmt: skip
        if z_rows is not None and z is not None:
            _append(z_rows, z, slot, lane, live, start, s_z_slot, s_x_row, s_z_lane, s_z, seq_len, ring_len,
                    first_head * P, count * P, TOGETHER, WIDTH)  # fmt: skip
        if block == 0:
            _append(B_rows, B, slot, lane, live, start, s_B_slot, s_B_row, s_B_lane, s_B, seq_len, ring_len,
                    group * N, N, TOGETHER, WIDTH_N)  # fmt: skip
            if C_rows is not None:
                _append(C_rows, C, slot, lane, live, start, s_C_slot, s_B_row, s_C_lane, s_C, seq_len, ring_len,
                        group * N, N, TOGETHER, WIDTH_N)  # fmt: skip
    h = tl.arange(0, HEADS)
    h_in = h < count
    head = first_head + h
    bias = 0.0
    if dt_bias is not None:
        bias = tl.load(dt_bias + head, mask=h_in, other=0.0).to(tl.float32)[:, None]
    decay = tl.load(A + head, mask=h_in, other=0.0).to(tl.float32)
    row = tl.arange(0, ROWS)
    t = tl.arange(0, TOKENS)
    dt_rows += slot * s_dt_slot
    dt += lane * s_dt_lane
    B_rows += slot * s_B_slot + group * N
    B += lane * s_B_lane + group * N
    C += lane * s_C_lane + group * N
    out = (lane * nheads + head) * seq_len
    end = live + seq_len
    for chunk in range(0, tl.cdiv(end, chunk_size)):
        position = chunk * chunk_size + row
        inside = (row < chunk_size) & (position < end)
        ring = ring_row(start, position, ring_len)
        is_old = position < live + (seq_len if FLAT else 0)
        dt_at = tl.where(is_old, dt_rows + ring * s_dt_row, dt + (position - live) * s_dt)
        value = tl.load(dt_at[None, :] + head[:, None], mask=h_in[:, None] & inside[None, :], other=0.0)
        value = processed(value.to(tl.float32), bias, dt_min, dt_max, SOFTPLUS)
        value = tl.where(h_in[:, None] & inside[None, :], value, 0.0)
        total = sums(value, decay)
        if FLAT or end >= (chunk + 1) * chunk_size:  # full: it may be folded
            newest = tl.sum(tl.where((row == chunk_size - 1)[None, :], total, 0.0), 1)
            index = (lane * 2 + tl.minimum(chunk, 1)) * nheads + head
            tl.store(fold_decays + index, tl.exp(newest), mask=h_in)
            scale = fold_scale(newest[:, None], total, value)
            tl.store(fold_scales + index[:, None] * ROWS + row[None, :], scale, mask=h_in[:, None])
        if end > chunk * chunk_size and live < (chunk + 1) * chunk_size:
            products = tl.zeros((ROWS, TOKENS), tl.float32)
            B_at = tl.where(is_old, B_rows + ring * s_B_row, B + (position - live) * s_B)
            for n0 in tl.range(0, N, BN):
                n = n0 + tl.arange(0, BN)
                B_tile = tl.load(B_at[:, None] + n[None, :], mask=inside[:, None] & (n < N)[None, :], other=0.0)
                C_at = C + (t * s_C)[None, :] + n[:, None]
                C_tile = tl.load(C_at, mask=(t < seq_len)[None, :] & (n < N)[:, None], other=0.0)
                products = tl.dot(B_tile, C_tile, products, input_precision="ieee")
            before = live - chunk * chunk_size
            for i in range(tl.maximum(-before, 0), tl.minimum(seq_len, chunk_size - before)):
                target = before + i
                here = tl.sum(tl.where((row == target)[None, :], total, 0.0), 1)
                product = tl.sum(tl.where((t == i)[None, :], products, 0.0), 1)
                w = weights(product[None, :], here[:, None], total, value)
                w = tl.where((row <= target)[None, :], w, 0.0)
                tl.store(row_decays + out + i, tl.exp(here), mask=h_in)
                at = (out + i)[:, None] * ROWS + row[None, :]
                tl.store(row_weights + at, w.to(OPERAND), mask=h_in[:, None])
