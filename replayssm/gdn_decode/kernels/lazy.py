"""The lazy step without rebuilding the state: queries are carried back through the tokens, newest first.

With ``S_t = decay_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T`` an output ``S_n q`` is ``S_0 z`` plus a sum of
values: z starts as q, and each token turns it into ``decay (z - c k)``, ``c = beta k^T z``, and adds ``c v``. So the
state is only multiplied with one vector per query. Products are fp32. A query sits where a row of the state does in the
other kernels (``delta_rule/kernels.py``), L of them side by side.
"""

import triton
import triton.language as tl
from torch import Tensor

from replayssm.delta_rule.kernels import dot, exp, inverse_norm, log_decay, pick, strength, total
from replayssm.gdn_decode.configs import lazy_tile, next_power_of_2
from replayssm.gdn_decode.kernels.common import (
    inverse_norms,
    load_state,
    replay,
    ring_row,
    rounded,
    scaled,
    state_tile,
    store_state,
    store_vector,
    stride,
    vector,
)


@triton.jit
def _push(z0, z1, z2, z3, o, k0, k1, k2, k3, v, decay, beta, norm, applies):
    """Carry queries ``[L, 1, C]`` back through one token; ``applies`` [L] tells which of them see it."""
    c = tl.where(applies[:, None], beta * norm * dot(z0, z1, z2, z3, k0, k1, k2, k3), 0.0)
    decay = tl.where(applies[:, None, None], decay, 1.0)
    back = (-norm * c)[:, :, None]
    z0, z1 = tl.fma(back, k0, z0) * decay, tl.fma(back, k1, z1) * decay
    z2, z3 = tl.fma(back, k2, z2) * decay, tl.fma(back, k3, z3) * decay
    return z0, z1, z2, z3, tl.fma(tl.broadcast_to(c, o.shape), tl.broadcast_to(v, o.shape), o)


@triton.jit
def _queries(
    q, s_q_t, s_q_k, first, T, scale, LANES: tl.constexpr, C: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr
):
    """Queries ``first`` .. ``first + L - 1``, normalised and scaled; zeros beyond T."""
    token = first + tl.arange(0, LANES)[:, None, None].to(tl.int64)
    at = q + token * s_q_t
    count = tl.where(token < T, K, 0)
    c = tl.arange(0, C)[None, None, :]
    z0, z1, z2, z3 = rounded(
        tl.load(at + c * s_q_k, mask=c < count, other=0.0),
        tl.load(at + (c + C) * s_q_k, mask=c + C < count, other=0.0),
        tl.load(at + (c + 2 * C) * s_q_k, mask=c + 2 * C < count, other=0.0),
        tl.load(at + (c + 3 * C) * s_q_k, mask=c + 3 * C < count, other=0.0),
        tl.float32,
    )  # fmt: skip
    factor = scale
    if NORM:
        squares = tl.fma(z1, z1, z0 * z0)
        squares = tl.fma(z2, z2, squares)
        factor = (inverse_norm(total(tl.fma(z3, z3, squares))) * scale)[:, :, None]
    return scaled(z0, z1, z2, z3, factor)


@triton.jit
def _lazy(
    state, output, v_ring, k_ring, g_ring, beta_ring, ring_start, num_live, q, k, v, slots, A_log, a, dt_bias, b, scale,
    s_state, s_out_b, s_out_t, s_v_ring, s_k_ring, s_g_ring, s_beta_ring, s_start, s_live,
    s_q_b, s_q_t, s_q_h, s_q_k, s_k_b, s_k_t, s_k_h, s_k_k, s_v_b, s_v_t, s_v_h, s_v_v,
    s_slots, s_A, s_a_b, s_a_t, s_a_h, s_bias, s_b_b, s_b_t, s_b_h,
    T, HV, heads_per_key, ring_len, window, pad_slot_id,
    V: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, TP: tl.constexpr, WP: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    LANES: tl.constexpr = 128 // C
    BLOCKS: tl.constexpr = (V + ROWS - 1) // ROWS
    MASKED: tl.constexpr = (V % ROWS != 0) or (4 * C != K)
    block = tl.program_id(0) % BLOCKS
    head = tl.program_id(0) // BLOCKS % HV
    key_head = head // heads_per_key
    request = (tl.program_id(0) // BLOCKS // HV).to(tl.int64)
    slot = request
    if slots is not None:
        slot = tl.load(slots + request * s_slots).to(tl.int64)
    if (slot >= 0) & (slot != pad_slot_id):
        first = block * ROWS
        at, in_rows, c = state_tile(state + slot * s_state + head * (V * K), first, V, K, ROWS, C)
        S0, S1, S2, S3 = load_state(at, in_rows, c, K, MASKED)
        v_ring += slot * s_v_ring + head * ring_len * V
        k_ring += slot * s_k_ring + key_head * ring_len * K
        g_ring += slot * s_g_ring + head * ring_len
        beta_ring += slot * s_beta_ring + head * ring_len
        start = tl.load(ring_start + slot * s_start)
        live = tl.load(num_live + slot * s_live)
        new = ring_row(start, live, ring_len)
        if (live > 0) & (live + T > window):
            row = first + tl.arange(0, ROWS // LANES)[None, :] * LANES + tl.arange(0, LANES)[:, None]
            S0, S1, S2, S3 = replay(
                S0, S1, S2, S3, v_ring, k_ring, g_ring, beta_ring, start, live, ring_len, row, None, -1,
                in_rows, c, V, K, WP, NORM, MASKED,
            )  # fmt: skip
            store_state(at, S0, S1, S2, S3, in_rows, c, K, MASKED)
            S0, S1, S2, S3 = rounded(S0, S1, S2, S3, state.dtype.element_ty)
            live = 0

        q += request * s_q_b + key_head * s_q_h
        k += request * s_k_b + key_head * s_k_h
        v += request * s_v_b + head * s_v_h
        output += request * s_out_b + head * V
        token = tl.arange(0, TP).to(tl.int64)
        exists = token < T
        gate = tl.load(a + request * s_a_b + head * s_a_h + token * s_a_t, mask=exists, other=0.0).to(tl.float32)
        gain = tl.load(b + request * s_b_b + head * s_b_h + token * s_b_t, mask=exists, other=0.0).to(tl.float32)
        g = log_decay(tl.load(A_log + head * s_A).to(tl.float32), gate, tl.load(dt_bias + head * s_bias).to(tl.float32))
        betas = strength(gain)
        decays = exp(g)
        if NORM:
            norms = inverse_norms(k, token * s_k_t, s_k_k, exists, C, K, k_ring.dtype.element_ty)
        if block == 0:
            to = ring_row(new, tl.arange(0, TP), ring_len)
            tl.store(g_ring + to, g, mask=exists)
            tl.store(beta_ring + to, betas, mask=exists)

        row = first + tl.arange(0, ROWS)[None, :]
        lane = tl.arange(0, LANES)
        in_V = (row < V) & (lane[:, None] >= 0)
        for group in range(0, T, LANES):
            z0, z1, z2, z3 = _queries(q, s_q_t, s_q_k, group, T, scale, LANES, C, K, NORM)
            o = tl.zeros([LANES, ROWS], tl.float32)
            newest = tl.minimum(group + LANES, T) - 1
            for back in range(0, newest + 1):
                t = newest - back
                far = tl.full((), t, tl.int64)  # strides may be large
                k0, k1, k2, k3 = vector(k + far * s_k_t, s_k_k, LANES, C, K)
                value = tl.load(v + far * s_v_t + (row + lane[:, None] * 0) * s_v_v, mask=in_V, other=0.0)
                value = value.to(v_ring.dtype.element_ty)
                if t >= group:
                    to = ring_row(new, t, ring_len)
                    tl.store(v_ring + to * V + row + lane[:, None] * 0, value, mask=in_V & (lane == 0)[:, None])
                    if (block == 0) & (head % heads_per_key == 0):
                        store_vector(k_ring + to * K, k0, k1, k2, k3, K)
                k0, k1, k2, k3 = rounded(k0, k1, k2, k3, k_ring.dtype.element_ty)
                norm = 1.0
                if NORM:
                    norm = pick(norms, t)
                z0, z1, z2, z3, o = _push(
                    z0, z1, z2, z3, o, k0, k1, k2, k3, value.to(tl.float32), pick(decays, t), pick(betas, t), norm,
                    group + lane >= t,
                )  # fmt: skip
            for begin in range(0, live, WP):
                place = live - 1 - begin - tl.arange(0, WP)
                here = place >= 0
                at_records = ring_row(start, tl.maximum(place, 0), ring_len)
                old_decays = exp(tl.load(g_ring + at_records, mask=here, other=0.0))
                old_betas = tl.load(beta_ring + at_records, mask=here, other=0.0)
                if NORM:
                    old_norms = inverse_norms(k_ring, at_records * K, 1, here, C, K, k_ring.dtype.element_ty)
                ahead = ring_row(start, live - 1 - begin, ring_len)
                k0, k1, k2, k3 = vector(k_ring + ahead * K, 1, LANES, C, K)
                value = tl.load(v_ring + ahead * V + row + lane[:, None] * 0, mask=in_V, other=0.0)
                for i in range(0, tl.minimum(WP, live - begin)):
                    x0, x1, x2, x3 = rounded(k0, k1, k2, k3, k_ring.dtype.element_ty)
                    u = value.to(tl.float32)
                    # The next record is on its way while this one is applied.
                    following = tl.full((), live - 2 - begin - i, tl.int32)
                    ahead = ring_row(start, tl.maximum(following, 0), ring_len)
                    k0, k1, k2, k3 = vector(k_ring + ahead * K, 1, LANES, C, tl.where(following >= 0, K, 0))
                    ahead_v = v_ring + ahead * V + row + lane[:, None] * 0
                    value = tl.load(ahead_v, mask=row + lane[:, None] * 0 < tl.where(following >= 0, V, 0), other=0.0)
                    norm = 1.0
                    if NORM:
                        norm = pick(old_norms, i)
                    z0, z1, z2, z3, o = _push(
                        z0, z1, z2, z3, o, x0, x1, x2, x3, u, pick(old_decays, i), pick(old_betas, i), norm, lane >= 0
                    )
            for t in range(group, newest + 1):
                is_t = (lane == t - group)[:, None]
                own = is_t[:, :, None]
                y0 = tl.sum(tl.where(own, z0, 0.0), 0)[None, :, :]
                y1 = tl.sum(tl.where(own, z1, 0.0), 0)[None, :, :]
                y2 = tl.sum(tl.where(own, z2, 0.0), 0)[None, :, :]
                y3 = tl.sum(tl.where(own, z3, 0.0), 0)[None, :, :]
                values = tl.reshape(tl.sum(tl.where(is_t, o, 0.0), 0), [ROWS // LANES, LANES])
                y = dot(S0, S1, S2, S3, y0, y1, y2, y3) + tl.trans(values)
                to_row = first + tl.arange(0, ROWS // LANES)[None, :] * LANES + lane[:, None]
                far = tl.full((), t, tl.int64)
                tl.store(output + far * s_out_t + to_row, y.to(output.dtype.element_ty), mask=to_row < V)


def checkpointing(
    state: Tensor,
    v_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    beta_cache: Tensor,
    output: Tensor,
    ring_start: Tensor,
    num_live: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_batch_indices: Tensor | None,
    pad_slot_id: int,
    scale: float,
    window: int,
    use_qk_l2norm: bool,
) -> None:
    """``gated_delta_rule_checkpointing`` on the ``tensor_core`` backend; folds are token by token as everywhere."""
    batch, T, H, K = q.shape
    HV, V = v.shape[2:]
    if batch == 0:
        return
    rings = (v_cache, k_cache, g_cache, beta_cache)
    tile = lazy_tile(V, K, batch * HV)
    _lazy[(batch * HV * triton.cdiv(V, tile.rows),)](
        state, output, *rings, ring_start, num_live, q, k, v, state_batch_indices, A_log, a, dt_bias, b, scale,
        state.stride(0), *output.stride()[:2], *(ring.stride(0) for ring in rings), ring_start.stride(0),
        num_live.stride(0), *q.stride(), *k.stride(), *v.stride(), stride(state_batch_indices, 0), A_log.stride(0),
        *a.stride(), dt_bias.stride(0), *b.stride(), T, HV, HV // H, v_cache.shape[2], window, pad_slot_id,
        V=V, K=K, ROWS=tile.rows, C=tile.columns, TP=next_power_of_2(T), WP=16, NORM=use_qk_l2norm,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
