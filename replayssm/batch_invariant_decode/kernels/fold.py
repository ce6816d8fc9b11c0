"""A lane that has a chunk to fold, or whose tokens cross the end of one: it folds before and between its tokens."""

import triton
import triton.language as tl

from replayssm.batch_invariant_decode.kernels.blocks import state_times
from replayssm.batch_invariant_decode.kernels.lanes import ring_row, row_pointers
from replayssm.ssd.kernels.arithmetic import (
    finished,
    fold_columns,
    fold_scale,
    holds_no_number,
    multiply,
    times,
    weights,
)


@triton.jit
def score(
    carried, x_rows, x, products, sums, p_in, p, start, first, before, rows, stored, x_row, s_x, seq_len, ring_len,
    ROWS: tl.constexpr, BT: tl.constexpr, CAREFUL: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """``y`` [rows of the state, tokens] before skip and gate, from the ``rows`` rows of the chunk at ``first``.

    ``carried`` is the state times C, ``products`` those of B and C, ``sums`` the head's. Token i is row ``before + i``
    of the chunk. Columns of tokens that lie in another chunk hold nothing of use. With ``CAREFUL`` a new row of x may
    be no number. Loads are then not read ahead: Triton 3.6 reads into the memory of a product that stands in a
    branch.
    """
    t = tl.arange(0, carried.shape[1])
    token = tl.arange(0, BT)
    own = (t >= -before) & (t < rows - before) & (t < seq_len)
    newest = tl.load(sums + ring_row(start, first + before + t, ring_len) * 2 + 1, mask=own, other=0.0)
    y = times(carried, tl.exp(newest)[None, :], OPERAND)
    for j0 in tl.range(0, rows, BT, num_stages=1 if CAREFUL else 2):
        j = j0 + token
        counted = (j[:, None] <= (before + t)[None, :]) & own[None, :]
        product = tl.load(products + (t * ROWS)[None, :] + j[:, None], mask=counted, other=0.0)
        kept = sums + ring_row(start, first + j, ring_len) * 2
        dt = tl.load(kept, mask=j < rows, other=0.0)
        total = tl.load(kept + 1, mask=j < rows, other=0.0)
        w = tl.where(counted, weights(product, newest[None, :], total[:, None], dt[:, None]), 0.0).to(OPERAND)
        at = row_pointers(x_rows, x_row, x, s_x, start, first + j, stored, ring_len)
        tile = tl.load(at[:, None] + p[None, :], mask=(j < rows)[:, None] & p_in[None, :], other=0.0)
        if CAREFUL:
            # Zero times a later token that is no number would reach an earlier one.
            if j0 + BT > before + 1 and holds_no_number(tile) != 0:
                old = y
                for i in range(0, seq_len):
                    seen = tl.where((j <= before + i)[:, None], tile, 0.0).to(OPERAND)
                    y = tl.where((t == i)[None, :], multiply(tl.trans(seen), w, old, True), y)
            else:
                y = multiply(tl.trans(tile), w, y, True)
        else:
            y = multiply(tl.trans(tile), w, y, True)
    return y


@triton.jit
def folded(
    state, x_rows, x, B_rows, B, sums, p_in, p, start, first, rows, stored, x_row, s_x, B_row, s_B, ring_len,
    N: tl.constexpr, BT: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """The state after the ``rows`` rows of the chunk at ``first``."""
    newest = tl.load(sums + ring_row(start, first + rows - 1, ring_len) * 2 + 1)
    added = tl.zeros(state.shape, tl.float32)
    n = tl.arange(0, state.shape[1])
    for j0 in range(0, rows, BT):
        j = j0 + tl.arange(0, BT)
        j_in = j < rows
        x_at = row_pointers(x_rows, x_row, x, s_x, start, first + j, stored, ring_len)
        B_at = row_pointers(B_rows, B_row, B, s_B, start, first + j, stored, ring_len)
        x_tile = tl.load(x_at[:, None] + p[None, :], mask=j_in[:, None] & p_in[None, :], other=0.0)
        B_tile = tl.load(B_at[:, None] + n[None, :], mask=j_in[:, None] & (n < N)[None, :], other=0.0)
        kept = sums + ring_row(start, first + j, ring_len) * 2
        dt = tl.load(kept, mask=j_in, other=0.0)
        total = tl.load(kept + 1, mask=j_in, other=0.0)
        scaled = fold_columns(B_tile, tl.where(j_in, fold_scale(newest, total, dt), 0.0), OPERAND)
        added = multiply(tl.trans(x_tile), scaled, added, True)
    return tl.fma(tl.exp(newest), state, added)


@triton.jit
def skip_of(D, p, p_in, s_D_element):
    """D of a head's rows in fp32 ``[rows, 1]``, zero without."""
    if D is None:
        return 0.0
    else:
        return tl.load(D + p * s_D_element, mask=p_in, other=0.0).to(tl.float32)[:, None]


@triton.jit
def tokens_of(x, z, D, p, mask, t, s_x, s_z):
    """What skip and gate read of the new tokens, ``[rows, tokens]`` each; zero where there is neither."""
    x_new = 0.0
    gate = 0.0
    if D is not None:
        x_new = tl.load(x + (t * s_x)[None, :] + p[:, None], mask=mask, other=0.0)
    if z is not None:
        gate = tl.load(z + (t * s_z)[None, :] + p[:, None], mask=mask, other=0.0)
    return x_new, gate


@triton.jit
def cross_chunks(
    state, shadow, C, x_rows, x, B_rows, B, z, D, out, products, sums, folds,
    start, live, stored, x_row, s_x, B_row, s_B, s_z, s_out, s_D_element, seq_len, ring_len, chunk_size, p0,
    P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, ROWS: tl.constexpr, FP: tl.constexpr,
    BT: tl.constexpr, LAZY: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Rows ``p0..p0 + FP`` of one head: score every chunk's tokens, fold in between, store what is settled."""
    end = live + seq_len
    n = tl.arange(0, NP)
    t = tl.arange(0, C.shape[1])
    q = p0 + tl.arange(0, FP)
    q_in = q < P
    at = q[:, None] * N + n[None, :]
    inside = q_in[:, None] & (n < N)[None, :]
    block = tl.load(state + at, mask=inside, other=0.0)
    skip = skip_of(D, q, q_in, s_D_element)
    for c in range(0, (end - 1) // chunk_size + 1):
        first = c * chunk_size
        before = live - first
        if before < chunk_size:
            rows = tl.minimum(before + seq_len, chunk_size)
            carried = state_times(block, C, NP, OPERAND)
            y = score(
                carried, x_rows, x, products, sums, q_in, q, start, first, before, rows, stored, x_row, s_x,
                seq_len, ring_len, ROWS, BT, LAZY, OPERAND,
            )  # fmt: skip
            mine = q_in[:, None] & ((t >= -before) & (t < rows - before))[None, :]
            x_new, gate = tokens_of(x, z, D, q, mine, t, s_x, s_z)
            y = finished(y, x_new, skip, gate, D is not None, z is not None)
            tl.store(out + (t * s_out)[None, :] + q[:, None], y.to(out.dtype.element_ty), mask=mine)
        if end > first + chunk_size if LAZY else True:
            block = folded(
                block, x_rows, x, B_rows, B, sums, q_in, q, start, first, chunk_size, stored, x_row, s_x, B_row, s_B,
                ring_len, N, BT, OPERAND,
            )  # fmt: skip
            # Beyond the first chunk it is not known yet which tokens will stay.
            if not LAZY or (c == 0 and folds):
                tl.store(state + at, block, mask=inside)
                if shadow is not None:
                    tl.store(shadow + at, block.to(OPERAND), mask=inside)
