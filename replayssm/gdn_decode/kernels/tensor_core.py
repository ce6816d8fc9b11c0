"""``gated_delta_rule_mtp`` with frozen states in the window form (``docs/maths.md`` §7): one pass over the state.

With prefix decays P, ``M = F (I + A)^-1 diag(beta)`` and ``W = v - P S k``, an output is ``P S q + M W``. No state is
needed for M: a small kernel makes it, and the large one streams the state against keys and queries. These enter as they
were given, before normalisation, whose factors are applied to the products: in bf16 they are exact operands.

A state of fp32 becomes an exact sum of three bf16 numbers, so products of the matrix unit have the accuracy of fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.dispatch import overlaps
from replayssm.gdn_decode.configs import tensor_core_tile
from replayssm.gdn_decode.kernels.common import stride
from replayssm.gdn_decode.kernels.tensor_core_solve import solve_ahead
from replayssm.gdn_decode.kernels.tensor_core_tiles import (
    as_operand,
    halves,
    load_tile,
    operand_order,
    part,
    side_by_side,
)
from replayssm.kernels import held

# Numbers of a type are sums of so many bf16 numbers.
PARTS = {torch.float32: 3, torch.float16: 2, torch.bfloat16: 1}
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _solved(solved, head, TP: tl.constexpr):
    """What ``solve_ahead`` stored: factors of S k and S q ``[2 TP]``; M by key behind as many zeros ``[TP, 2 TP]``."""
    solved += head * (2 * TP + TP * TP)
    t = tl.arange(0, TP)[:, None]
    column = tl.arange(0, 2 * TP)
    M = tl.load(solved + 2 * TP + (column[None, :] - TP) * TP + t, mask=(column >= TP)[None, :], other=0.0)
    return tl.load(solved + column), M


@triton.jit
def _stacked(x, y):
    """``x`` above ``y``, of equal shapes."""
    return tl.reshape(tl.permute(tl.join(x, y), (2, 0, 1)), (2 * x.shape[0], x.shape[1]))


@triton.jit
def _both(
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
def _verify(
    state, output, rawv, q, k, v, read_slots, solved,
    s_state, s_out_b, s_out_t, s_rawv, s_q_b, s_q_t, s_q_h, s_q_k, s_k_b, s_k_t, s_k_h, s_k_k, s_v_b, s_v_t, s_v_h,
    s_v_v, s_read, T, HV, heads_per_key,
    V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, KB: tl.constexpr, BV: tl.constexpr, WARPS: tl.constexpr,
    TP: tl.constexpr, E: tl.constexpr, STATE_PARTS: tl.constexpr, INPUT_PARTS: tl.constexpr, K_TYPE: tl.constexpr,
    V_TYPE: tl.constexpr, OPERAND: tl.constexpr, ASM: tl.constexpr, OVERLAP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Outputs of BV rows of one head, from KB columns of the state at a time; records of v."""
    if OVERLAP:
        gdc_launch_dependents()
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    MASKED: tl.constexpr = (V % BV != 0) or (KP != K)
    first_row = tl.program_id(0) % BLOCKS * BV
    head = tl.program_id(0) // BLOCKS % HV
    key_head = head // heads_per_key
    request = (tl.program_id(0) // BLOCKS // HV).to(tl.int64)
    k += request * s_k_b + key_head * s_k_h
    q += request * s_q_b + key_head * s_q_h
    n = first_row + tl.arange(0, BV)
    t = tl.arange(0, TP)
    v_in = (t < T)[:, None] & (n < V)[None, :]
    v_at = v + request * s_v_b + head * s_v_h + t[:, None] * s_v_t + n[None, :] * s_v_v
    values = tl.load(v_at, mask=v_in, other=0.0).to(V_TYPE)
    slot = tl.load(read_slots + request * s_read).to(tl.int64)
    if slot >= 0:
        state += slot * s_state + head * (V * K)
        # A sum of its own for every size of terms: what the matrix unit adds to a large one, it rounds like that.
        large = tl.zeros((BV, 2 * TP), tl.float32)
        medium = tl.zeros((BV, 2 * TP), tl.float32)
        small = tl.zeros((BV, 2 * TP), tl.float32)
        S_next = load_tile(state, 0, first_row, V, K, KB, BV, WARPS, E, MASKED)
        x_next = _both(k, q, 0, s_k_t, s_k_k, s_q_t, s_q_k, T, K, KB, TP, K_TYPE)
        for first in tl.static_range(0, KP, KB):
            S = S_next
            x = x_next
            if AHEAD and first + KB < KP:
                S_next = load_tile(state, first + KB, first_row, V, K, KB, BV, WARPS, E, MASKED)
                x_next = _both(k, q, first + KB, s_k_t, s_k_k, s_q_t, s_q_k, T, K, KB, TP, K_TYPE)
            S = as_operand(S.to(tl.float32), BV, KB, WARPS, E)
            x = operand_order(held(x, ASM and AHEAD), E)
            x0 = x.to(OPERAND)
            if INPUT_PARTS > 1:
                x0, rest = part(x.to(tl.float32), OPERAND)
                x1, rest = part(rest, OPERAND)
                x2, _ = part(rest, OPERAND)
            S0, S = part(S, OPERAND)
            large = tl.dot(S0, tl.trans(x0), large, input_precision="ieee")
            if INPUT_PARTS > 1:
                medium = tl.dot(S0, tl.trans(x1), medium, input_precision="ieee")
            if INPUT_PARTS > 2:
                small = tl.dot(S0, tl.trans(x2), small, input_precision="ieee")
            if STATE_PARTS > 1:
                S1, S = part(S, OPERAND)
                medium = tl.dot(S1, tl.trans(x0), medium, input_precision="ieee")
                if INPUT_PARTS > 1:
                    small = tl.dot(S1, tl.trans(x1), small, input_precision="ieee")
            if STATE_PARTS > 2:
                S2, S = part(S, OPERAND)
                small = tl.dot(S2, tl.trans(x0), small, input_precision="ieee")
            if not AHEAD and first + KB < KP:
                S_next = load_tile(state, first + KB, first_row, V, K, KB, BV, WARPS, E, MASKED)
                x_next = _both(k, q, first + KB, s_k_t, s_k_k, s_q_t, s_q_k, T, K, KB, TP, K_TYPE)
        if rawv is not None:
            to_v = rawv + (slot * s_rawv + head * (T * V)) + t[:, None] * V + n[None, :]
            tl.store(to_v, values, mask=v_in)
        if OVERLAP:
            gdc_wait()
        factors, M = _solved(solved, request * HV + head, TP)
        products = (large + (medium + small)) * factors[None, :]
        Sk, _ = halves(products)
        W0, rest = part(tl.trans(held(values, ASM)).to(tl.float32) - Sk, OPERAND)
        W1, rest = part(rest, OPERAND)
        W2, _ = part(rest, OPERAND)
        M0, rest = part(M, OPERAND)
        M1, rest = part(rest, OPERAND)
        M2, _ = part(rest, OPERAND)
        # The six largest of the nine products in one, the small ones first; two terms are zero.
        W = side_by_side(side_by_side(W0, W0), side_by_side(W1, W0))
        M = _stacked(_stacked(M0 * 0, M0 * 0), _stacked(M1, M2))
        W = side_by_side(W, side_by_side(side_by_side(W2, W1), side_by_side(W0, W0)))
        # Held, so that it is reshaped here and not in shared memory: where it was, results were wrong (Triton 3.6).
        M = held(_stacked(M, _stacked(_stacked(M0, M0), _stacked(M1, M0))), ASM)
        _, out = halves(products + tl.dot(W, M, input_precision="ieee"))
        to = output + request * s_out_b + head * V + t[None, :] * s_out_t + n[:, None]
        tl.store(to, out.to(output.dtype.element_ty), mask=(t < T)[None, :] & (n < V)[:, None])
    elif OVERLAP:
        gdc_wait()


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
    # Triton 3.6 does not compile the layout in which vectors that are not packed would be read; they are rare, small.
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    interpreted = triton.knobs.runtime.interpret
    overlap, operand = overlaps(q.device), tl.float32 if interpreted else tl.bfloat16
    early = {"launch_pdl": True} if overlap else {}
    tile = tensor_core_tile(V, K, initial_state.element_size(), q.element_size(), T, batch * HV)
    parts, wide = PARTS[q.dtype], 16 // q.element_size()
    k_type = k.dtype if rawk is None else rawk.dtype
    solved = torch.empty(batch * HV * (2 + tile.tokens) * tile.tokens, dtype=torch.float32, device=q.device)
    solve_ahead[(batch * HV,)](
        solved, rawk, g_window, beta_window, q, k, initial_state_indices, A_log, a, dt_bias, b, scale,
        stride(rawk, 0), stride(g_window, 0), stride(beta_window, 0), *q.stride(), *k.stride(),
        initial_state_indices.stride(0), A_log.stride(0), *a.stride(), dt_bias.stride(0), *b.stride(), HV, HV // H,
        T=T, TP=tile.tokens, K=K, KP=tile.columns, E=wide, NORM=use_qk_l2norm,
        INPUT=_TYPES[q.dtype] if parts == 1 or k_type == q.dtype else tl.float32,
        PRECISION="ieee" if interpreted else "tf32x3", ASM=overlap, OVERLAP=overlap, num_warps=1,
        enable_fp_fusion=False, **early,
    )  # fmt: skip
    _verify[(batch * HV * triton.cdiv(V, tile.rows),)](
        initial_state, output, rawv, q, k, v, initial_state_indices, solved,
        initial_state.stride(0), *output.stride()[:2], stride(rawv, 0), *q.stride(), *k.stride(), *v.stride(),
        initial_state_indices.stride(0), T, HV, HV // H,
        V=V, K=K, KP=tile.columns, KB=tile.block, BV=tile.rows, WARPS=tile.warps, TP=tile.tokens,
        E=16 // initial_state.element_size(), STATE_PARTS=PARTS[initial_state.dtype], INPUT_PARTS=parts,
        K_TYPE=_TYPES[k_type], V_TYPE=_TYPES[v.dtype if rawv is None else rawv.dtype],
        OPERAND=operand, ASM=overlap, OVERLAP=overlap, AHEAD=tile.ahead,
        num_warps=tile.warps, num_stages=1, enable_fp_fusion=False, **early,
    )  # fmt: skip
