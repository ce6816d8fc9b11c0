"""The part of the window form (``docs/maths.md`` §7) that needs no state: gates, products of the tokens, the solve.

Kernels of one warp per head do it ahead of those that read states.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.delta_rule.kernels import exp, log_decay, near_inverse_norm, pick, strength
from replayssm.gdn_decode.kernels.common import PLAIN, record_place
from replayssm.gdn_decode.kernels.tensor_core_tiles import appended, store_parts
from replayssm.kernels import held


@triton.jit
def _gates(A_log, a, dt_bias, b, T, ASM: tl.constexpr):
    """Log decay, decay and beta of the tokens ``[TP]``; a decay of 1 and any beta beyond T."""
    g = log_decay(A_log, a, dt_bias)
    decay = tl.where(tl.arange(0, a.shape[0]) < T, exp(g), 1.0)
    # Held, as the compiler would compute them again for every layout in which they are used.
    return held(g, ASM), held(decay, ASM), held(strength(b), ASM)


@triton.jit
def _numbers(x, T: tl.constexpr):
    """The first T elements. Numbers, which every thread has, become part of tiles without an exchange of layouts."""
    numbers = ()
    for i in tl.static_range(T):
        numbers = appended(numbers, pick(x, i))
    return numbers


@triton.jit
def _between(decays, T: tl.constexpr, TP: tl.constexpr):
    """Decays behind token j up to token t. Products, not differences of sums of logarithms, which may be infinite."""
    t = tl.arange(0, TP)[:, None]
    j = tl.arange(0, TP)[None, :]
    between = tl.full((TP, TP), 1.0, tl.float32)
    for i in tl.static_range(T):
        between = between * tl.where((t >= i) & (j < i), decays[i], 1.0)
    return between


@triton.jit
def _prefix(decays, token, T: tl.constexpr):
    """Products of the decays up to and with each token."""
    prefix = tl.full(token.shape, 1.0, tl.float32)
    for i in tl.static_range(T):
        prefix = prefix * tl.where(token >= i, decays[i], 1.0)
    return prefix


@triton.jit
def _decay_after(decays, end, TP: tl.constexpr, T: tl.constexpr):
    """Products of the decays behind each token ``[TP]``, and of all, up to token ``end - 1``."""
    after = tl.full((TP,), 1.0, tl.float32)
    whole = 1.0
    for i in tl.static_range(T):
        decay = tl.where(i < end, decays[i], 1.0)
        after = after * tl.where(tl.arange(0, TP) < i, decay, 1.0)
        whole = whole * decay
    return tl.where(tl.arange(0, TP) < end, after, 0.0), whole


@triton.jit
def _lengths(products):
    """Inverse norms of tokens from their products with each other, for rows and for columns."""
    n = tl.arange(0, products.shape[0])
    squares = tl.where(n[:, None] == n[None, :], products, 0.0)
    return near_inverse_norm(tl.sum(squares, 1)), near_inverse_norm(tl.sum(squares, 0))


@triton.jit
def _substituted(M, system, T: tl.constexpr):
    """The solution X of ``X (I + system) = M``, system strictly lower triangular, a column at a time from the last."""
    t = tl.arange(0, M.shape[0])
    for i in tl.static_range(T - 1):
        column = tl.sum(tl.where(t[None, :] == T - 1 - i, M, 0.0), 1)
        equation = tl.sum(tl.where(t[:, None] == T - 1 - i, system, 0.0), 0)
        M = tl.fma(-column[:, None], equation[None, :], M)
    return M


@triton.jit
def _solve(products, decay, beta, scale, T: tl.constexpr, NORM: tl.constexpr):
    """Factors of S k and S q ``[2 TP]`` and ``M = F (I + A)^-1 diag(beta)`` ``[TP, TP]``.

    With ``A = diag(beta) L`` that is the solution of ``M (I + L diag(beta)) = F diag(beta)``.
    """
    TP: tl.constexpr = products.shape[0] // 2
    row = tl.arange(0, 2 * TP)
    t = tl.arange(0, TP)[:, None]
    j = tl.arange(0, TP)[None, :]
    decays = _numbers(decay, T)
    factors = _prefix(decays, row % TP, T) * tl.where(row < TP, 1.0, scale)
    if NORM:
        norms, across = _lengths(products)
        products = products * norms[:, None] * across[None, :]
        factors = factors * norms
    left, _ = tl.split(tl.permute(tl.reshape(products, (2, TP, 2, TP)), (1, 3, 0, 2)))
    kk, qk = tl.split(left)
    betas = _numbers(beta, T)
    strengths = tl.full((1, TP), 0.0, tl.float32)
    for i in tl.static_range(T):
        strengths = tl.where(j == i, betas[i], strengths)
    weights = _between(decays, T, TP) * strengths
    M = tl.where(t >= j, qk * weights * scale, 0.0)
    return factors, _substituted(M, tl.where(t > j, kk * weights, 0.0), T)


@triton.jit
def solve_ahead(
    solved, rawk, g_window, beta_window, q, k, read_slots, A_log, a, dt_bias, b, scale,
    s_rawk, s_g, s_beta, s_q_b, s_q_t, s_q_h, s_q_k, s_k_b, s_k_t, s_k_h, s_k_k, s_read, s_A, s_a_b, s_a_t, s_a_h,
    s_bias, s_b_b, s_b_t, s_b_h, HV, heads_per_key,
    T: tl.constexpr, TP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, E: tl.constexpr, NORM: tl.constexpr,
    INPUT: tl.constexpr, PRECISION: tl.constexpr, ASM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Store the factors and M of one head for the kernel that reads states; records of k, g, beta."""
    if OVERLAP:
        gdc_wait()
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
    x = tl.reshape(tl.join(keys.to(INPUT), queries.to(INPUT)), (8, TP // 8, KP // (4 * E), 4, E // 2, 2, 2))
    x = tl.reshape(tl.permute(x, (6, 1, 0, 2, 4, 3, 5)), (2 * TP, KP))
    factors, M = _solve(tl.dot(x, tl.trans(x), input_precision=PRECISION), decay, beta, scale, T, NORM)
    solved += (request * HV + head) * (2 * TP + TP * TP)
    tl.store(solved + tl.arange(0, 2 * TP), factors)
    tl.store(solved + 2 * TP + t[:, None] * TP + t[None, :], M)


@triton.jit
def _of_heads(pointer, count, T: tl.constexpr, TP: tl.constexpr, HEADS: tl.constexpr):
    """The first numbers of a window, of several heads; zeros beyond them."""
    t = tl.arange(0, TP)
    numbers = ()
    for h in tl.static_range(HEADS):
        numbers = appended(numbers, tl.load(pointer + h * T + t, mask=t < count, other=0.0))
    return numbers


@triton.jit(do_not_specialize=PLAIN)
def solve_recorded(
    solved, rawk, g, beta, sources, counts, steps,
    s_rawk_l, s_rawk, s_g_l, s_g, s_beta_l, s_beta, s_sources, s_counts, s_steps, batch, HV, heads_per_key,
    null_block_id,
    T: tl.constexpr, TP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, E: tl.constexpr, HEADS: tl.constexpr,
    NORM: tl.constexpr, OPERAND: tl.constexpr, ASM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Store what states need to know of the first tokens of a window, for HEADS heads that share keys.

    For each rows of TP numbers: factors of S k; those of the corrections, up to the last token; the same up to token
    ``steps``; the decays up to these two. Then the parts of ``(I + A)^-1 diag(beta)``.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    head, request, layer = record_place(tl.program_id(0) * HEADS, HV, batch)
    slot = tl.load(sources + request * s_sources).to(tl.int64)
    count = tl.load(counts + request * s_counts).to(tl.int32)
    count = tl.where(slot > null_block_id, count, 0)
    end = count
    if steps is not None:
        end = tl.minimum(tl.load(steps + request * s_steps).to(tl.int32) + 1, count)
    rawk += layer * s_rawk_l + slot * s_rawk + head // heads_per_key * (T * K)
    g += layer * s_g_l + slot * s_g + head * T
    beta += layer * s_beta_l + slot * s_beta + head * T
    t = tl.arange(0, TP)
    gates = _of_heads(g, count, T, TP, HEADS)
    betas = _of_heads(beta, count, T, TP, HEADS)
    # As in `solve_ahead`; 16 rows, as many as a product has at least.
    token = tl.arange(0, 2)[None, :, None, None] * 8 + tl.arange(0, 8)[:, None, None, None]
    c = tl.arange(0, KP // (4 * E))[None, None, :, None] * (4 * E) + tl.arange(0, 4 * E)[None, None, None, :]
    keys = tl.load(rawk + token * K + c, mask=(token < count) & (c < K), other=0.0).to(OPERAND)
    x = tl.reshape(tl.permute(tl.reshape(keys, (8, 2, KP // (4 * E), 4, E // 2, 2)), (1, 0, 2, 4, 3, 5)), (16, KP))
    products = tl.dot(x, tl.trans(x), input_precision="ieee")
    if TP == 8:
        left, _ = tl.split(tl.permute(tl.reshape(products, (2, 8, 2, 8)), (1, 3, 0, 2)))
        products, _ = tl.split(left)
    norms = tl.full((TP,), 1.0, tl.float32)
    if NORM:
        norms, across = _lengths(products)
        products = products * norms[:, None] * across[None, :]
    i = t[:, None]
    j = t[None, :]
    solved += tl.program_id(0).to(tl.int64) * (HEADS * (4 * TP + 3 * TP * TP))
    for h in tl.static_range(HEADS):
        decays = _numbers(held(exp(gates[h]), ASM), T)
        strengths = betas[h][None, :]
        system = tl.where(i > j, products * _between(decays, T, TP) * strengths, 0.0)
        M = _substituted(tl.where(i == j, tl.broadcast_to(strengths, (TP, TP)), 0.0), system, T)
        after, whole = _decay_after(decays, count, TP, T)
        tl.store(solved + t, _prefix(decays, t, T) * norms)
        tl.store(solved + TP + t, after * norms)
        tl.store(solved + 3 * TP, whole)
        if steps is not None:
            after, whole = _decay_after(decays, end, TP, T)
            tl.store(solved + 2 * TP + t, after * norms)
            tl.store(solved + 3 * TP + 1, whole)
        store_parts(solved + 4 * TP, M, OPERAND)
        solved += 4 * TP + 3 * TP * TP
