"""``gated_delta_rule_mtp`` with frozen states in the window form (``docs/maths.md`` §7): one pass over the state.

With prefix decays P, ``M = F (I + A)^-1 diag(beta)`` and ``W = v - P S k``, an output is ``P S q + M W``. No state is
needed for M: a small kernel makes it, and the large one streams the state against keys and queries. These enter as they
were given, before normalisation, whose factors are applied to the products: in bf16 they are exact operands.

A state of fp32 becomes an exact sum of three bf16 numbers, so products of the matrix unit have the accuracy of fp32.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.delta_rule.kernels import exp, inverse_norm, log_decay, strength
from replayssm.gdn_decode.configs import next_power_of_2, tensor_core_tile
from replayssm.gdn_decode.kernels.common import stride

# Numbers of a type are sums of so many bf16 numbers.
_PARTS = {torch.float32: 3, torch.float16: 2, torch.bfloat16: 1}
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _part(x, OPERAND: tl.constexpr):
    """The leading 8 bits of fp32 numbers as bf16 (or, where products of that are wrong, as fp32), and the rest."""
    bits = x.to(tl.int32, bitcast=True)
    head = (bits & -65536).to(tl.float32, bitcast=True)
    rest = x - head
    if OPERAND.primitive_bitwidth == 16:
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), rest
    else:
        return head, rest


@triton.jit
def _held(x, ASM: tl.constexpr):
    """The tile itself, but nothing that is done with it may move above this line.

    A loaded tile that needs another layout is written to shared memory right behind the load, which waits for it, and
    later loads start one latency late. Behind this line it cannot be.
    """
    if ASM:
        PACK: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, PACK)
    else:
        return x


@triton.jit
def _operand_order(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, E: tl.constexpr):
    """Columns ``[ROWS, COLUMNS]`` in the order in which the state's registers make an operand."""
    x = tl.reshape(x, (ROWS, COLUMNS // (4 * E), 4, E // 2, 2))
    return tl.reshape(tl.permute(x, (0, 1, 3, 2, 4)), (ROWS, COLUMNS))


@triton.jit
def _solved(solved, head, TP: tl.constexpr):
    """What ``_solve`` stored: factors of S k and S q ``[2 TP]``, and M by key behind as many zeros ``[TP, 2 TP]``."""
    solved += head * (2 * TP + TP * TP)
    t = tl.arange(0, TP)[:, None]
    column = tl.arange(0, 2 * TP)
    M = tl.load(solved + 2 * TP + (column[None, :] - TP) * TP + t, mask=(column >= TP)[None, :], other=0.0)
    return tl.load(solved + column), M


@triton.jit
def _halves(x):
    """The left and the right half of the columns."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _side_by_side(x, y):
    """``[x y]``, of equal shapes."""
    return tl.reshape(tl.permute(tl.join(x, y), (0, 2, 1)), (x.shape[0], 2 * x.shape[1]))


@triton.jit
def _stacked(x, y):
    """``x`` above ``y``, of equal shapes."""
    return tl.reshape(tl.permute(tl.join(x, y), (2, 0, 1)), (2 * x.shape[0], x.shape[1]))


@triton.jit
def _solve(
    solved, rawk, g_window, beta_window, q, k, read_slots, A_log, a, dt_bias, b, scale,
    s_rawk, s_g, s_beta, s_q_b, s_q_t, s_q_h, s_q_k, s_k_b, s_k_t, s_k_h, s_k_k, s_read, s_A, s_a_b, s_a_t, s_a_h,
    s_bias, s_b_b, s_b_t, s_b_h, HV, heads_per_key,
    T: tl.constexpr, TP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, E: tl.constexpr, NORM: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """M ``[TP, TP]`` and the factors of S k and S q ``[2 TP]`` of one head; records of k, g, beta."""
    if OVERLAP:
        gdc_launch_dependents()
    head = tl.program_id(0) % HV
    key_head = head // heads_per_key
    request = (tl.program_id(0) // HV).to(tl.int64)
    # A thread's loads make its share of both operands of the products, as in _verify; the order of columns is free.
    K_TYPE: tl.constexpr = k.dtype.element_ty if rawk is None else rawk.dtype.element_ty
    token = (tl.arange(0, TP // 8)[None, :, None, None] * 8 + tl.arange(0, 8)[:, None, None, None]).to(tl.int64)
    c = tl.arange(0, KP // (4 * E))[None, None, :, None] * (4 * E) + tl.arange(0, 4 * E)[None, None, None, :]
    inside = (token < T) & (c < K)
    keys = tl.load(k + request * s_k_b + key_head * s_k_h + token * s_k_t + c * s_k_k, mask=inside, other=0.0)
    queries = tl.load(q + request * s_q_b + key_head * s_q_h + token * s_q_t + c * s_q_k, mask=inside, other=0.0)
    keys = keys.to(K_TYPE)
    t = tl.arange(0, TP)
    exists = t < T
    a_t = tl.load(a + request * s_a_b + head * s_a_h + t * s_a_t, mask=exists, other=0.0).to(tl.float32)
    b_t = tl.load(b + request * s_b_b + head * s_b_h + t * s_b_t, mask=exists, other=0.0).to(tl.float32)
    A_log_h = tl.load(A_log + head * s_A).to(tl.float32)
    bias = tl.load(dt_bias + head * s_bias).to(tl.float32)
    slot = tl.load(read_slots + request * s_read).to(tl.int64)
    if slot >= 0:
        g = log_decay(A_log_h, a_t, bias)
        beta = strength(b_t)
        if rawk is not None:
            tl.store(g_window + slot * s_g + head * T + t, g, mask=exists)
            tl.store(beta_window + slot * s_beta + head * T + t, beta, mask=exists)
            if head % heads_per_key == 0:
                tl.store(rawk + slot * s_rawk + key_head * (T * K) + token * K + c, keys, mask=inside)
        decay = tl.where(exists, exp(g), 1.0)
        x = tl.reshape(tl.join(keys.to(OPERAND), queries.to(OPERAND)), (8, TP // 8, KP // (4 * E), 4, E // 2, 2, 2))
        x = tl.reshape(tl.permute(x, (6, 1, 0, 2, 4, 3, 5)), (2 * TP, KP))
        gram = tl.dot(x, tl.trans(x), input_precision=PRECISION)
        row = tl.arange(0, 2 * TP)
        if NORM:
            squares = tl.where(row[:, None] == row[None, :], gram, 0.0)
            norms = inverse_norm(tl.sum(squares, 1))
            gram = gram * norms[:, None] * inverse_norm(tl.sum(squares, 0))[None, :]
        else:
            norms = row * 0.0 + 1.0
        left, _ = tl.split(tl.permute(tl.reshape(gram, (2, TP, 2, TP)), (1, 3, 0, 2)))
        kk, qk = tl.split(left)
        later = t[:, None] > t[None, :]
        # Products of decays, not differences of sums of logarithms, which may be infinite.
        between = tl.cumprod(tl.where(later, decay[:, None], 1.0), 0)
        system = tl.where(later, kk * between * beta[:, None], 0.0)
        M = tl.where(later | (t[:, None] == t[None, :]), qk * between * scale, 0.0)
        for i in tl.static_range(T - 1):
            column = tl.sum(tl.where(t[None, :] == T - 1 - i, M, 0.0), 1)
            equation = tl.sum(tl.where(t[:, None] == T - 1 - i, system, 0.0), 0)
            M -= column[:, None] * equation[None, :]
        prefix = tl.sum(tl.where(t[None, :] == (row % TP)[:, None], tl.cumprod(decay, 0)[None, :], 0.0), 1)
        solved += (request * HV + head) * (2 * TP + TP * TP)
        tl.store(solved + row, prefix * norms * tl.where(row < TP, 1.0, scale))
        tl.store(solved + 2 * TP + t[:, None] * TP + t[None, :], M * beta[None, :])


@triton.jit
def _verify(
    state, output, rawv, q, k, v, read_slots, solved,
    s_state, s_out_b, s_out_t, s_rawv, s_q_b, s_q_t, s_q_h, s_q_k, s_k_b, s_k_t, s_k_h, s_k_k, s_v_b, s_v_t, s_v_h,
    s_v_v, s_read, T, HV, heads_per_key,
    V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, KB: tl.constexpr, BV: tl.constexpr, WARPS: tl.constexpr,
    TP: tl.constexpr, E: tl.constexpr, STATE_PARTS: tl.constexpr, INPUT_PARTS: tl.constexpr, K_TYPE: tl.constexpr,
    V_TYPE: tl.constexpr, OPERAND: tl.constexpr, ASM: tl.constexpr, OVERLAP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Outputs of BV rows of one head, from KB columns of the state at a time; records of v.

    A thread's loads make its share of the product's operand, without an exchange between threads: it reads E columns
    (16 bytes) of every eighth row, and columns of state and keys are multiplied in the order that follows from that.
    """
    PARTS: tl.constexpr = (V + BV - 1) // BV
    MASKED: tl.constexpr = (V % BV != 0) or (KP != K)
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % HV
    key_head = head // heads_per_key
    request = (tl.program_id(0) // PARTS // HV).to(tl.int64)
    row = tl.arange(0, 2 * TP)
    token = row % TP
    in_k = (row < TP) & (token < T)
    in_q = (row >= TP) & (token < T)
    k += request * s_k_b + key_head * s_k_h + token[:, None] * s_k_t
    q += request * s_q_b + key_head * s_q_h + token[:, None] * s_q_t
    n = part * BV + tl.arange(0, BV)
    v += request * s_v_b + head * s_v_h
    t = tl.arange(0, TP)
    v_in = (t < T)[:, None] & (n < V)[None, :]
    values = tl.load(v + t[:, None] * s_v_t + n[None, :] * s_v_v, mask=v_in, other=0.0).to(V_TYPE)
    slot = tl.load(read_slots + request * s_read).to(tl.int64)
    if slot >= 0:
        state += slot * s_state + head * (V * K)
        eighth = tl.arange(0, 8)[:, None, None, None]
        block = tl.arange(0, BV // 8)[None, :, None, None]
        chunk = tl.arange(0, KB // (4 * E))[None, None, :, None]
        within = tl.arange(0, 4 * E)[None, None, None, :]
        v_row = part * BV + (block // (2 * WARPS) * WARPS + block % WARPS) * 16 + block // WARPS % 2 * 8 + eighth
        products = tl.zeros((BV, 2 * TP), tl.float32)
        if EARLY:
            if OVERLAP:
                gdc_wait()
            factors, M = _solved(solved, request * HV + head, TP)
        for first in tl.static_range(0, KP, KB):
            column = first + chunk * (4 * E) + within
            at = state + v_row * K + column
            S = tl.load(at, mask=(v_row < V) & (column < K), other=0.0) if MASKED else tl.load(at)
            c = first + tl.arange(0, KB)
            keys = tl.load(k + c[None, :] * s_k_k, mask=in_k[:, None] & (c < K)[None, :], other=0.0).to(K_TYPE)
            queries = tl.load(q + c[None, :] * s_q_k, mask=in_q[:, None] & (c < K)[None, :], other=0.0)
            S = tl.reshape(S.to(tl.float32), (8, BV // (16 * WARPS), 2, WARPS, KB // (4 * E), 4, E // 2, 2))
            S = tl.reshape(tl.permute(S, (1, 3, 2, 0, 4, 6, 5, 7)), (BV, KB))
            x0 = _operand_order(keys.to(OPERAND) + queries.to(OPERAND), 2 * TP, KB, E)
            if INPUT_PARTS > 1:
                x = _operand_order(keys.to(tl.float32) + queries.to(tl.float32), 2 * TP, KB, E)
                x0, rest = _part(x, OPERAND)
                x1, rest = _part(rest, OPERAND)
                x2, _ = _part(rest, OPERAND)
            for i in tl.static_range(STATE_PARTS):
                s, S = _part(S, OPERAND)
                products = tl.dot(s, tl.trans(x0), products, input_precision="ieee")
                if INPUT_PARTS > 1 and i < 2:
                    products = tl.dot(s, tl.trans(x1), products, input_precision="ieee")
                if INPUT_PARTS > 2 and i < 1:
                    products = tl.dot(s, tl.trans(x2), products, input_precision="ieee")
        if rawv is not None:
            tl.store(rawv + (slot * s_rawv + head * (T * V)) + t[:, None] * V + n[None, :], values, mask=v_in)
        if not EARLY:
            if OVERLAP:
                gdc_wait()
            factors, M = _solved(solved, request * HV + head, TP)
        products = products * factors[None, :]
        Sk, _ = _halves(products)
        W = tl.trans(_held(values, ASM)).to(tl.float32) - Sk
        W0, rest = _part(W, OPERAND)
        W1, rest = _part(rest, OPERAND)
        W2, _ = _part(rest, OPERAND)
        M0, rest = _part(M, OPERAND)
        M1, rest = _part(rest, OPERAND)
        M2, _ = _part(rest, OPERAND)
        # The six largest of the nine products in one, the small ones first; two terms are zero.
        W = _side_by_side(_side_by_side(W0, W0), _side_by_side(W1, W0))
        M = _stacked(_stacked(M0 * 0, M0 * 0), _stacked(M1, M2))
        W = _side_by_side(W, _side_by_side(_side_by_side(W2, W1), _side_by_side(W0, W0)))
        M = _stacked(M, _stacked(_stacked(M0, M0), _stacked(M1, M0)))
        products = tl.dot(W, M, products, input_precision="ieee")
        _, out = _halves(products)
        to = output + request * s_out_b + head * V + t[None, :] * s_out_t + n[:, None]
        tl.store(to, out.to(output.dtype.element_ty), mask=(t < T)[None, :] & (n < V)[:, None])
    elif OVERLAP:
        gdc_wait()


@cache
def _overlaps(device: torch.device) -> bool:
    """Whether the second kernel may start before the first has ended: from SM90 on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def verify(
    initial_state: Tensor,
    output: Tensor,
    rawv: Tensor | None,
    rawk: Tensor | None,
    g_window: Tensor | None,
    beta_window: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state_indices: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float,
    use_qk_l2norm: bool,
    backend: str,
) -> None:
    """``gated_delta_rule_mtp`` with frozen states on the ``tensor_core`` backend."""
    batch, T, H, K = q.shape
    HV, V = v.shape[2:]
    if batch == 0:
        return
    interpreted = triton.knobs.runtime.interpret
    overlap = _overlaps(q.device) and not interpreted
    tile = tensor_core_tile(V, K, initial_state.element_size(), T)
    solved = torch.empty(batch * HV * (2 + tile.tokens) * tile.tokens, dtype=torch.float32, device=q.device)
    parts, wide = _PARTS[q.dtype], 16 // q.element_size()
    same = rawk is None or rawk.dtype == k.dtype
    _solve[(batch * HV,)](
        solved, rawk, g_window, beta_window, q, k, initial_state_indices, A_log, a, dt_bias, b, scale,
        stride(rawk, 0), stride(g_window, 0), stride(beta_window, 0), *q.stride(), *k.stride(),
        initial_state_indices.stride(0), A_log.stride(0), *a.stride(), dt_bias.stride(0), *b.stride(), HV, HV // H,
        T=T, TP=tile.tokens, K=K, KP=max(4 * wide, next_power_of_2(K)), E=wide, NORM=use_qk_l2norm,
        OPERAND=_TYPES[q.dtype] if same else tl.float32, PRECISION="ieee" if interpreted else "tf32x3",
        OVERLAP=overlap, num_warps=1,
    )  # fmt: skip
    options = {"launch_pdl": True, "maxnreg": tile.registers} if overlap else {}
    _verify[(batch * HV * triton.cdiv(V, tile.rows),)](
        initial_state, output, rawv, q, k, v, initial_state_indices, solved,
        initial_state.stride(0), *output.stride()[:2], stride(rawv, 0), *q.stride(), *k.stride(), *v.stride(),
        initial_state_indices.stride(0), T, HV, HV // H,
        V=V, K=K, KP=tile.columns, KB=tile.block, BV=tile.rows, WARPS=tile.warps, TP=tile.tokens,
        E=16 // initial_state.element_size(), STATE_PARTS=_PARTS[initial_state.dtype],
        INPUT_PARTS=parts, K_TYPE=_TYPES[k.dtype if rawk is None else rawk.dtype],
        V_TYPE=_TYPES[v.dtype if rawv is None else rawv.dtype], OPERAND=tl.float32 if interpreted else tl.bfloat16,
        ASM=overlap, OVERLAP=overlap, EARLY=tile.early, num_warps=tile.warps, num_stages=1, **options,
    )  # fmt: skip
