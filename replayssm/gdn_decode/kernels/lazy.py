"""The lazy step without rebuilding the state: queries are carried back through the tokens, newest first.

With ``S_t = decay_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T`` an output ``S_n q`` is ``S_0 z`` plus a sum of
values: z starts as q, and each token turns it into ``decay (z - c k)``, ``c = beta k^T z``, and adds ``c v``. So the
state is only multiplied with one vector per query. Products are fp32.

That chain needs no state. One kernel runs it, a warp for some queries, and writes the new records; the next streams the
states, and folds records into those that flush, token by token as everywhere (``delta_rule/kernels.py``).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.delta_rule.kernels import dot, exp, log_decay, near_inverse_norm, strength, total
from replayssm.dispatch import overlaps
from replayssm.gdn_decode.configs import lazy_tile, next_power_of_2
from replayssm.gdn_decode.kernels.common import (
    PLAIN,
    can_fetch,
    fetch_values,
    load_rows,
    replay,
    rounded,
    rows_from,
    store_rows,
    stride,
    vector,
)
from replayssm.kernels import ring_row


@triton.jit
def _push(z, o, k, v, decays, betas, index, applies, NORM: tl.constexpr):
    """Carry queries ``[Q, 1, KP]`` back through one token.

    Its decay and beta are in column ``index`` of tiles with a row for each query or one row for all; ``applies`` [Q]
    tells which of them see it.
    """
    column = tl.full([betas.shape[0], 1], index, tl.int32)
    beta = tl.gather(betas, column, 1)
    x = k.to(tl.float32)
    along = total(z * x)
    back = beta * along
    if NORM:
        norm = near_inverse_norm(total(x * x))
        along, back = along * norm, back * norm * norm
    c = tl.where(applies[:, None], beta * along, 0.0)
    back = tl.where(applies[:, None], -back, 0.0)[:, :, None]
    decay = tl.where(applies[:, None], tl.gather(decays, column, 1), 1.0)[:, :, None]
    return tl.fma(back, x, z) * decay, tl.fma(tl.broadcast_to(c, o.shape), v.to(tl.float32), o)


@triton.jit
def _record(k_ring, v_ring, start, record, ring_len, k_column, v_column, K: tl.constexpr, V: tl.constexpr):
    """Key and value of a record, the same for all queries; zeros before the first one."""
    at = ring_row(start, tl.maximum(record, 0), ring_len)
    k = tl.load(k_ring + at * K + k_column, mask=k_column < tl.where(record >= 0, K, 0), other=0.0)
    v = tl.load(v_ring + at * V + v_column, mask=v_column < tl.where(record >= 0, V, 0), other=0.0)
    return k, v


_SHORT_BATCH = 256  # requests whose flushes come first; more of them are enough to even out
_FOLDERS = 528  # programs that do them: four for each multiprocessor of an H200


@triton.jit(do_not_specialize=[*PLAIN, "T"])
def _carry(
    carried, v_ring, k_ring, g_ring, beta_ring, ring_start, num_live, q, k, v, slots, A_log, a, dt_bias, b, scale,
    s_v_ring, s_k_ring, s_g_ring, s_beta_ring, s_start, s_live, s_slots,
    s_q_b, s_q_t, s_q_h, s_q_k, s_k_b, s_k_t, s_k_h, s_k_k, s_v_b, s_v_t, s_v_h, s_v_v,
    s_A, s_a_b, s_a_t, s_a_h, s_bias, s_b_b, s_b_t, s_b_h, T, HV, heads_per_key, ring_len, window, pad_slot_id,
    V: tl.constexpr, K: tl.constexpr, VP: tl.constexpr, KP: tl.constexpr, TP: tl.constexpr, Q: tl.constexpr,
    WP: tl.constexpr, NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write records; for Q queries store what the state is to be multiplied with (KP) and what is added (VP).

    The queries are those of Q tokens of a value head or, with one token, of Q value heads of a key head.
    """
    if OVERLAP:
        gdc_launch_dependents()
    HEADS: tl.constexpr = TP == 1
    lane = tl.arange(0, Q)
    if HEADS:
        groups = (heads_per_key + Q - 1) // Q
        group = tl.program_id(0) % groups
        key_head = tl.program_id(0) // groups % (HV // heads_per_key)
        request = (tl.program_id(0) // groups // (HV // heads_per_key)).to(tl.int64)
        first = 0
        query = lane * 0
        asked = group * Q + lane < heads_per_key
        head = key_head * heads_per_key + tl.minimum(group * Q + lane, heads_per_key - 1)
        gate_head = head
        own = asked
        writes = asked
        writes_key = group == 0
    else:
        first = tl.program_id(0) % (TP // Q) * Q
        value_head = tl.program_id(0) // (TP // Q) % HV
        key_head = value_head // heads_per_key
        request = (tl.program_id(0) // (TP // Q) // HV).to(tl.int64)
        query = first + lane
        asked = query < T
        head = value_head + lane * 0
        gate_head = value_head + tl.arange(0, 1)
        own = gate_head >= 0
        writes = lane == 0
        writes_key = value_head % heads_per_key == 0
    slot = request
    if slots is not None:
        slot = tl.load(slots + request * s_slots).to(tl.int64)
    if (slot >= 0) & (slot != pad_slot_id) & (first < T):
        start = tl.load(ring_start + slot * s_start)
        old = tl.load(num_live + slot * s_live)
        new = ring_row(start, old, ring_len)
        live = tl.where((old > 0) & (old + T > window), 0, old)
        k_ring += slot * s_k_ring + key_head * ring_len * K
        v_rings = v_ring + slot * s_v_ring + head[:, None] * (ring_len * V)
        g_rings = g_ring + slot * s_g_ring + gate_head[:, None] * ring_len
        beta_rings = beta_ring + slot * s_beta_ring + gate_head[:, None] * ring_len
        q += request * s_q_b + key_head * s_q_h
        k += request * s_k_b + key_head * s_k_h
        v_heads = v + request * s_v_b + head[:, None].to(tl.int64) * s_v_h
        kc = tl.arange(0, KP)[None, None, :] + lane[:, None, None] * 0
        vc = tl.arange(0, VP)[None, :] + lane[:, None] * 0
        # Four records are on their way while others are applied: a record takes less time than a load.
        k0, v0 = _record(k_ring, v_rings, start, live - 1, ring_len, kc, vc, K, V)
        k1, v1 = _record(k_ring, v_rings, start, live - 2, ring_len, kc, vc, K, V)
        k2, v2 = _record(k_ring, v_rings, start, live - 3, ring_len, kc, vc, K, V)
        k3, v3 = _record(k_ring, v_rings, start, live - 4, ring_len, kc, vc, K, V)

        token = tl.arange(0, TP)[None, :].to(tl.int64)
        exists = token < T
        far_gate = gate_head[:, None].to(tl.int64)  # strides may be large
        gate = tl.load(a + request * s_a_b + far_gate * s_a_h + token * s_a_t, mask=exists, other=0.0).to(tl.float32)
        gain = tl.load(b + request * s_b_b + far_gate * s_b_h + token * s_b_t, mask=exists, other=0.0).to(tl.float32)
        A = tl.load(A_log + far_gate * s_A).to(tl.float32)
        g = log_decay(tl.broadcast_to(A, gate.shape), gate, tl.load(dt_bias + far_gate * s_bias).to(tl.float32))
        betas = strength(gain)
        decays = exp(g)
        if first == 0:
            to = ring_row(new, tl.arange(0, TP), ring_len)[None, :]
            tl.store(g_rings + to, g, mask=exists & own[:, None])
            tl.store(beta_rings + to, betas, mask=exists & own[:, None])

        z = tl.load(
            q + query.to(tl.int64)[:, None, None] * s_q_t + kc * s_q_k,
            mask=kc < tl.where(query < T, K, 0)[:, None, None], other=0.0,
        ).to(tl.float32)  # fmt: skip
        factor = scale
        if NORM:
            factor = (near_inverse_norm(total(z * z)) * scale)[:, :, None]
        z = z * factor
        o = tl.zeros([Q, VP], tl.float32)
        newest = tl.minimum(first + Q, T) - 1
        for back in range(0, 1 if HEADS else newest + 1):
            t = newest - back
            if HEADS:
                t = 0
            far = tl.full((), t, tl.int64)
            key = tl.load(k + far * s_k_t + kc * s_k_k, mask=kc < K, other=0.0).to(k_ring.dtype.element_ty)
            value = tl.load(v_heads + far * s_v_t + vc * s_v_v, mask=vc < V, other=0.0).to(v_ring.dtype.element_ty)
            if t >= first:
                row = ring_row(new, t, ring_len)
                tl.store(v_rings + row * V + vc, value, mask=(vc < V) & writes[:, None])
                if writes_key:
                    tl.store(k_ring + row * K + kc, key, mask=(kc < K) & (lane == 0)[:, None, None])
            z, o = _push(z, o, key, value, decays, betas, t, query >= t, NORM)
        every = lane >= 0
        for begin in range(0, live, WP):
            record = live - 1 - begin - tl.arange(0, WP)[None, :]
            here = record >= 0
            at = ring_row(start, tl.maximum(record, 0), ring_len)
            old_decays = exp(tl.load(g_rings + at, mask=here, other=0.0))
            old_betas = tl.load(beta_rings + at, mask=here, other=0.0)
            for i in range(0, tl.minimum(WP, live - begin), 4):
                ahead = tl.full((), live - 5 - begin - i, tl.int32)
                z, o = _push(z, o, k0, v0, old_decays, old_betas, i, every, NORM)
                k0, v0 = _record(k_ring, v_rings, start, ahead, ring_len, kc, vc, K, V)
                z, o = _push(z, o, k1, v1, old_decays, old_betas, i + 1, every, NORM)
                k1, v1 = _record(k_ring, v_rings, start, ahead - 1, ring_len, kc, vc, K, V)
                z, o = _push(z, o, k2, v2, old_decays, old_betas, i + 2, every, NORM)
                k2, v2 = _record(k_ring, v_rings, start, ahead - 2, ring_len, kc, vc, K, V)
                z, o = _push(z, o, k3, v3, old_decays, old_betas, i + 3, every, NORM)
                k3, v3 = _record(k_ring, v_rings, start, ahead - 3, ring_len, kc, vc, K, V)
        place = carried + ((request * HV + head) * T + query)[:, None] * (KP + VP)
        tl.store(place[:, :, None] + kc, z, mask=asked[:, None, None])
        tl.store(place + KP + vc, o, mask=asked[:, None])


@triton.jit
def _flags(slots, num_live, batch, T, window, pad_slot_id, s_slots, s_live, BP: tl.constexpr):
    """1 for a request that flushes, 0 for others; the first BP requests."""
    i = tl.arange(0, BP).to(tl.int64)
    here = i < batch
    slot = i
    if slots is not None:
        slot = tl.load(slots + i * s_slots, mask=here, other=-1).to(tl.int64)
    here = here & (slot >= 0) & (slot != pad_slot_id)
    live = tl.load(num_live + slot * s_live, mask=here, other=0)
    return ((live > 0) & (live + T > window)).to(tl.int32)


@triton.jit(do_not_specialize=[*PLAIN, "T"])
def _read(
    state, output, carried, v_ring, k_ring, g_ring, beta_ring, ring_start, num_live, slots,
    s_state, s_out_b, s_out_t, s_v_ring, s_k_ring, s_g_ring, s_beta_ring, s_start, s_live, s_slots,
    T, HV, heads_per_key, ring_len, window, pad_slot_id, batch, folders, limit,
    V: tl.constexpr, K: tl.constexpr, VP: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, WP: tl.constexpr,
    BP: tl.constexpr, ONE: tl.constexpr, NORM: tl.constexpr, OVERLAP: tl.constexpr, FETCH: tl.constexpr,
):  # fmt: skip
    """Outputs of some rows of a head, behind the flush of its records if there is one.

    A flush takes several times as long as an output. So that few of them do not begin last, the first ``folders``
    programs have nothing else to do, and share those of the first ``limit`` requests that flush.
    """
    LANES: tl.constexpr = 128 // C
    PARTS: tl.constexpr = (V + ROWS - 1) // ROWS
    folds = tl.program_id(0) < folders
    units = HV * PARTS
    order = tl.zeros([BP], tl.int32)  # 1 for the first request that flushes, 2 for the next; 0 for the others
    unit = tl.program_id(0) - folders
    end = unit + 1
    step = 1
    if folds:
        flags = _flags(slots, num_live, batch, T, window, pad_slot_id, s_slots, s_live, BP)
        order = tl.cumsum(flags, 0) * flags
        unit = tl.program_id(0)
        end = tl.minimum(tl.sum(flags, 0), limit) * units
        step = folders
    for item in range(unit, end, step):
        request = (item // units).to(tl.int64)
        if folds:
            request = tl.sum(tl.where(order == item // units + 1, tl.arange(0, BP), 0), 0).to(tl.int64)
        part = item % PARTS
        head = item // PARTS % HV
        slot = request
        if slots is not None:
            slot = tl.load(slots + request * s_slots).to(tl.int64)
        if (slot >= 0) & (slot != pad_slot_id):
            row = rows_from(part * ROWS, ROWS, C)
            at = state + slot * s_state + head * (V * K)
            start = tl.load(ring_start + slot * s_start)
            live = tl.load(num_live + slot * s_live)
            flush = (live > 0) & (live + T > window)
            mine = folds | (not flush) | (folders == 0)
            if not mine:
                before = _flags(slots, num_live, batch, T, window, pad_slot_id, s_slots, s_live, BP)
                mine = tl.sum(tl.where(tl.arange(0, BP) < request, before, 0), 0) >= limit
            if mine:
                if flush:
                    S0, S1, S2, S3 = load_rows(at, row, V, C, K, "evict_last")
                    v_from = v_ring + slot * s_v_ring + head * ring_len * V
                    k_from = k_ring + slot * s_k_ring + head // heads_per_key * ring_len * K
                    g_from = g_ring + slot * s_g_ring + head * ring_len
                    beta_from = beta_ring + slot * s_beta_ring + head * ring_len
                    if FETCH:
                        fetch_values(v_from, start, live, ring_len, part * ROWS, V)
                    S0, S1, S2, S3 = rounded(S0, S1, S2, S3, tl.float32)
                    S0, S1, S2, S3 = replay(
                        S0, S1, S2, S3, v_from, k_from, g_from, beta_from, start, live, ring_len, row, V, K, WP, NORM
                    )
                    store_rows(at, row, V, S0, S1, S2, S3, K)
                    S0, S1, S2, S3 = rounded(S0, S1, S2, S3, state.dtype.element_ty)
                else:
                    S0, S1, S2, S3 = load_rows(at, row, V, C, K, "evict_first")
                    S0, S1, S2, S3 = rounded(S0, S1, S2, S3, tl.float32)
                if OVERLAP:
                    gdc_wait()
                z_from = carried + (request * HV + head) * T * (4 * C + VP)
                to = output + request * s_out_b + head * V
                for t in range(1 if ONE else T):
                    far = tl.full((), t, tl.int64)
                    z0, z1, z2, z3 = vector(z_from + far * (4 * C + VP), 1, LANES, C, 4 * C)
                    o = tl.load(z_from + far * (4 * C + VP) + 4 * C + row, mask=row < V, other=0.0)
                    y = dot(S0, S1, S2, S3, z0, z1, z2, z3) + o
                    tl.store(to + far * s_out_t + row, y.to(output.dtype.element_ty), mask=row < V)
    if OVERLAP:
        gdc_wait()  # also without work: what follows may start when this kernel has ended


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
    tile, overlap = lazy_tile(V, K, batch * HV), overlaps(q.device)
    TP, KP, VP = next_power_of_2(T), 4 * tile.columns, next_power_of_2(V)
    Q = min(TP, 4) if T > 1 else min(2, next_power_of_2(HV // H))
    carriers = batch * HV * (TP // Q) if T > 1 else batch * H * triton.cdiv(HV // H, Q)
    carried = torch.empty(batch * HV * T * (KP + VP), dtype=torch.float32, device=q.device)
    cursors = (
        *(ring.stride(0) for ring in rings), ring_start.stride(0), num_live.stride(0), stride(state_batch_indices, 0),
    )  # fmt: skip
    sizes = (T, HV, HV // H, v_cache.shape[2], window, pad_slot_id)
    _carry[(carriers,)](
        carried, *rings, ring_start, num_live, q, k, v, state_batch_indices, A_log, a, dt_bias, b, scale, *cursors,
        *q.stride(), *k.stride(), *v.stride(), A_log.stride(0), *a.stride(), dt_bias.stride(0), *b.stride(), *sizes,
        V=V, K=K, VP=VP, KP=KP, TP=TP, Q=Q, WP=16, NORM=use_qk_l2norm, OVERLAP=overlap, num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    units = HV * triton.cdiv(V, tile.rows)
    limit = triton.cdiv(batch, 16)
    folders = min(_FOLDERS, limit * units) if batch <= _SHORT_BATCH else 0
    _read[(folders + batch * units,)](
        state, output, carried, *rings, ring_start, num_live, state_batch_indices, state.stride(0),
        *output.stride()[:2], *cursors, *sizes, batch, folders, limit,
        V=V, K=K, VP=VP, ROWS=tile.rows, C=tile.columns, WP=16, BP=_SHORT_BATCH, ONE=TP == 1, NORM=use_qk_l2norm,
        OVERLAP=overlap, FETCH=can_fetch(), num_warps=1, enable_fp_fusion=False,
        **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
