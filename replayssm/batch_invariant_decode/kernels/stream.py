"""The second launch of a step for many lanes: it streams the states and the rows of x, forms weights, and folds."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.batch_invariant_decode.kernels.blocks import loaded_rows, rows_weigh, score_in_blocks, token_weights
from replayssm.batch_invariant_decode.kernels.fold import cross_chunks
from replayssm.batch_invariant_decode.kernels.lanes import move_cursors, place
from replayssm.kernels import ring_row
from replayssm.ssd.kernels.arithmetic import finished, holds_no_number, multiply, times
from replayssm.ssd.kernels.constants import PER_CALL


@triton.jit
def _stays(live, seq_len, chunk_size, LAZY: tl.constexpr):
    """Whether a lane neither folds a chunk nor crosses the end of one."""
    end = live + seq_len
    if LAZY:
        return (end <= chunk_size) & (live < chunk_size)
    else:
        return end < chunk_size


@triton.jit
def _move_all(num_summed, num_buffered, ring_start, slots, cursors, target_rows, chunk_flags, lanes, first, seq_len,
              ring_len, chunk_size, LAZY: tl.constexpr, MOVED: tl.constexpr):  # fmt: skip
    """Move the cursors of lanes ``first..first + MOVED`` and leave what a call reports."""
    lane = first + tl.arange(0, MOVED)
    here = lane < lanes
    slot = tl.load(slots + lane, mask=here, other=-1).to(tl.int64)
    active = slot >= 0
    start = tl.load(cursors + 2 * lane, mask=active, other=0)
    live = tl.load(cursors + 2 * lane + 1, mask=active, other=0)
    folds = live >= chunk_size
    full = live + seq_len >= chunk_size
    row = tl.where(active, live - tl.where(folds, chunk_size, 0), -1)
    tl.store(target_rows + lane, row, mask=here)
    tl.store(chunk_flags + lane, tl.where(active, (folds if LAZY else full).to(tl.int32), 0), mask=here)
    move_cursors(num_buffered, ring_start, slot, active, start, live, ring_len, chunk_size, folds, full, LAZY)
    if LAZY:
        tl.store(num_summed + slot, live + seq_len - tl.where(folds, chunk_size, 0), mask=active)
    else:
        tl.store(num_summed + slot, tl.where(full, 0, live + 1), mask=active)


@triton.jit
def _careful(
    state, C, x_rows, products, sums, start, ring_len, s_x_row, s_C, r, r_in, live, seq_len, t, c_in,
    N: tl.constexpr, NP: tl.constexpr, ROWS: tl.constexpr, BT: tl.constexpr, LAZY: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """A product for each token: zero times a later token that is no number would reach an earlier one.

    It loads everything anew. Triton 3.6 reads ahead into what a product in a branch still reads.
    """
    newest = tl.load(sums + ring_row(start, live + t, ring_len) * 2 + 1, mask=c_in, other=0.0)
    carried = tl.zeros((r.shape[0], t.shape[0]), tl.float32)
    BN: tl.constexpr = min(BT, NP)
    k = tl.arange(0, BT)
    for n0 in tl.range(0, N, BN, num_stages=1):
        n = n0 + tl.arange(0, BN)
        values = tl.load(state + r[:, None] * N + n[None, :], mask=r_in[:, None] & (n < N)[None, :], other=0.0)
        C_tile = tl.load(C + (t * s_C)[None, :] + n[:, None], mask=c_in[None, :] & (n < N)[:, None], other=0.0)
        carried = multiply(values.to(OPERAND), C_tile, carried, True)
    carried = times(carried, tl.exp(newest)[None, :], OPERAND)
    y = carried
    for i in range(0, seq_len):
        own = carried
        for j0 in tl.range(0, live + i + 1, BT, num_stages=1):
            j = j0 + k
            at = place(start, j, ring_len, LAZY)
            seen = (j <= live + i)[None, :] & r_in[:, None]
            x_tile = tl.load(x_rows + (at[None, :] * s_x_row + r[:, None]), mask=seen, other=0.0)
            w = token_weights(products, sums, newest, at, j, live, t, c_in, ROWS, OPERAND)
            own = multiply(x_tile, w, own, True)
        y = tl.where((t == i)[None, :], own, y)
    return y


@triton.jit(do_not_specialize=[*PER_CALL, "lanes", "workers"])
def stream_kernel(
    ssm_state, shadow, x_rows, B_rows, x, z, C, D, out, num_buffered, ring_start, slots, target_rows, chunk_flags,
    sums, num_summed, cursors, products,
    s_state, s_shadow, s_x_slot, s_B_slot, s_x_row, s_B_row, s_x_lane, s_z_lane, s_C_lane,
    s_x, s_z, s_C, s_sums_slot, s_sums_head, s_out_lane, s_out, s_D_head, s_D_element,
    seq_len, ring_len, nheads, ngroups, heads_per_group, chunk_size, lanes, workers,
    P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, TP: tl.constexpr, COLUMNS: tl.constexpr, FP: tl.constexpr, BT: tl.constexpr,
    MOVED: tl.constexpr, ONE: tl.constexpr, STAGES: tl.constexpr, LAZY: tl.constexpr, OVERLAP: tl.constexpr,
    OPERAND: tl.constexpr, FOLDS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """The first programs, the workers, take all lanes that fold or cross and the cursors. Then (lane, some heads).

    Without ``FOLDS`` there are no workers, and with ``LEADS`` a launch of workers alone follows.

    Several heads of a group lie below each other in the rows of the products, and each has columns of its own: a row of
    x is read in longer pieces, and a product wastes fewer columns.
    """
    n = tl.arange(0, NP)
    pid = tl.program_id(0)
    if LEADS:
        gdc_launch_dependents()
    if FOLDS:  # noqa: SIM102  a condition of the compiler, and one of the program
        if pid < workers:
            if OVERLAP:
                gdc_wait()
            wide = tl.arange(0, TOKENS)
            PARTS: tl.constexpr = (P + FP - 1) // FP
            for first in range(pid * MOVED, lanes, workers * MOVED):
                _move_all(
                    num_summed, num_buffered, ring_start, slots, cursors, target_rows, chunk_flags, lanes, first,
                    seq_len, ring_len, chunk_size, LAZY, MOVED,
                )  # fmt: skip
            before = 0
            for l0 in range(0, lanes, MOVED):
                looked = l0 + tl.arange(0, MOVED)
                active = tl.load(slots + looked, mask=looked < lanes, other=-1) >= 0
                rows = tl.load(cursors + 2 * looked + 1, mask=active, other=0)
                slow = tl.where(active & (_stays(rows, seq_len, chunk_size, LAZY) == 0), 1, 0)
                rank = tl.cumsum(slow, 0) * slow
                work = tl.sum(slow, 0) * nheads * PARTS
                for item in range((pid + workers - before % workers) % workers, work, workers):
                    lane = tl.sum(tl.where(rank == item // (nheads * PARTS) + 1, looked, 0), 0).to(tl.int64)
                    part = item % PARTS
                    head = item // PARTS % nheads
                    group = head // heads_per_group
                    slot = tl.load(slots + lane).to(tl.int64)
                    start = tl.load(cursors + 2 * lane)
                    live = tl.load(cursors + 2 * lane + 1)
                    rounded = shadow
                    if shadow is not None:
                        rounded = shadow + slot * s_shadow + head * (P * N)
                    gate_at = z
                    if z is not None:
                        gate_at = z + lane * s_z_lane + head * P
                    skip_at = D
                    if D is not None:
                        skip_at = D + head * s_D_head
                    C_at = C + lane * s_C_lane + group * N + (wide * s_C)[None, :] + n[:, None]
                    cross_chunks(
                        ssm_state + slot * s_state + head * (P * N), rounded,
                        tl.load(C_at, mask=(wide < seq_len)[None, :] & (n < N)[:, None], other=0.0),
                        x_rows + slot * s_x_slot + head * P, B_rows + slot * s_B_slot + group * N,
                        sums + slot * s_sums_slot + head * s_sums_head, x + lane * s_x_lane + head * P, gate_at,
                        skip_at, out + lane * s_out_lane + head * P,
                        products + (lane * ngroups + group) * seq_len * ROWS, live >= chunk_size, start, live,
                        s_x_row, s_B_row, s_x, s_z, s_out, s_D_element, seq_len, ring_len, chunk_size, part * FP,
                        P, N, NP, ROWS, FP, BT, LAZY, OPERAND,
                    )  # fmt: skip
                before += work
            return
    pid -= workers
    blocks = tl.cdiv(heads_per_group, HEADS)
    block = pid % blocks
    group = pid // blocks % ngroups
    lane = (pid // (blocks * ngroups)).to(tl.int64)
    first_head = group * heads_per_group + block * HEADS
    count = tl.minimum(HEADS, heads_per_group - block * HEADS)
    r = tl.arange(0, WIDTH)
    row = tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    t = c % TP
    head_of = c // TP
    r_in = r < count * P
    tp = tl.arange(0, TP)
    mine = (tp < seq_len)[:, None] & r_in[None, :]
    out_at = out + lane * s_out_lane + first_head * P + (tp * s_out)[:, None] + r[None, :]
    slot = tl.load(slots + lane).to(tl.int64)
    if OVERLAP:
        gdc_wait()
    if slot < 0:  # exact zeros
        tl.store(out_at, tl.zeros((TP, WIDTH), out.dtype.element_ty), mask=mine)
        return
    start = tl.load(cursors + 2 * lane)
    live = tl.load(cursors + 2 * lane + 1)
    if _stays(live, seq_len, chunk_size, LAZY) == 0:
        return
    state = ssm_state + slot * s_state + first_head * (P * N)
    if shadow is not None:
        state = shadow + slot * s_shadow + first_head * (P * N)
    x += lane * s_x_lane + first_head * P
    x_rows += slot * s_x_slot + first_head * P
    C += lane * s_C_lane + group * N
    if z is not None:
        z += lane * s_z_lane + first_head * P
    products += (lane * ngroups + group) * seq_len * ROWS
    c_in = (t < seq_len) & (head_of < count)
    sums_of = sums + slot * s_sums_slot + (first_head + head_of) * s_sums_head  # by column
    newest = tl.load(sums_of + ring_row(start, live + t, ring_len) * 2 + 1, mask=c_in, other=0.0)
    skip = 0.0
    x_new = 0.0
    gate = 0.0
    if D is not None:
        skip_at = D + (first_head + r // P) * s_D_head + (r % P) * s_D_element
        skip = tl.load(skip_at, mask=r_in, other=0.0).to(tl.float32)[None, :]
    if ONE:
        if D is not None:
            x_new = tl.load(x + r, mask=r_in, other=0.0)[None, :]
        if z is not None:
            gate = tl.load(z + r, mask=r_in, other=0.0)[None, :]
    else:
        x_new = tl.load(x + (tp * s_x)[:, None] + r[None, :], mask=mine, other=0.0)
        if z is not None:
            gate = tl.load(z + (tp * s_z)[:, None] + r[None, :], mask=mine, other=0.0)
    if tl.float32 == OPERAND:
        y = score_in_blocks(
            state, C, x_rows, products, sums_of, newest, start, ring_len, s_x_row, s_C, r, r_in, live, seq_len,
            t, c_in, N, NP, ROWS, BT, STAGES, LAZY,
        )  # fmt: skip
    else:
        at = place(start, row, ring_len, LAZY)
        y = tl.zeros((WIDTH, COLUMNS), tl.float32)
        pair, product = loaded_rows(products, sums_of, at, row, live, t, c_in, ROWS)
        # A loop of one turn, which the compiler does not know: it copies what a loop loads straight to shared memory.
        for turn in tl.range(0, tl.minimum(seq_len, 1), num_stages=2):
            # Behind the copies' start, which must not wait for what the weights are made of, but ahead of their end.
            now = newest + turn * 1.0
            w = rows_weigh(pair, product, now, row, live, t, c_in, OPERAND)
            decay = tl.exp(now)
            ahead = turn * 16
            state_at = state + ahead + (r[:, None] * N + n[None, :])
            values = tl.load(state_at, mask=r_in[:, None] & (n < N)[None, :], other=0.0)
            C_at = C + ahead + ((t * s_C)[None, :] + n[:, None])
            C_tile = tl.load(C_at, mask=c_in[None, :] & (n < N)[:, None], other=0.0)
            x_at = x_rows + ahead + (at[None, :] * s_x_row + r[:, None])
            x_tile = tl.load(x_at, mask=(row < live + seq_len)[None, :] & r_in[:, None], other=0.0)
            y = tl.dot(values.to(OPERAND), C_tile, input_precision="ieee") * decay[None, :]
            y = tl.dot(x_tile, w, y, input_precision="ieee")
    if not ONE:  # noqa: SIM102  a condition of the compiler, and one of the program
        if holds_no_number(x_new) != 0:
            y = _careful(
                state, C, x_rows, products, sums_of, start, ring_len, s_x_row, s_C, r, r_in, live,
                seq_len, t, c_in, N, NP, ROWS, BT if tl.float32 == OPERAND else 16, LAZY, OPERAND,
            )  # fmt: skip
    # Of a row's columns those of its own head, their bits, without an addition; turned, to store rows side by side.
    bits = tl.where(head_of[None, :] == (r // P)[:, None], y.to(tl.int32, bitcast=True), 0)
    if ONE:
        bits = tl.sum(bits, 1)[None, :]
    else:
        bits = tl.trans(tl.sum(tl.reshape(bits, (WIDTH, COLUMNS // TP, TP)), 1))
    y = bits.to(tl.float32, bitcast=True)
    y = finished(y, x_new, skip, gate, D is not None, z is not None)
    tl.store(out_at, y.to(out.dtype.element_ty), mask=mine)
