"""A lane that has a chunk to fold, or whose tokens cross the end of one: it folds before and between its tokens."""

import triton
import triton.language as tl

from replayssm.batch_invariant_decode.kernels.blocks import in_blocks, token_weights
from replayssm.batch_invariant_decode.kernels.lanes import place
from replayssm.batch_invariant_decode.kernels.tokens import with_chunk
from replayssm.ssd.kernels.arithmetic import finished, holds_no_number, multiply, times


@triton.jit
def _score(
    carried, x_rows, products, sums, r, r_in, start, first, before, rows, s_x_row, seq_len, ring_len,
    ROWS: tl.constexpr, BT: tl.constexpr, LAZY: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """``y`` [rows of the state, tokens] before skip and gate, from the ``rows`` rows of the chunk at ``first``.

    ``carried`` is the state times C. Token i is row ``before + i`` of the chunk. Columns of tokens that lie in another
    chunk hold nothing of use. With ``LAZY`` a new row of x may be no number. Loads are then not read ahead: Triton 3.6
    reads into the memory of a product that stands in a branch.
    """
    t = tl.arange(0, carried.shape[1])
    token = tl.arange(0, BT)
    own = (t >= -before) & (t < rows - before) & (t < seq_len)
    newest = tl.load(sums + place(start, first + before + t, ring_len, LAZY) * 2 + 1, mask=own, other=0.0)
    y = times(carried, tl.exp(newest)[None, :], OPERAND)
    for j0 in tl.range(0, rows, BT, num_stages=1 if LAZY else 2):
        j = j0 + token
        at = place(start, first + j, ring_len, LAZY)
        w = token_weights(products, sums + t * 0, newest, at, j, before, t, own, ROWS, OPERAND)
        x_at = x_rows + (at.to(tl.int64) * s_x_row)[None, :] + r[:, None]
        tile = tl.load(x_at, mask=(j < rows)[None, :] & r_in[:, None], other=0.0)
        if LAZY:
            # Zero times a later token that is no number would reach an earlier one.
            if j0 + BT > before + 1 and holds_no_number(tile) != 0:
                old = y
                for i in range(0, seq_len):
                    seen = tl.where((j <= before + i)[None, :], tile, 0.0).to(OPERAND)
                    y = tl.where((t == i)[None, :], multiply(seen, w, old, True), y)
            else:
                y = multiply(tile, w, y, True)
        else:
            y = multiply(tile, w, y, True)
    return y


@triton.jit
def cross_chunks(
    state, shadow, C, x_rows, B_rows, sums, x, z, D, out, products, folds,
    start, live, s_x_row, s_B_row, s_x, s_z, s_out, s_D_element, seq_len, ring_len, chunk_size, p0,
    P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, ROWS: tl.constexpr, BP: tl.constexpr, BT: tl.constexpr,
    LAZY: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Rows ``p0..p0 + BP`` of one head: score every chunk's tokens, fold in between, store what is settled.

    The new rows are in the ring, their sums are kept.
    """
    end = live + seq_len
    n = tl.arange(0, NP)
    t = tl.arange(0, C.shape[1])
    r = p0 + tl.arange(0, BP)
    r_in = r < P
    at = r[:, None] * N + n[None, :]
    inside = r_in[:, None] & (n < N)[None, :]
    block = tl.load(state + at, mask=inside, other=0.0)
    skip = 0.0
    if D is not None:
        skip = tl.load(D + r * s_D_element, mask=r_in, other=0.0).to(tl.float32)[:, None]
    for first in range(0, end, chunk_size):
        before = live - first
        if before < chunk_size:
            rows = tl.minimum(before + seq_len, chunk_size)
            carried = in_blocks(block.to(OPERAND), C, tl.zeros((BP, C.shape[1]), tl.float32))
            y = _score(
                carried, x_rows, products, sums, r, r_in, start, first, before, rows, s_x_row, seq_len, ring_len,
                ROWS, BT, LAZY, OPERAND,
            )  # fmt: skip
            mine = r_in[:, None] & ((t >= -before) & (t < rows - before))[None, :]
            x_new = 0.0
            gate = 0.0
            if D is not None:
                x_new = tl.load(x + (t * s_x)[None, :] + r[:, None], mask=mine, other=0.0)
            if z is not None:
                gate = tl.load(z + (t * s_z)[None, :] + r[:, None], mask=mine, other=0.0)
            y = finished(y, x_new, skip, gate, D is not None, z is not None)
            tl.store(out + (t * s_out)[None, :] + r[:, None], y.to(out.dtype.element_ty), mask=mine)
        if end > first + chunk_size if LAZY else True:
            block = with_chunk(
                block, x_rows, B_rows, sums, s_x_row, s_B_row, r, r_in, start, first, chunk_size, ring_len,
                N, BT, LAZY, OPERAND,
            )  # fmt: skip
            # Beyond the first chunk it is not known yet which tokens will stay.
            if not LAZY or (first == 0 and folds):
                tl.store(state + at, block, mask=inside)
                if shadow is not None:
                    tl.store(shadow + at, block.to(OPERAND), mask=inside)
