"""The step for few lanes, in one launch: a program scores a lane's new tokens on rows of one head's state.

The state is the large operand of a product whose columns are the tokens. Nearly every lane stays within a chunk; then
the weights of the chunk's rows are formed in registers while the state is on its way.
"""

import triton
import triton.language as tl

from replayssm.batch_invariant_decode.kernels.lanes import move_cursors, pad, place
from replayssm.batch_invariant_decode.kernels.tokens import scored, store_scores, with_chunk
from replayssm.ssd.kernels.arithmetic import processed, sums
from replayssm.ssd.kernels.constants import PER_CALL


@triton.jit
def _store_new(rows, new, s_row, s_new, start, live, seq_len, ring_len, offset, inside,
               TP: tl.constexpr, LAZY: tl.constexpr):  # fmt: skip
    """Store elements ``offset`` of the new rows behind the live ones."""
    t = tl.arange(0, TP)
    mask = (t < seq_len)[:, None] & inside[None, :]
    value = tl.load(new + (t * s_new)[:, None] + offset[None, :], mask=mask)
    at = place(start, live + t, ring_len, LAZY).to(tl.int64) * s_row
    tl.store(rows + at[:, None] + offset[None, :], value, mask=mask)


@triton.jit
def _derive(dt_rows, kept, A, bias, s_dt_row, start, live, ring_len, chunk_size, dt_min, dt_max,
            ROWS: tl.constexpr, SOFTPLUS: tl.constexpr, LAZY: tl.constexpr):  # fmt: skip
    """Derive dt and its sums of a head's live rows anew. All programs of a head store the same."""
    row = tl.arange(0, ROWS)
    for first in range(0, live, chunk_size):
        inside = (row < chunk_size) & (first + row < live)
        at = place(start, first + row, ring_len, LAZY)
        value = tl.load(dt_rows + at.to(tl.int64) * s_dt_row, mask=inside, other=0.0).to(tl.float32)[None, :]
        value = tl.where(inside[None, :], processed(value, bias, dt_min, dt_max, SOFTPLUS), 0.0)
        to = (kept + at * 2)[None, :]
        tl.store(to, value, mask=inside[None, :])
        tl.store(to + 1, sums(value, A), mask=inside[None, :])


@triton.jit(do_not_specialize=PER_CALL)
def step_kernel(
    ssm_state, shadow, x_rows, z_rows, dt_rows, B_rows, C_rows, kept, x, z, dt, B, C, A, D, dt_bias, out,
    num_buffered, ring_start, num_summed, slots, chunk_starts, arrivals, target_rows, chunk_flags,
    s_state, s_shadow, s_x_slot, s_z_slot, s_dt_slot, s_B_slot, s_C_slot, s_kept_slot, s_kept,
    s_x_lane, s_z_lane, s_dt_lane, s_B_lane, s_C_lane, s_x, s_z, s_dt, s_B, s_C, s_out_lane, s_out,
    s_D_head, s_D_element, seq_len, ring_len, chunk_size, dt_min, dt_max,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BN: tl.constexpr,
    ROWS: tl.constexpr, TP: tl.constexpr, COLUMNS: tl.constexpr, BP: tl.constexpr, FP: tl.constexpr, BT: tl.constexpr,
    SOFTPLUS: tl.constexpr, LAZY: tl.constexpr, FLAT: tl.constexpr, ONE: tl.constexpr, THREADS: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """Program (lane, head, block of its rows)."""
    PARTS: tl.constexpr = (P + BP - 1) // BP
    s_x_row: tl.constexpr = H * P
    s_B_row: tl.constexpr = G * N
    s_dt_row: tl.constexpr = H
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % H
    lane = (tl.program_id(0) // (PARTS * H)).to(tl.int64)
    group = head // (H // G)
    leads = (head == 0) & (part == 0)
    r = part * BP + tl.arange(0, BP)
    r_in = r < P
    n = tl.arange(0, NP)
    c = tl.arange(0, COLUMNS)
    t = c % TP if ONE else c
    t_all = tl.arange(0, TP)
    slot = tl.load(slots + lane).to(tl.int64)
    live = 0
    start = 0
    known = 0
    x += lane * s_x_lane + head * P
    dt += lane * s_dt_lane + head
    B += lane * s_B_lane + group * N
    C += lane * s_C_lane + group * N
    out += lane * s_out_lane + head * P
    if z is not None:
        z += lane * s_z_lane + head * P
    if FLAT:
        live = tl.load(num_buffered + lane).to(tl.int32)
        begin = tl.load(chunk_starts + lane).to(tl.int64)
        slot = tl.where(live < 0, live.to(tl.int64), slot)
        x_rows += begin * s_x
        B_rows += begin * s_B
        dt_rows += begin * s_dt
        x += (begin + live) * s_x
        B += (begin + live) * s_B
        C += (begin + live) * s_C
        dt += (begin + live) * s_dt
        if z is not None:
            z += (begin + live) * s_z
    # What the new tokens bring does not wait for the lane's cursors.
    new_in = r_in[:, None] & (t < seq_len)[None, :]
    skip = 0.0
    gate = 0.0
    bias = 0.0
    decay = tl.load(A + head).to(tl.float32)
    if dt_bias is not None:
        bias = tl.load(dt_bias + head).to(tl.float32)
    if D is not None:
        skip = tl.load(D + head * s_D_head + r * s_D_element, mask=r_in, other=0.0).to(tl.float32)
    if ONE:
        x_new = tl.load(x + r, mask=r_in, other=0.0)
        if z is not None:
            gate = tl.load(z + r, mask=r_in, other=0.0)
    else:
        x_new = tl.load(x + (t * s_x)[None, :] + r[:, None], mask=new_in, other=0.0)
        if z is not None:
            gate = tl.load(z + (t * s_z)[None, :] + r[:, None], mask=new_in, other=0.0)
    new = tl.load(dt + t * s_dt, mask=t < seq_len, other=0.0).to(tl.float32)
    B_in = (t_all < seq_len)[:, None] & (n < N)[None, :]
    B_new = tl.load(B + (t_all * s_B)[:, None] + n[None, :], mask=B_in, other=0.0)
    if not FLAT:
        live = tl.load(num_buffered + slot, mask=slot >= 0, other=0)
        if num_summed is not None:
            known = tl.load(num_summed + slot, mask=slot >= 0, other=0)
        if LAZY:
            start = tl.load(ring_start + slot, mask=slot >= 0, other=0)
    if slot < 0:
        pad(out, target_rows, chunk_flags, lane, leads, r, r_in, seq_len, s_out, TP, FLAT)
        return
    end = live + seq_len
    if FLAT:
        folds = tl.load(chunk_flags + lane) != 0
        slow = folds
        slot_rows = slot * 0
    else:
        folds = live >= chunk_size
        slow = end > chunk_size if LAZY else end >= chunk_size
        slot_rows = slot
    x_rows += slot_rows * s_x_slot + head * P
    dt_rows += slot_rows * s_dt_slot + head
    B_rows += slot_rows * s_B_slot + group * N
    state = ssm_state + slot * s_state + head * (P * N)
    rounded = shadow
    if shadow is not None:
        rounded = shadow + slot * s_shadow + head * (P * N)
    if num_summed is None:  # of this call alone
        kept += lane * s_kept_slot + head * s_kept
    else:
        kept += slot * s_kept_slot + head * s_kept
    # All programs of a head derive and store the same, as those of a group store the same new rows of B, and each reads
    # only what it has stored itself.
    if known < live:
        _derive(
            dt_rows, kept, decay + tl.zeros((1,), tl.float32), bias, s_dt_row, start, live, ring_len, chunk_size,
            dt_min, dt_max, ROWS, SOFTPLUS, LAZY,
        )  # fmt: skip
    if not FLAT:
        if ONE:
            tl.store(x_rows + place(start, live, ring_len, LAZY).to(tl.int64) * s_x_row + r, x_new, mask=r_in)
        else:
            x_at = place(start, live + t, ring_len, LAZY).to(tl.int64) * s_x_row
            tl.store(x_rows + x_at[None, :] + r[:, None], x_new, mask=new_in)
        B_at = place(start, live + t_all, ring_len, LAZY).to(tl.int64) * s_B_row
        tl.store(B_rows + B_at[:, None] + n[None, :], B_new, mask=B_in)
    tl.debug_barrier()
    # Every thread has needed the cursors by now. What the counter held is looked at in the end. One thread alone adds;
    # that each has a number of its own lets nobody wait for it here.
    thread = tl.arange(0, THREADS)
    ticket = thread
    if not FLAT:
        ticket = tl.atomic_add(arrivals + lane + thread, 1, mask=thread == 0, sem="relaxed")
    new = tl.where(t < seq_len, processed(new, bias, dt_min, dt_max, SOFTPLUS), 0.0)
    if slow:
        for q0 in range(0, BP, FP):
            q = part * BP + q0 + tl.arange(0, FP)
            q_in = q < P
            state_at = q.to(tl.int64)[:, None] * N + n[None, :]
            inside = q_in[:, None] & (n < N)[None, :]
            block = tl.load(state + state_at, mask=inside, other=0.0)
            skip_q = 0.0
            gate_q = 0.0
            if D is not None:
                skip_q = tl.load(D + head * s_D_head + q * s_D_element, mask=q_in, other=0.0).to(tl.float32)
            if ONE:
                x_q = tl.load(x + q, mask=q_in, other=0.0)
                if z is not None:
                    gate_q = tl.load(z + q, mask=q_in, other=0.0)
            else:
                q_new = q_in[:, None] & (t < seq_len)[None, :]
                x_q = tl.load(x + (t * s_x)[None, :] + q[:, None], mask=q_new, other=0.0)
                if z is not None:
                    gate_q = tl.load(z + (t * s_z)[None, :] + q[:, None], mask=q_new, other=0.0)
            for first in range(0, end, chunk_size):
                stop = tl.minimum(first + chunk_size, end)
                if stop > live:
                    y, newest = scored(
                        block, state, C, x_rows, B_rows, kept, s_x_row, s_B_row, s_C, q, q_in, start, first, live, stop,
                        ring_len, seq_len, t, new, decay, x_q, N, NP, BN, ROWS, TP, ONE, LAZY, True, False, OPERAND,
                    )  # fmt: skip
                    store_scores(
                        y, x_q, skip_q, gate_q, out, q, q_in, t, s_out, tl.maximum(first - live, 0), stop - live,
                        D is not None, z is not None, ONE,
                    )  # fmt: skip
                    mine = (t >= first - live) & (t < stop - live)
                    at = kept + place(start, live + t, ring_len, LAZY) * 2
                    tl.store(at, new, mask=mine)
                    tl.store(at + 1, newest, mask=mine)
                    tl.debug_barrier()
                if end > first + chunk_size if LAZY else True:
                    block = with_chunk(
                        block, x_rows, B_rows, kept, s_x_row, s_B_row, q, q_in, start, first, stop - first, ring_len,
                        N, BT, LAZY, OPERAND,
                    )  # fmt: skip
                    # Beyond the first chunk it is not known yet which tokens will stay.
                    if not LAZY or (first == 0 and folds):
                        tl.store(state + state_at, block, mask=inside)
                        if shadow is not None:
                            tl.store(rounded + state_at, block.to(OPERAND), mask=inside)
    else:
        read = state
        if shadow is not None:
            read = rounded
        y, newest = scored(
            0, read + part * (BP * N), C, x_rows, B_rows, kept, s_x_row, s_B_row, s_C, r, r_in, start, 0, live, end,
            ring_len, seq_len, t, new, decay, x_new, N, NP, BN, ROWS, TP, ONE, LAZY, False, P % BP == 0, OPERAND,
        )  # fmt: skip
        store_scores(y, x_new, skip, gate, out, r, r_in, t, s_out, 0, seq_len, D is not None, z is not None, ONE)
        if num_summed is not None and part == 0:
            at = kept + place(start, live + t, ring_len, LAZY) * 2
            mine = (t < seq_len) & (c < TP)
            tl.store(at, new, mask=mine)
            tl.store(at + 1, newest, mask=mine)
    if not FLAT:
        if part == 0:
            e = tl.arange(0, 1)
            _store_new(dt_rows, dt, s_dt_row, s_dt, start, live, seq_len, ring_len, e, e == 0, TP, LAZY)
            if C_rows is not None and head % (H // G) == 0:
                _store_new(
                    C_rows + slot * s_C_slot + group * N, C, s_B_row, s_C, start, live, seq_len, ring_len, n, n < N,
                    TP, LAZY,
                )  # fmt: skip
        if z_rows is not None and z is not None:
            _store_new(
                z_rows + slot * s_z_slot + head * P, z, s_x_row, s_z, start, live, seq_len, ring_len, r, r_in, TP, LAZY
            )
        if leads:
            tl.store(target_rows + lane, live - tl.where(folds, chunk_size, 0))
            tl.store(chunk_flags + lane, (folds if LAZY else slow).to(tl.int32))
        # The last program of the lane to come moves the cursors: all have read them.
        if tl.max(tl.where(thread == 0, ticket, 0), 0) == PARTS * H - 1:
            tl.store(arrivals + lane, 0)
            move_cursors(num_buffered, ring_start, slot, True, start, live, ring_len, chunk_size, folds, slow, LAZY)
            if num_summed is not None:
                passed = tl.where(folds if LAZY else slow, chunk_size, 0)
                tl.store(num_summed + slot, end - passed)
