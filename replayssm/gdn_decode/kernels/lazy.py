"""The lazy step without rebuilding the state: queries are carried back through the tokens, newest first.

With ``S_t = decay_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T`` an output ``S_n q`` is ``S_0 z`` plus a sum of
values: z starts as q, and each token turns it into ``decay (z - c k)``, ``c = beta k^T z``, and adds ``c v``. So the
state is only multiplied with one vector per query. Products are fp32. A query sits where a row of the state does in the
other kernels (``delta_rule/kernels.py``), L of them side by side.
"""

import triton
import triton.language as tl
from torch import Tensor

from replayssm.delta_rule.kernels import dot, exp, log_decay, pick, strength
from replayssm.gdn_decode.configs import lazy_tile, next_power_of_2
from replayssm.gdn_decode.kernels.common import (
    inverse_norms,
    load_rows,
    norm_of,
    replay,
    ring_row,
    rounded,
    rows_from,
    scaled,
    store_rows,
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
    q,
    s_q_t,
    s_q_k,
    first,
    T,
    scale,
    LANES: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    ONE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Queries ``first`` .. ``first + L - 1``, normalised and scaled; zeros beyond T. If there is one, all L have it."""
    token = first + tl.arange(0, LANES)[:, None, None].to(tl.int64)
    if ONE:
        token = token * 0
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
        factor = (norm_of(z0, z1, z2, z3) * scale)[:, :, None]
    return scaled(z0, z1, z2, z3, factor)


@triton.jit
def _one(z, is_t):
    """The query of one lane, for all lanes."""
    return tl.sum(tl.where(is_t[:, :, None], z, 0.0), 0)[None, :, :]


# Numbers that change from call to call, or whose divisors do not matter: one kernel serves them all.
_PLAIN = [
    "s_g_ring", "s_beta_ring", "s_start", "s_live", "s_slots", "s_A", "s_a_b", "s_a_t", "s_a_h", "s_bias", "s_b_b",
    "s_b_t", "s_b_h", "T", "HV", "heads_per_key", "ring_len", "window", "pad_slot_id",
]  # fmt: skip


@triton.jit(do_not_specialize=_PLAIN)
def _lazy(
    state, output, v_ring, k_ring, g_ring, beta_ring, ring_start, num_live, q, k, v, slots, A_log, a, dt_bias, b, scale,
    s_state, s_out_b, s_out_t, s_v_ring, s_k_ring, s_g_ring, s_beta_ring, s_start, s_live,
    s_q_b, s_q_t, s_q_h, s_q_k, s_k_b, s_k_t, s_k_h, s_k_k, s_v_b, s_v_t, s_v_h, s_v_v,
    s_slots, s_A, s_a_b, s_a_t, s_a_h, s_bias, s_b_b, s_b_t, s_b_h,
    T, HV, heads_per_key, ring_len, window, pad_slot_id,
    V: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, C: tl.constexpr, TP: tl.constexpr,
    WP: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    LANES: tl.constexpr = 128 // C
    ONE: tl.constexpr = TP == 1
    PARTS: tl.constexpr = (V + ROWS * BLOCKS - 1) // (ROWS * BLOCKS)
    K_TYPE: tl.constexpr = k_ring.dtype.element_ty
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % HV
    key_head = head // heads_per_key
    request = (tl.program_id(0) // PARTS // HV).to(tl.int64)
    slot = request
    if slots is not None:
        slot = tl.load(slots + request * s_slots).to(tl.int64)
    if (slot >= 0) & (slot != pad_slot_id):
        state += slot * s_state + head * (V * K)
        first = part * (ROWS * BLOCKS)
        row = rows_from(first, ROWS, C)
        N0, N1, N2, N3 = load_rows(state, row, V, C, K)
        v_ring += slot * s_v_ring + head * ring_len * V
        k_ring += slot * s_k_ring + key_head * ring_len * K
        g_ring += slot * s_g_ring + head * ring_len
        beta_ring += slot * s_beta_ring + head * ring_len
        start = tl.load(ring_start + slot * s_start)
        old = tl.load(num_live + slot * s_live)
        new = ring_row(start, old, ring_len)
        flush = (old > 0) & (old + T > window)
        live = tl.where(flush, 0, old)

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
            norms = inverse_norms(k, token * s_k_t, s_k_k, exists, C, K, K_TYPE)
        if part == 0:
            to = ring_row(new, tl.arange(0, TP), ring_len)
            tl.store(g_ring + to, g, mask=exists)
            tl.store(beta_ring + to, betas, mask=exists)

        lane = tl.arange(0, LANES)
        own = first + tl.arange(0, ROWS * BLOCKS)[None, :] + lane[:, None] * 0  # the program's rows, for every query
        for group in range(0, 1 if ONE else T, LANES):
            z0, z1, z2, z3 = _queries(q, s_q_t, s_q_k, group, T, scale, LANES, C, K, ONE, NORM)
            o = tl.zeros([LANES, ROWS * BLOCKS], tl.float32)
            newest = tl.minimum(group + LANES, 1 if ONE else T) - 1
            for back in range(0, newest + 1):
                t = newest - back
                far = tl.full((), t, tl.int64)  # strides may be large
                k0, k1, k2, k3 = vector(k + far * s_k_t, s_k_k, LANES, C, K)
                value = tl.load(v + far * s_v_t + own * s_v_v, mask=own < V, other=0.0).to(v_ring.dtype.element_ty)
                if t >= group:
                    to = ring_row(new, t, ring_len)
                    tl.store(v_ring + to * V + own, value, mask=(own < V) & (lane == 0)[:, None])
                    if (part == 0) & (head % heads_per_key == 0):
                        store_vector(k_ring + to * K, k0, k1, k2, k3, K)
                k0, k1, k2, k3 = rounded(k0, k1, k2, k3, K_TYPE)
                norm = 1.0
                if NORM:
                    norm = pick(norms, t)
                z0, z1, z2, z3, o = _push(
                    z0, z1, z2, z3, o, k0, k1, k2, k3, value.to(tl.float32), pick(decays, t), pick(betas, t), norm,
                    group + lane >= t,
                )  # fmt: skip
            for begin in range(0, live, WP):
                record = live - 1 - begin - tl.arange(0, WP)
                here = record >= 0
                at = ring_row(start, tl.maximum(record, 0), ring_len)
                old_decays = exp(tl.load(g_ring + at, mask=here, other=0.0))
                old_betas = tl.load(beta_ring + at, mask=here, other=0.0)
                if NORM:
                    old_norms = inverse_norms(k_ring, at * K, 1, here, C, K, K_TYPE)
                ahead = ring_row(start, live - 1 - begin, ring_len)
                k0, k1, k2, k3 = vector(k_ring + ahead * K, 1, LANES, C, K)
                value = tl.load(v_ring + ahead * V + own, mask=own < V, other=0.0)
                for i in range(0, tl.minimum(WP, live - begin)):
                    x0, x1, x2, x3 = rounded(k0, k1, k2, k3, K_TYPE)
                    u = value.to(tl.float32)
                    # The next record is on its way while this one is applied.
                    following = tl.full((), live - 2 - begin - i, tl.int32)
                    ahead = ring_row(start, tl.maximum(following, 0), ring_len)
                    k0, k1, k2, k3 = vector(k_ring + ahead * K, 1, LANES, C, tl.where(following >= 0, K, 0))
                    value = tl.load(v_ring + ahead * V + own, mask=own < tl.where(following >= 0, V, 0), other=0.0)
                    norm = 1.0
                    if NORM:
                        norm = pick(old_norms, i)
                    z0, z1, z2, z3, o = _push(
                        z0, z1, z2, z3, o, x0, x1, x2, x3, u, pick(old_decays, i), pick(old_betas, i), norm, lane >= 0
                    )
            if group > 0:
                N0, N1, N2, N3 = load_rows(state, row, V, C, K)
            for block in range(0, BLOCKS):
                at_row = row + block * ROWS
                S0, S1, S2, S3 = rounded(N0, N1, N2, N3, tl.float32)
                if BLOCKS > 1:  # the next block is on its way
                    end = tl.where(tl.full((), block, tl.int32) + 1 < BLOCKS, V, 0)
                    N0, N1, N2, N3 = load_rows(state, at_row + ROWS, end, C, K)
                if flush & (group == 0):
                    S0, S1, S2, S3 = replay(
                        S0, S1, S2, S3, v_ring, k_ring, g_ring, beta_ring, start, old, ring_len, at_row, V, K, WP, NORM
                    )
                    store_rows(state, at_row, V, S0, S1, S2, S3, K)
                    S0, S1, S2, S3 = rounded(S0, S1, S2, S3, state.dtype.element_ty)
                inside = own - first - block * ROWS
                for t in range(group, newest + 1):
                    is_t = (lane == t - group)[:, None]
                    if ONE:
                        y = dot(S0, S1, S2, S3, z0, z1, z2, z3)
                    else:
                        y = dot(S0, S1, S2, S3, _one(z0, is_t), _one(z1, is_t), _one(z2, is_t), _one(z3, is_t))
                    values = tl.where(is_t & (inside >= 0) & (inside < ROWS), o, 0.0)
                    values = tl.sum(tl.sum(tl.reshape(values, [LANES, BLOCKS, ROWS]), 1), 0)
                    y += tl.trans(tl.reshape(values, [ROWS // LANES, LANES]))
                    far = tl.full((), t, tl.int64)
                    tl.store(output + far * s_out_t + at_row, y.to(output.dtype.element_ty), mask=at_row < V)


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
    _lazy[(batch * HV * triton.cdiv(V, tile.rows * tile.blocks),)](
        state, output, *rings, ring_start, num_live, q, k, v, state_batch_indices, A_log, a, dt_bias, b, scale,
        state.stride(0), *output.stride()[:2], *(ring.stride(0) for ring in rings), ring_start.stride(0),
        num_live.stride(0), *q.stride(), *k.stride(), *v.stride(), stride(state_batch_indices, 0), A_log.stride(0),
        *a.stride(), dt_bias.stride(0), *b.stride(), T, HV, HV // H, v_cache.shape[2], window, pad_slot_id,
        V=V, K=K, ROWS=tile.rows, BLOCKS=tile.blocks, C=tile.columns, TP=next_power_of_2(T), WP=16, NORM=use_qk_l2norm,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
