"""Verify and the lazy step, token by token: a program holds some rows of a head's state in registers throughout."""

import triton
import triton.language as tl
from torch import Tensor

from replayssm.delta_rule.kernels import advance, dot, exp, log_decay, pick, strength
from replayssm.gdn_decode.configs import next_power_of_2, verify_tile
from replayssm.gdn_decode.kernels.common import (
    PLAIN,
    can_fetch,
    fetch,
    inverse_norms,
    load_rows,
    norm_of,
    replay,
    rounded,
    rows_from,
    scaled,
    store_rows,
    store_vector,
    stride,
    vector,
)
from replayssm.kernels import ring_row


@triton.jit(do_not_specialize=[*PLAIN, "T"])
def _step(
    state, output, snapshots, v_ring, k_ring, g_ring, beta_ring, ring_start, num_live, q, k, v,
    read_slots, write_slots, scatter, A_log, a, dt_bias, b, scale,
    s_state, s_out_b, s_out_t, s_snap_b, s_snap_t, s_v_ring, s_k_ring, s_g_ring, s_beta_ring, s_start, s_live,
    s_q_b, s_q_t, s_q_h, s_q_k, s_k_b, s_k_t, s_k_h, s_k_k, s_v_b, s_v_t, s_v_h, s_v_v,
    s_read, s_write, s_scatter_b, s_scatter_t, s_A, s_a_b, s_a_t, s_a_h, s_bias, s_b_b, s_b_t, s_b_h,
    T, HV, heads_per_key, ring_len, window, pad_slot_id,
    V: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, C: tl.constexpr, TP: tl.constexpr,
    WP: tl.constexpr, UPDATE: tl.constexpr, NORM: tl.constexpr, HOLD: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    LANES: tl.constexpr = 128 // C
    PARTS: tl.constexpr = (V + ROWS * BLOCKS - 1) // (ROWS * BLOCKS)
    ONE: tl.constexpr = TP == 1
    K_TYPE: tl.constexpr = k.dtype.element_ty if k_ring is None else k_ring.dtype.element_ty
    V_TYPE: tl.constexpr = v.dtype.element_ty if v_ring is None else v_ring.dtype.element_ty
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % HV
    key_head = head // heads_per_key
    request = (tl.program_id(0) // PARTS // HV).to(tl.int64)
    slot = request
    if read_slots is not None:
        slot = tl.load(read_slots + request * s_read).to(tl.int64)
    if (slot >= 0) & (slot != pad_slot_id):
        state += head * (V * K)
        first = part * (ROWS * BLOCKS)
        row = rows_from(first, ROWS, C)
        if HOLD:
            N0, N1, N2, N3 = load_rows(state + slot * s_state, row, V, C, K, POLICY)
        else:
            fetch(state + slot * s_state, first, V, K, ROWS)
        new = 0  # ring row of the first new token
        if v_ring is not None:
            v_ring += slot * s_v_ring + head * ring_len * V
            k_ring += slot * s_k_ring + key_head * ring_len * K
            g_ring += slot * s_g_ring + head * ring_len
            beta_ring += slot * s_beta_ring + head * ring_len
        if num_live is not None:
            start = tl.load(ring_start + slot * s_start)
            live = tl.load(num_live + slot * s_live)
            new = ring_row(start, live, ring_len)
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
        k_norms = betas
        q_norms = betas
        if NORM and not ONE:
            k_norms = inverse_norms(k, token * s_k_t, s_k_k, exists, C, K, K_TYPE)
            q_norms = inverse_norms(q, token * s_q_t, s_q_k, exists, C, K, q.dtype.element_ty)
        if g_ring is not None and part == 0:
            to = ring_row(new, tl.arange(0, TP), ring_len)
            tl.store(g_ring + to, g, mask=exists)
            tl.store(beta_ring + to, betas, mask=exists)
        final = slot
        if write_slots is not None:
            final = tl.load(write_slots + request * s_write).to(tl.int64)
        k0, k1, k2, k3 = vector(k, s_k_k, LANES, C, K)
        q0, q1, q2, q3 = vector(q, s_q_k, LANES, C, K)
        if ONE:  # the same for all blocks
            x0, x1, x2, x3 = rounded(k0, k1, k2, k3, K_TYPE)
            y0, y1, y2, y3 = rounded(q0, q1, q2, q3, tl.float32)
            if NORM:
                x0, x1, x2, x3 = scaled(x0, x1, x2, x3, norm_of(x0, x1, x2, x3)[:, :, None])
                factor = norm_of(y0, y1, y2, y3) * scale
            else:
                factor = scale

        for block in range(0, BLOCKS):
            row = rows_from(first + block * ROWS, ROWS, C)
            # The next block is on its way while tokens are applied to this one.
            if HOLD:
                S0, S1, S2, S3 = rounded(N0, N1, N2, N3, tl.float32)
                if BLOCKS > 1:
                    end = tl.where(tl.full((), block, tl.int32) + 1 < BLOCKS, V, 0)
                    N0, N1, N2, N3 = load_rows(state + slot * s_state, row + ROWS, end, C, K, POLICY)
            else:
                S0, S1, S2, S3 = load_rows(state + slot * s_state, row, V, C, K, POLICY)
                fetch(state + slot * s_state, first + (block + 1) * ROWS, V, K, ROWS)
                S0, S1, S2, S3 = rounded(S0, S1, S2, S3, tl.float32)
            if num_live is not None and live > 0:
                S0, S1, S2, S3 = replay(
                    S0, S1, S2, S3, v_ring, k_ring, g_ring, beta_ring, start, live, ring_len, row, V, K, WP, NORM
                )
                if live + T > window:
                    store_rows(state + slot * s_state, row, V, S0, S1, S2, S3, K)
                    S0, S1, S2, S3 = rounded(S0, S1, S2, S3, state.dtype.element_ty)
            if not ONE:
                k0, k1, k2, k3 = vector(k, s_k_k, LANES, C, K)
                q0, q1, q2, q3 = vector(q, s_q_k, LANES, C, K)
            value = tl.load(v + row * s_v_v, mask=row < V, other=0.0).to(V_TYPE)
            for t in range(1 if ONE else T):
                far = tl.full((), t, tl.int64)  # strides may be large
                if v_ring is not None:
                    to = ring_row(new, t, ring_len)
                    tl.store(v_ring + to * V + row, value, mask=row < V)
                    if (part == 0) & (block == 0) & (head % heads_per_key == 0):
                        store_vector(k_ring + to * K, k0, k1, k2, k3, K)
                u = value.to(tl.float32)
                if not ONE:
                    factor = scale
                    x0, x1, x2, x3 = rounded(k0, k1, k2, k3, K_TYPE)
                    if NORM:
                        factor = pick(q_norms, t) * scale
                        x0, x1, x2, x3 = scaled(x0, x1, x2, x3, pick(k_norms, t))
                    y0, y1, y2, y3 = rounded(q0, q1, q2, q3, tl.float32)
                    # The next token is on its way while this one is applied.
                    following = tl.minimum(far + 1, T - 1)
                    k0, k1, k2, k3 = vector(k + following * s_k_t, s_k_k, LANES, C, K)
                    q0, q1, q2, q3 = vector(q + following * s_q_t, s_q_k, LANES, C, K)
                    value = tl.load(v + following * s_v_t + row * s_v_v, mask=row < V, other=0.0).to(V_TYPE)
                S0, S1, S2, S3 = advance(S0, S1, S2, S3, x0, x1, x2, x3, u, pick(decays, t), pick(betas, t))
                o = dot(S0, S1, S2, S3, y0, y1, y2, y3) * factor
                tl.store(output + far * s_out_t + row, o.to(output.dtype.element_ty), mask=row < V)
                if snapshots is not None:
                    target = snapshots + request * s_snap_b + far * s_snap_t + head * (V * K)
                    store_rows(target, row, V, S0, S1, S2, S3, K)
                if scatter is not None:
                    place = tl.load(scatter + request * s_scatter_b + far * s_scatter_t).to(tl.int64)
                    if place >= 0:
                        store_rows(state + place * s_state, row, V, S0, S1, S2, S3, K)
            if UPDATE and scatter is None and final >= 0:
                store_rows(state + final * s_state, row, V, S0, S1, S2, S3, K)


def verify(
    initial_state: Tensor,
    output: Tensor,
    snapshots: Tensor | None,
    rawv: Tensor | None,
    rawk: Tensor | None,
    g_window: Tensor | None,
    beta_window: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state_indices: Tensor,
    output_state_indices: Tensor | None,
    ssm_state_indices: Tensor | None,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float,
    update: bool,
    use_qk_l2norm: bool,
) -> None:
    """``gated_delta_rule_mtp``; windows are rings of T rows that start at 0."""
    _launch(
        initial_state, output, snapshots, (rawv, rawk, g_window, beta_window), None, None, q, k, v,
        initial_state_indices, output_state_indices, ssm_state_indices, A_log, a, dt_bias, b, scale, -1, 0, update,
        use_qk_l2norm,
    )  # fmt: skip


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
    """``gated_delta_rule_checkpointing``, live rows and new tokens one after the other."""
    _launch(
        state, output, None, (v_cache, k_cache, g_cache, beta_cache), ring_start, num_live, q, k, v,
        state_batch_indices, None, None, A_log, a, dt_bias, b, scale, pad_slot_id, window, False, use_qk_l2norm,
    )  # fmt: skip


def _launch(
    state: Tensor, output: Tensor, snapshots: Tensor | None, rings: tuple[Tensor | None, ...],
    ring_start: Tensor | None, num_live: Tensor | None, q: Tensor, k: Tensor, v: Tensor, read_slots: Tensor | None,
    write_slots: Tensor | None, scatter: Tensor | None, A_log: Tensor, a: Tensor, dt_bias: Tensor, b: Tensor,
    scale: float, pad_slot_id: int, window: int, update: bool, norm: bool,
) -> None:  # fmt: skip
    batch, T, H, K = q.shape
    HV, V = v.shape[2:]
    if batch == 0:
        return
    ring_len = T if rings[0] is None else rings[0].shape[2]
    tile = verify_tile(V, K, batch * HV, T)
    frozen = num_live is None and not update and snapshots is None
    decodes = T == 1 and update and write_slots is None and scatter is None and snapshots is None
    _step[(batch * HV * triton.cdiv(V, tile.rows * tile.blocks),)](
        state, output, snapshots, *rings, ring_start, num_live, q, k, v, read_slots, write_slots, scatter,
        A_log, a, dt_bias, b, scale,
        state.stride(0), *output.stride()[:2], stride(snapshots, 0), stride(snapshots, 1),
        *(stride(ring, 0) for ring in rings), stride(ring_start, 0), stride(num_live, 0),
        *q.stride(), *k.stride(), *v.stride(), stride(read_slots, 0), stride(write_slots, 0),
        stride(scatter, 0), stride(scatter, 1), A_log.stride(0), *a.stride(), dt_bias.stride(0), *b.stride(),
        T, HV, HV // H, ring_len, window, pad_slot_id,
        V=V, K=K, ROWS=tile.rows, BLOCKS=tile.blocks, C=tile.columns, TP=next_power_of_2(T), WP=16, UPDATE=update,
        NORM=norm, HOLD=tile.hold or not can_fetch(),
        POLICY="evict_first" if frozen else "evict_last" if decodes else "", num_warps=1, enable_fp_fusion=False,
        **({"maxnreg": 128} if decodes and can_fetch() else {}),
    )  # fmt: skip
