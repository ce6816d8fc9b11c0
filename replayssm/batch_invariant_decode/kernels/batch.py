"""The first launch of a step for many lanes: what the rows of the chunks weigh, and the new rows stored.

Where a batch fills the device, a head's weights would cost more time than its state if every program formed its own.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from replayssm.batch_invariant_decode.kernels.lanes import append, lane_rows
from replayssm.batch_invariant_decode.kernels.prepare import store_weights
from replayssm.ssd.kernels.constants import PER_CALL


@triton.jit
def _append_part(rows, new, s_row, s_new, part, start, live, seq_len, ring_len,
                 TOGETHER: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Store one part of every new row behind the live ones, which no program of this launch reads."""
    first = part * WIDTH
    append(rows, new, s_row, s_new, start, live, seq_len, ring_len, first, s_row - first, TOGETHER, WIDTH)


@triton.jit(do_not_specialize=[*PER_CALL, "lanes", "parts"])
def prepare_kernel(
    x_rows, z_rows, dt_rows, B_rows, C_rows, x, z, dt, B, C, A, dt_bias, num_buffered, ring_start, slots,
    cursors, row_weights, row_decays, fold_scales, fold_decays,
    s_x_slot, s_z_slot, s_dt_slot, s_B_slot, s_C_slot, s_x_row, s_dt_row, s_B_row,
    s_x_lane, s_z_lane, s_dt_lane, s_B_lane, s_C_lane, s_x, s_z, s_dt, s_B, s_C,
    seq_len, ring_len, nheads, ngroups, heads_per_group, chunk_size, dt_min, dt_max, lanes, parts,
    N: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    TOGETHER: tl.constexpr, WIDTH: tl.constexpr, SOFTPLUS: tl.constexpr, OVERLAP: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Program (lane, group, some of its heads), which forms weights, or (lane, part of its new rows), which stores."""
    if OVERLAP:
        gdc_launch_dependents()
    blocks = tl.cdiv(heads_per_group, HEADS)
    forming = lanes * ngroups * blocks
    pid = tl.program_id(0)
    if pid >= forming:
        part = (pid - forming) % parts
        lane = ((pid - forming) // parts).to(tl.int64)
        slot, live, start = lane_rows(lane, slots, num_buffered, ring_start, None, False)
        if slot >= 0:
            _append_part(
                x_rows + slot * s_x_slot, x + lane * s_x_lane, s_x_row, s_x, part, start, live, seq_len, ring_len,
                TOGETHER, WIDTH,
            )  # fmt: skip
            if z_rows is not None and z is not None:
                _append_part(
                    z_rows + slot * s_z_slot, z + lane * s_z_lane, s_x_row, s_z, part, start, live, seq_len, ring_len,
                    TOGETHER, WIDTH,
                )  # fmt: skip
            _append_part(
                B_rows + slot * s_B_slot, B + lane * s_B_lane, s_B_row, s_B, part, start, live, seq_len, ring_len,
                TOGETHER, WIDTH,
            )  # fmt: skip
            if C_rows is not None:
                _append_part(
                    C_rows + slot * s_C_slot, C + lane * s_C_lane, s_B_row, s_C, part, start, live, seq_len, ring_len,
                    TOGETHER, WIDTH,
                )  # fmt: skip
            _append_part(
                dt_rows + slot * s_dt_slot, dt + lane * s_dt_lane, s_dt_row, s_dt, part, start, live, seq_len, ring_len,
                TOGETHER, WIDTH,
            )  # fmt: skip
        return
    block = pid % blocks
    group = pid // blocks % ngroups
    lane = (pid // (blocks * ngroups)).to(tl.int64)
    slot, live, start = lane_rows(lane, slots, num_buffered, ring_start, None, False)
    if slot < 0:
        return
    first_head = group * heads_per_group + block * HEADS
    count = tl.minimum(HEADS, heads_per_group - block * HEADS)
    if (group == 0) & (block == 0):  # the other launch moves the originals while it still reads
        tl.store(cursors + 2 * lane, start.to(tl.int32))
        tl.store(cursors + 2 * lane + 1, live)
    h = tl.arange(0, HEADS)
    store_weights(
        dt_rows + slot * s_dt_slot, B_rows + slot * s_B_slot + group * N, dt + lane * s_dt_lane,
        B + lane * s_B_lane + group * N, C + lane * s_C_lane + group * N, A, dt_bias,
        row_weights + lane * nheads * seq_len * ROWS, row_decays + lane * nheads * seq_len,
        fold_scales + lane * 2 * nheads * ROWS, fold_decays + lane * 2 * nheads, s_dt_row, s_B_row, s_dt, s_B, s_C,
        start, live, seq_len, live, ring_len, chunk_size, nheads, first_head + h, h < count, dt_min, dt_max,
        N, BN, ROWS, TOKENS, SOFTPLUS, False, OPERAND,
    )  # fmt: skip
