"""What a lane's new tokens score on one chunk, in registers, from dt and its sums as the buffers keep them."""

import triton
import triton.language as tl

from replayssm.batch_invariant_decode.kernels.blocks import in_blocks
from replayssm.batch_invariant_decode.kernels.lanes import place
from replayssm.ssd.kernels.arithmetic import (
    finished,
    fold_columns,
    fold_scale,
    holds_no_number,
    lane_sums,
    multiply,
    times,
    weights,
)


@triton.jit
def lane_values(sums, start, first, live, ring_len, i, LANES: tl.constexpr, PER: tl.constexpr, LAZY: tl.constexpr):
    """A head's kept numbers [1, lanes] of row ``i`` of every lane of the chunk at ``first``."""
    row = first + tl.arange(0, LANES) * PER + i
    return tl.load(sums + place(start, row, ring_len, LAZY) * 2, mask=row < live, other=0.0)[None, :]


@triton.jit
def put(values, first_of, at, value):
    """Put ``value`` at row ``at``; ``values`` are four [1, lanes] by row of a lane, which begins at ``first_of``."""
    v0, v1, v2, v3 = values
    return (
        tl.where(first_of == at, value, v0), tl.where(first_of + 1 == at, value, v1),
        tl.where(first_of + 2 == at, value, v2), tl.where(first_of + 3 == at, value, v3),
    )  # fmt: skip


@triton.jit
def sum_at(total, at, LANES: tl.constexpr, PER: tl.constexpr):
    """The sum of row ``at`` of the chunk, of four [1, lanes] by row of a lane."""
    s0, s1, s2, s3 = total
    i = at % PER
    own = tl.where(i < 2, tl.where(i == 0, s0, s1), tl.where(i == 2, s2, s3))
    return tl.sum(tl.sum(tl.where(tl.arange(0, LANES)[None, :] == at // PER, own, 0.0), 1), 0)


@triton.jit
def token_of(values, t, k):
    """Number ``k`` of ``values``."""
    return tl.sum(tl.where(t == k, values, 0.0), 0)


@triton.jit
def with_token(k, total, first, live, row, t, dt, newest, G, delta, LANES: tl.constexpr, PER: tl.constexpr):
    """Put token ``k``'s sum in its column, its sum and dt in its row."""
    sum_k = sum_at(total, live + k - first, LANES, PER)
    here = first + row == live + k
    return tl.where(t == k, sum_k, newest), tl.where(here, sum_k, G), tl.where(here, token_of(dt, t, k), delta)


@triton.jit
def scored(
    values, state, C, x_rows, B_rows, sums, s_x_row: tl.constexpr, s_B_row: tl.constexpr, s_C, r, r_in,
    start, first, live, stop, ring_len, seq_len, t, dt, A, fresh,
    N: tl.constexpr, NP: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, TP: tl.constexpr, ONE: tl.constexpr,
    LAZY: tl.constexpr, LOADED: tl.constexpr, WHOLE: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """``(y [rows of the state, columns] before skip and gate, the tokens' sums)`` of the chunk at ``first``.

    All new rows are in the ring, their processed ``dt`` [columns] is given. A column is a token; of one token, all
    columns hold the same. Those whose token is not in ``first..stop`` hold nothing of use. The state is ``values`` if
    ``LOADED``, else read from ``state``, its first row. ``fresh``: the new rows of x.
    """
    PER: tl.constexpr = 1 if ROWS == 16 else 2 if ROWS == 32 else 4
    LANES: tl.constexpr = ROWS // PER
    COLUMNS: tl.constexpr = t.shape[0]
    row = tl.arange(0, ROWS)
    n = tl.arange(0, NP)
    at = place(start, first + row, ring_len, LAZY)
    inside = first + row < stop
    is_old = first + row < live
    x_from = (x_rows + r)[:, None] + (at * s_x_row)[None, :]
    x_in = inside[None, :]
    state_in = (n < N)[None, :]
    if not WHOLE:
        x_in = x_in & r_in[:, None]
        state_in = state_in & r_in[:, None]
    B_in = inside[:, None]
    if N != NP:
        B_in = B_in & (n < N)[None, :]
    t_in = t < seq_len
    v0 = lane_values(sums, start, first, live, ring_len, 0, LANES, PER, LAZY)
    v1 = lane_values(sums, start, first, live, ring_len, 1 % PER, LANES, PER, LAZY)
    v2 = lane_values(sums, start, first, live, ring_len, 2 % PER, LANES, PER, LAZY)
    v3 = lane_values(sums, start, first, live, ring_len, 3 % PER, LANES, PER, LAZY)
    last = lane_values(sums + 1, start, first, live, ring_len, PER - 1, LANES, PER, LAZY)
    first_of = (first + tl.arange(0, LANES) * PER)[None, :]
    y = tl.zeros((r.shape[0], COLUMNS), tl.float32)
    carried = y
    w = tl.zeros((ROWS, COLUMNS), OPERAND)
    newest = tl.zeros((COLUMNS,), tl.float32)
    # A loop of one turn, which the compiler does not know: it copies what a loop loads straight to shared memory, and
    # nothing that waits for a load is moved ahead of the copies.
    for turn in tl.range(0, tl.minimum(seq_len, 1), num_stages=2 if BN >= NP else 1):
        ahead = turn * 16
        live_now = live + turn
        C_at = C + ahead + (t * s_C)[None, :] + n[:, None]
        C_tile = tl.load(C_at, mask=t_in[None, :] & (n < N)[:, None], other=0.0)
        if BN >= NP:
            B_at = (B_rows + ahead + n)[None, :] + (at * s_B_row)[:, None]
            B_tile = tl.load(B_at, mask=B_in, other=0.0)
        x_tile = tl.load(x_from + ahead, mask=x_in, other=0.0)
        delta = tl.load(sums + ahead + at * 2, mask=is_old, other=0.0)
        G = tl.load(sums + ahead + at * 2 + 1, mask=is_old, other=0.0)
        if LOADED:
            own = values
        else:
            state_at = (state + ahead + n)[None, :] + (tl.arange(0, r.shape[0]) * N)[:, None]
            if WHOLE and N == NP:
                own = tl.load(state_at)
            else:
                own = tl.load(state_at, mask=state_in, other=0.0)
        products = tl.zeros((ROWS, COLUMNS), tl.float32)
        if BN >= NP:
            products = multiply(B_tile, C_tile, products, True)
        else:
            for n0 in tl.range(0, N, BN):
                m = n0 + tl.arange(0, BN)
                B_at = (B_rows + m)[None, :] + (at * s_B_row)[:, None]
                B_part = tl.load(B_at, mask=inside[:, None] & (m < N)[None, :], other=0.0)
                C_part = tl.load(C + (t * s_C)[None, :] + m[:, None], mask=t_in[None, :] & (m < N)[:, None], other=0.0)
                products = multiply(B_part, C_part, products, True)
        carried = in_blocks(own.to(OPERAND), C_tile, tl.zeros((r.shape[0], COLUMNS), tl.float32))
        kept = v0, v1, v2, v3
        again = (live_now - first) % PER + seq_len > PER - 1
        if ONE:
            dt_0 = token_of(dt, tl.arange(0, COLUMNS), 0)
            total = lane_sums(put(kept, first_of, live_now, dt_0), last, A, again, ROWS)
            sum_0 = sum_at(total, live_now - first, LANES, PER)
            is_new = first + row == live_now
            product = tl.sum(tl.where(tl.arange(0, COLUMNS)[None, :] == 0, products, 0.0), 1)
            w_0 = weights(product, sum_0, tl.where(is_new, sum_0, G), tl.where(is_new, dt_0, delta))
            w_0 = tl.where(inside, w_0, 0.0).to(OPERAND)
            w = tl.broadcast_to(w_0[:, None], (ROWS, COLUMNS))
            newest = tl.zeros((COLUMNS,), tl.float32) + sum_0
            carried = times(carried, tl.exp(sum_0), OPERAND)
        else:
            newest = dt
            G_all = G
            dt_all = delta
            if TP <= 8:
                for k in tl.static_range(TP):
                    kept = put(kept, first_of, live_now + k, token_of(dt, t, k))
                total = lane_sums(kept, last, A, again, ROWS)
                for k in tl.static_range(TP):
                    newest, G_all, dt_all = with_token(
                        k, total, first, live_now, row, t, dt, newest, G_all, dt_all, LANES, PER
                    )
            else:
                for k in range(0, seq_len):
                    v0, v1, v2, v3 = put((v0, v1, v2, v3), first_of, live_now + k, token_of(dt, t, k))
                total = lane_sums((v0, v1, v2, v3), last, A, again, ROWS)
                for k in range(0, seq_len):
                    newest, G_all, dt_all = with_token(
                        k, total, first, live_now, row, t, dt, newest, G_all, dt_all, LANES, PER
                    )
            w = weights(products, newest[None, :], G_all[:, None], dt_all[:, None])
            w = tl.where((first + row)[:, None] <= (live + t)[None, :], w, 0.0)
            w = tl.where(t_in[None, :], w, 0.0).to(OPERAND)
            carried = times(carried, tl.exp(newest)[None, :], OPERAND)
        y = in_blocks(x_tile, w, carried)
    careful = 0
    if not ONE:
        careful = holds_no_number(fresh)
    if careful != 0:  # zero times a later token that is no number would reach an earlier one
        x_tile = tl.load(x_from, mask=x_in, other=0.0)
        for k in range(0, seq_len):
            seen = tl.where((first + row <= live + k)[None, :], x_tile, 0.0).to(OPERAND)
            y = tl.where((t == k)[None, :], in_blocks(seen, w, carried), y)
    return y, newest


@triton.jit
def store_scores(y, x_new, skip, gate, out, r, r_in, t, s_out, first, stop,
                 HAS_D: tl.constexpr, HAS_Z: tl.constexpr, ONE: tl.constexpr):  # fmt: skip
    """Skip, gate and store the tokens ``first..stop``; of one token, columns hold the same."""
    if ONE:
        c = tl.arange(0, y.shape[1])
        bits = tl.sum(tl.where((c == 0)[None, :], y.to(tl.int32, bitcast=True), 0), 1)
        y = finished(bits.to(tl.float32, bitcast=True), x_new, skip, gate, HAS_D, HAS_Z)
        tl.store(out + r, y.to(out.dtype.element_ty), mask=r_in)
    else:
        if HAS_D:
            skip = skip[:, None]
        y = finished(y, x_new, skip, gate, HAS_D, HAS_Z)
        mask = r_in[:, None] & ((t >= first) & (t < stop))[None, :]
        tl.store(out + (t * s_out)[None, :] + r[:, None], y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def with_chunk(
    state, x_rows, B_rows, sums, s_x_row, s_B_row, r, r_in, start, first, rows, ring_len,
    N: tl.constexpr, BT: tl.constexpr, LAZY: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """The state [rows, NP] of a head after the ``rows`` rows of the chunk at ``first``, all of whose sums are kept."""
    n = tl.arange(0, state.shape[1])
    newest = tl.load(sums + place(start, first + rows - 1, ring_len, LAZY) * 2 + 1)
    added = tl.zeros(state.shape, tl.float32)
    for j0 in range(0, rows, BT):
        j = j0 + tl.arange(0, BT)
        inside = j < rows
        at = place(start, first + j, ring_len, LAZY)
        far = at.to(tl.int64)
        x_tile = tl.load(
            x_rows + (far * s_x_row)[None, :] + r[:, None], mask=inside[None, :] & r_in[:, None], other=0.0
        )
        B_tile = tl.load(
            B_rows + (far * s_B_row)[:, None] + n[None, :], mask=inside[:, None] & (n < N)[None, :], other=0.0
        )
        delta = tl.load(sums + at * 2, mask=inside, other=0.0)
        G = tl.load(sums + at * 2 + 1, mask=inside, other=0.0)
        scaled = fold_columns(B_tile, tl.where(inside, fold_scale(newest, G, delta), 0.0), OPERAND)
        added = multiply(x_tile, scaled, added, True)
    return tl.fma(tl.exp(newest), state, added)
