"""The part of the window form (``docs/maths.md`` §7) that needs no state: gates, products of the tokens, the solve.

A kernel of one warp per head does it ahead of the one that reads states.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from replayssm.delta_rule.kernels import exp, log_decay, near_inverse_norm, strength


@triton.jit
def held(x, ASM: tl.constexpr):
    """The tile itself, but the compiler neither moves what is done with it above this line nor what was done below it.

    A loaded tile that needs another layout is written to shared memory right behind the load, which waits for it, so
    that later loads start one latency late. Behind this line it is not.
    """
    if ASM:
        PACK: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, PACK)
    else:
        return x


@triton.jit
def both(
    k, q, first, s_k_t, s_k_k, s_q_t, s_q_k, T,
    K: tl.constexpr, COLUMNS: tl.constexpr, TP: tl.constexpr, K_TYPE: tl.constexpr,
):  # fmt: skip
    """Columns from ``first`` on of the keys, rounded to a type, and below them of the queries, ``[2 TP, COLUMNS]``."""
    row = tl.arange(0, 2 * TP)
    token = row % TP
    c = first + tl.arange(0, COLUMNS)
    inside = (token < T)[:, None] & (c < K)[None, :]
    keys = tl.load(k + token[:, None] * s_k_t + c[None, :] * s_k_k, mask=inside & (row < TP)[:, None], other=0.0)
    queries = tl.load(q + token[:, None] * s_q_t + c[None, :] * s_q_k, mask=inside & (row >= TP)[:, None], other=0.0)
    if queries.dtype == K_TYPE:
        return keys.to(K_TYPE) + queries
    else:
        return keys.to(K_TYPE).to(tl.float32) + queries.to(tl.float32)


@triton.jit
def operand_order(x, E: tl.constexpr):
    """Columns in the order in which loads of E columns a thread make an operand."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    x = tl.reshape(x, (ROWS, COLUMNS // (4 * E), 4, E // 2, 2))
    return tl.reshape(tl.permute(x, (0, 1, 3, 2, 4)), (ROWS, COLUMNS))


@triton.jit
def _gates(A_log, a, dt_bias, b, T, ASM: tl.constexpr):
    """Log decay, decay and beta of the tokens ``[TP]``; a decay of 1 and any beta beyond T."""
    g = log_decay(A_log, a, dt_bias)
    decay = tl.where(tl.arange(0, a.shape[0]) < T, exp(g), 1.0)
    # Held, as the compiler would compute them again for every layout in which they are used.
    return held(g, ASM), held(decay, ASM), held(strength(b), ASM)


@triton.jit
def _solve(products, decay, beta, scale, T: tl.constexpr, NORM: tl.constexpr):
    """Factors of S k and S q ``[2 TP]`` and ``M = F (I + A)^-1 diag(beta)`` ``[TP, TP]``.

    With ``A = diag(beta) L`` that is the solution of ``M (I + L diag(beta)) = F diag(beta)``, found in fp32 by backward
    substitution, a column of M at a time.
    """
    TP: tl.constexpr = products.shape[0] // 2
    row = tl.arange(0, 2 * TP)
    t = tl.arange(0, TP)[:, None]
    j = tl.arange(0, TP)[None, :]
    # Products of decays, not differences of sums of logarithms, which may be infinite. Numbers, which are in every
    # thread, become part of tiles without an exchange between layouts.
    between = tl.full((TP, TP), 1.0, tl.float32)
    prefix = tl.full((2 * TP,), 1.0, tl.float32)
    strengths = tl.full((1, TP), 0.0, tl.float32)
    for i in tl.static_range(T):
        here = tl.arange(0, TP) == i
        number = tl.sum(tl.where(here, decay, 0.0), 0)
        between = between * tl.where((t >= i) & (j < i), number, 1.0)
        prefix = prefix * tl.where(row % TP >= i, number, 1.0)
        strengths = tl.where(j == i, tl.sum(tl.where(here, beta, 0.0), 0), strengths)
    factors = prefix * tl.where(row < TP, 1.0, scale)
    if NORM:
        squares = tl.where(row[:, None] == row[None, :], products, 0.0)
        norms = near_inverse_norm(tl.sum(squares, 1))
        products = products * norms[:, None] * near_inverse_norm(tl.sum(squares, 0))[None, :]
        factors = factors * norms
    left, _ = tl.split(tl.permute(tl.reshape(products, (2, TP, 2, TP)), (1, 3, 0, 2)))
    kk, qk = tl.split(left)
    weights = between * strengths
    system = tl.where(t > j, kk * weights, 0.0)
    M = tl.where(t >= j, qk * weights * scale, 0.0)
    for i in tl.static_range(T - 1):
        column = tl.sum(tl.where(j == T - 1 - i, M, 0.0), 1)
        equation = tl.sum(tl.where(t == T - 1 - i, system, 0.0), 0)
        M = tl.fma(-column[:, None], equation[None, :], M)
    return factors, M


@triton.jit
def solve_ahead(
    solved, rawk, g_window, beta_window, q, k, read_slots, A_log, a, dt_bias, b, scale,
    s_rawk, s_g, s_beta, s_q_b, s_q_t, s_q_h, s_q_k, s_k_b, s_k_t, s_k_h, s_k_k, s_read, s_A, s_a_b, s_a_t, s_a_h,
    s_bias, s_b_b, s_b_t, s_b_h, HV, heads_per_key,
    T: tl.constexpr, TP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, E: tl.constexpr, NORM: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, ASM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Store the factors and M of one head for the kernel that reads states; records of k, g, beta."""
    if OVERLAP:
        gdc_launch_dependents()
    head = tl.program_id(0) % HV
    key_head = head // heads_per_key
    request = (tl.program_id(0) // HV).to(tl.int64)
    k += request * s_k_b + key_head * s_k_h
    q += request * s_q_b + key_head * s_q_h
    # A thread's loads make its share of both operands of the products; the order of columns is free.
    token = (tl.arange(0, TP // 8)[None, :, None, None] * 8 + tl.arange(0, 8)[:, None, None, None]).to(tl.int64)
    c = tl.arange(0, KP // (4 * E))[None, None, :, None] * (4 * E) + tl.arange(0, 4 * E)[None, None, None, :]
    inside = (token < T) & (c < K)
    keys = tl.load(k + token * s_k_t + c * s_k_k, mask=inside, other=0.0)
    queries = tl.load(q + token * s_q_t + c * s_q_k, mask=inside, other=0.0)
    a += request * s_a_b + head * s_a_h
    b += request * s_b_b + head * s_b_h
    t = tl.arange(0, TP)
    a_t = tl.load(a + t * s_a_t, mask=t < T, other=0.0).to(tl.float32)
    b_t = tl.load(b + t * s_b_t, mask=t < T, other=0.0).to(tl.float32)
    A_log_h = tl.load(A_log + head * s_A).to(tl.float32)
    bias = tl.load(dt_bias + head * s_bias).to(tl.float32)
    slot = tl.load(read_slots + request * s_read).to(tl.int64)
    # No branch on the slot: loads would be moved behind it, one latency later.
    g, decay, beta = _gates(A_log_h, a_t, bias, b_t, T, ASM)
    if rawk is not None:
        keys = keys.to(rawk.dtype.element_ty)
        count = tl.where(slot >= 0, T, 0)
        tl.store(g_window + slot * s_g + head * T + t, g, mask=t < count)
        tl.store(beta_window + slot * s_beta + head * T + t, beta, mask=t < count)
        if (slot >= 0) & (head % heads_per_key == 0):
            tl.store(rawk + slot * s_rawk + key_head * (T * K) + token * K + c, keys, mask=inside)
    x = tl.reshape(tl.join(keys.to(OPERAND), queries.to(OPERAND)), (8, TP // 8, KP // (4 * E), 4, E // 2, 2, 2))
    x = tl.reshape(tl.permute(x, (6, 1, 0, 2, 4, 3, 5)), (2 * TP, KP))
    factors, M = _solve(tl.dot(x, tl.trans(x), input_precision=PRECISION), decay, beta, scale, T, NORM)
    solved += (request * HV + head) * (2 * TP + TP * TP)
    tl.store(solved + tl.arange(0, 2 * TP), factors)
    tl.store(solved + 2 * TP + t[:, None] * TP + t[None, :], M)
