"""``replayssm.gdn_decode`` as the paper writes it: one token after the other, in fp64. The truth of every other path.

The records are what the windows hold (k and v in their own type, log decay and beta in fp32); all arithmetic between
them and the stored results is fp64, whatever the backend.
"""

from __future__ import annotations

from torch import Tensor

from replayssm.delta_rule.reference import advance, log_decay, read_out, strength, unit
from replayssm.gdn_decode.requests import plan_commits, plan_copies, plan_steps, plan_verify


def gated_delta_rule_mtp(
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
    backend: str,
) -> None:
    """See ``replayssm.gdn_decode.gated_delta_rule_mtp``; ``update`` is the opposite of ``disable_state_update``."""
    caches = rawv is not None and rawk is not None and g_window is not None and beta_window is not None
    requests = plan_verify(
        initial_state_indices, output_state_indices, ssm_state_indices, update, caches, initial_state.shape[0],
        q.shape[1],
    )  # fmt: skip
    for row, slot, targets in requests:
        S = initial_state[slot].double()
        for t, target in enumerate(targets):
            k_t, v_t = k[row, t], v[row, t]
            g, beta = log_decay(A_log, a[row, t], dt_bias), strength(b[row, t])
            if rawv is not None and rawk is not None and g_window is not None and beta_window is not None:
                rawv[slot, :, t], rawk[slot, :, t], g_window[slot, :, t], beta_window[slot, :, t] = v_t, k_t, g, beta
                v_t, k_t = rawv[slot, :, t], rawk[slot, :, t]
            S = advance(S, unit(k_t, use_qk_l2norm), v_t, g[:, None], beta)
            output[row, t] = read_out(S, scale * unit(q[row, t], use_qk_l2norm))
            if snapshots is not None:
                snapshots[row, t] = S
            if target >= 0:
                initial_state[target] = S


def _replay(
    state: Tensor, rings: tuple[Tensor, ...], slot: int, start: int, count: int, use_qk_l2norm: bool
) -> list[Tensor]:
    """A slot's state, and those after each of ``count`` records from ring row ``start`` on, fp64."""
    v_ring, k_ring, g_ring, beta_ring = (ring[slot] for ring in rings)
    states = [state[slot].double()]
    for i in range(count):
        t = (start + i) % v_ring.shape[1]
        k_t = unit(k_ring[:, t], use_qk_l2norm)
        states.append(advance(states[-1], k_t, v_ring[:, t], g_ring[:, t, None], beta_ring[:, t]))
    return states


def gated_delta_rule_replayssm_commit(
    checkpoint_state: Tensor,
    rawv_cache: Tensor,
    rawk_cache: Tensor,
    g_cache: Tensor,
    beta_cache: Tensor,
    state_indices: Tensor,
    accept_lens: Tensor,
    track_state_indices: Tensor | None,
    track_steps: Tensor | None,
    use_qk_l2norm: bool,
    null_block_id: int,
    backend: str,
) -> None:
    """See ``replayssm.gdn_decode.gated_delta_rule_replayssm_commit``."""
    commits = plan_commits(
        state_indices, accept_lens, track_state_indices, track_steps, null_block_id, checkpoint_state.shape[1],
        rawv_cache.shape[3],
    )  # fmt: skip
    for layer in range(checkpoint_state.shape[0]):
        state = checkpoint_state[layer]
        rings = rawv_cache[layer], rawk_cache[layer], g_cache[layer], beta_cache[layer]
        for slot, count, track_slot, track_step in commits:
            states = _replay(state, rings, slot, 0, count, use_qk_l2norm)
            state[slot] = states[count]
            if track_slot >= 0:
                state[track_slot] = states[track_step + 1]


def gated_delta_rule_replayssm_materialize(
    checkpoint_state: Tensor,
    rawv_cache: Tensor,
    rawk_cache: Tensor,
    g_cache: Tensor,
    beta_cache: Tensor,
    src_slots: Tensor,
    dst_slots: Tensor,
    prefix_lens: Tensor,
    ring_start: Tensor | None,
    use_qk_l2norm: bool,
    null_block_id: int,
    backend: str,
) -> None:
    """See ``replayssm.gdn_decode.gated_delta_rule_replayssm_materialize``."""
    copies = plan_copies(
        src_slots, dst_slots, prefix_lens, ring_start, null_block_id, checkpoint_state.shape[1], rawv_cache.shape[3]
    )  # fmt: skip
    for layer in range(checkpoint_state.shape[0]):
        state = checkpoint_state[layer]
        rings = rawv_cache[layer], rawk_cache[layer], g_cache[layer], beta_cache[layer]
        for src, dst, start, count in copies:
            state[dst] = _replay(state, rings, src, start, count, use_qk_l2norm)[count]


def gated_delta_rule_checkpointing(
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
    backend: str,
) -> None:
    """See ``replayssm.gdn_decode.gated_delta_rule_checkpointing``; ``window`` is the window in force."""
    batch, T = q.shape[:2]
    ring_len = v_cache.shape[2]
    steps = plan_steps(state_batch_indices, pad_slot_id, ring_start, num_live, batch, T, window, ring_len)
    rings = v_cache, k_cache, g_cache, beta_cache
    for row, slot, start, live, flush in steps:
        S = _replay(state, rings, slot, start, live, use_qk_l2norm)[live]
        if flush:
            state[slot] = S
            S = state[slot].double()
        for t in range(T):
            at = (start + live + t) % ring_len
            new = v[row, t], k[row, t], log_decay(A_log, a[row, t], dt_bias), strength(b[row, t])
            for ring, record in zip(rings, new, strict=True):
                ring[slot, :, at] = record
            v_t, k_t, g_t, beta_t = (ring[slot, :, at] for ring in rings)
            S = advance(S, unit(k_t, use_qk_l2norm), v_t, g_t[:, None], beta_t)
            output[row, t] = read_out(S, scale * unit(q[row, t], use_qk_l2norm))
