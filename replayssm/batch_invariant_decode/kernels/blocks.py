"""What a head's new tokens score where products are fp32: the matrix unit sums ``TERMS`` terms at a time."""

import triton
import triton.language as tl

from replayssm.batch_invariant_decode.kernels.lanes import place
from replayssm.ssd.kernels.arithmetic import multiply, times, weights
from replayssm.ssd.kernels.constants import TERMS


@triton.jit
def in_blocks(a, b, total):
    """``total + a b`` of operands in registers; blocks of zeros change no bit."""
    if a.dtype == tl.float32:
        TERMS_IN: tl.constexpr = a.shape[1]
        BLOCK: tl.constexpr = min(TERMS, TERMS_IN)
        term = tl.arange(0, TERMS_IN)
        for k0 in tl.range(0, TERMS_IN, BLOCK, num_stages=1):
            own = tl.where((term // BLOCK == k0 // BLOCK)[None, :], a, 0.0)
            total = multiply(own, b, total, True)
        return total
    else:
        return multiply(a, b, total, True)


@triton.jit
def loaded_rows(products, sums, at, row, live, t, c_in, ROWS: tl.constexpr):
    """What ``rows_weigh`` needs [rows, columns]: processed dt and its sums, as one number, and ``B_j C_t``."""
    seen = (row[:, None] <= live + t[None, :]) & c_in[None, :]
    pair = tl.load(sums.to(tl.pointer_type(tl.int64))[None, :] + at[:, None], mask=seen, other=0)
    return pair, tl.load(products + ((t * ROWS)[None, :] + row[:, None]), mask=seen, other=0.0)


@triton.jit
def rows_weigh(pair, product, newest, row, live, t, c_in, OPERAND: tl.constexpr):
    """The weights of a chunk's rows for tokens of some heads, rounded as the product reads them."""
    seen = (row[:, None] <= live + t[None, :]) & c_in[None, :]
    dt = pair.to(tl.int32).to(tl.float32, bitcast=True)
    total = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(seen, weights(product, newest[None, :], total, dt), 0.0).to(OPERAND)


@triton.jit
def token_weights(products, sums, newest, at, row, live, t, c_in, ROWS: tl.constexpr, OPERAND: tl.constexpr):
    """Both at once."""
    pair, product = loaded_rows(products, sums, at, row, live, t, c_in, ROWS)
    return rows_weigh(pair, product, newest, row, live, t, c_in, OPERAND)


@triton.jit
def score_in_blocks(
    state, C, x_rows, products, sums, newest, start, ring_len, s_x_row, s_C, r, r_in, live, seq_len, t, c_in,
    N: tl.constexpr, NP: tl.constexpr, ROWS: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr, LAZY: tl.constexpr,
):  # fmt: skip
    """``y`` [rows of the state, columns] before skip and gate, read block by block."""
    BN: tl.constexpr = min(TERMS, NP)
    y = tl.zeros((r.shape[0], t.shape[0]), tl.float32)
    for n0 in tl.range(0, N, BN, num_stages=STAGES):
        n = n0 + tl.arange(0, BN)
        values = tl.load(state + r[:, None] * N + n[None, :], mask=r_in[:, None] & (n < N)[None, :], other=0.0)
        C_tile = tl.load(C + (t * s_C)[None, :] + n[:, None], mask=c_in[None, :] & (n < N)[:, None], other=0.0)
        y = multiply(values, C_tile, y, True)
    y = times(y, tl.exp(newest)[None, :], tl.float32)
    for j0 in tl.range(0, live + seq_len, BT, num_stages=STAGES):
        j = j0 + tl.arange(0, BT)
        at = place(start, j, ring_len, LAZY)
        seen = (j < live + seq_len)[None, :] & r_in[:, None]
        x_tile = tl.load(x_rows + (at[None, :] * s_x_row + r[:, None]), mask=seen, other=0.0)
        w = token_weights(products, sums, newest, at, j, live, t, c_in, ROWS, tl.float32)
        y = multiply(x_tile, w, y, True)
    return y
