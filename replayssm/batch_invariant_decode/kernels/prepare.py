"""What the rows of a chunk weigh, for some heads of a group."""

import triton
import triton.language as tl

from replayssm.batch_invariant_decode.kernels.lanes import row_pointers
from replayssm.ssd.kernels.arithmetic import fold_scale, multiply, processed, sums, weights


@triton.jit
def chunk_decays(
    dt_rows, dt, A, dt_bias, s_dt_row, s_dt, start, first, end, stored, ring_len, chunk_size, head, h_in,
    dt_min, dt_max, ROWS: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """``(processed dt, its sums)`` [heads, ROWS] of the chunk that begins ``first`` rows behind the oldest.

    Rows from ``end`` on count zero.
    """
    row = tl.arange(0, ROWS)
    inside = h_in[:, None] & ((row < chunk_size) & (first + row < end))[None, :]
    at = row_pointers(dt_rows, s_dt_row, dt, s_dt, start, first + row, stored, ring_len)
    value = tl.load(at[None, :] + head[:, None], mask=inside, other=0.0).to(tl.float32)
    bias = 0.0
    if dt_bias is not None:
        bias = tl.load(dt_bias + head, mask=h_in, other=0.0).to(tl.float32)[:, None]
    decay = tl.load(A + head, mask=h_in, other=0.0).to(tl.float32)
    value = tl.where(inside, processed(value, bias, dt_min, dt_max, SOFTPLUS), 0.0)
    return value, sums(value, decay)


@triton.jit
def chunk_products(
    B_rows, B, C, s_B_row, s_B, s_C, start, first, end, stored, ring_len, chunk_size, seq_len,
    N: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """``B_j C_t`` [ROWS, TOKENS] in fp32 for the chunk's rows and all new tokens."""
    row = tl.arange(0, ROWS)
    t = tl.arange(0, TOKENS)
    inside = (row < chunk_size) & (first + row < end)
    at = row_pointers(B_rows, s_B_row, B, s_B, start, first + row, stored, ring_len)
    products = tl.zeros((ROWS, TOKENS), tl.float32)
    for n0 in tl.range(0, N, BN):
        n = n0 + tl.arange(0, BN)
        B_tile = tl.load(at[:, None] + n[None, :], mask=inside[:, None] & (n < N)[None, :], other=0.0)
        C_at = C + (t * s_C)[None, :] + n[:, None]
        C_tile = tl.load(C_at, mask=(t < seq_len)[None, :] & (n < N)[:, None], other=0.0)
        products = multiply(B_tile, C_tile, products, True)
    return products


@triton.jit
def store_weights(
    dt_rows, B_rows, dt, B, C, A, dt_bias, row_weights, row_decays, fold_scales, fold_decays,
    s_dt_row, s_B_row, s_dt, s_B, s_C, start, live, seq_len, stored, ring_len, chunk_size, nheads, head, h_in,
    dt_min, dt_max, N: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    SOFTPLUS: tl.constexpr, FLAT: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Leave in memory what a lane needs that folds a chunk or crosses its end.

    The pointers stand at the lane: ``row_weights [heads, T, ROWS]`` rounded as the product reads them, ``row_decays
    [heads, T]``, and of the first two chunks, if full, ``fold_scales [2, heads, ROWS]`` and ``fold_decays [2, heads]``.
    """
    row = tl.arange(0, ROWS)
    t = tl.arange(0, TOKENS)
    end = live + seq_len
    for chunk in range(0, tl.cdiv(end, chunk_size)):
        first = chunk * chunk_size
        value, total = chunk_decays(
            dt_rows, dt, A, dt_bias, s_dt_row, s_dt, start, first, end, stored, ring_len, chunk_size, head, h_in,
            dt_min, dt_max, ROWS, SOFTPLUS,
        )  # fmt: skip
        if FLAT or end >= first + chunk_size:
            newest = tl.sum(tl.where((row == chunk_size - 1)[None, :], total, 0.0), 1)
            index = tl.minimum(chunk, 1) * nheads + head
            tl.store(fold_decays + index, tl.exp(newest), mask=h_in)
            scale = fold_scale(newest[:, None], total, value)
            tl.store(fold_scales + index[:, None] * ROWS + row[None, :], scale, mask=h_in[:, None])
        before = live - first
        if before < chunk_size:
            products = chunk_products(
                B_rows, B, C, s_B_row, s_B, s_C, start, first, end, stored, ring_len, chunk_size, seq_len,
                N, BN, ROWS, TOKENS,
            )  # fmt: skip
            for i in range(tl.maximum(-before, 0), tl.minimum(seq_len, chunk_size - before)):
                here = tl.sum(tl.where((row == before + i)[None, :], total, 0.0), 1)
                product = tl.sum(tl.where((t == i)[None, :], products, 0.0), 1)
                w = weights(product[None, :], here[:, None], total, value)
                w = tl.where((row <= before + i)[None, :], w, 0.0)
                index_w = head * seq_len + i
                tl.store(row_decays + index_w, tl.exp(here), mask=h_in)
                tl.store(row_weights + index_w[:, None] * ROWS + row[None, :], w.to(OPERAND), mask=h_in[:, None])
