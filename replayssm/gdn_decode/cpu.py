"""``replayssm.gdn_decode`` on the CPU: one request after the other, all heads at once, in fp32 for all types."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor

from replayssm.delta_rule import token_order, window
from replayssm.delta_rule.gates import Tokens, log_decay, prepared, prepared_queries, strength
from replayssm.gdn_decode.requests import plan_commits, plan_copies, plan_steps, plan_verify

# "auto" comes here where its meaning depends on the device.
_RUN: dict[str, Callable[..., dict[int, Tensor]]] = {
    "auto": token_order.run, "simt": token_order.run, "tensor_core": window.run,
}  # fmt: skip


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
    T = q.shape[1]
    requests = plan_verify(
        initial_state_indices, output_state_indices, ssm_state_indices, update, rawv is not None,
        initial_state.shape[0], T,
    )  # fmt: skip
    if rawv is not None and rawk is not None:
        k, v = k.to(rawk.dtype), v.to(rawv.dtype)
    g, beta = log_decay(A_log, a, dt_bias), strength(b)
    tokens = prepared(k, v, g, beta, use_qk_l2norm)
    queries = prepared_queries(q, scale, use_qk_l2norm)
    for row, slot, targets in requests:
        wanted = range(T) if snapshots is not None else [t for t, target in enumerate(targets) if target >= 0]
        own = Tokens.of_request(tokens, row)
        for t, S in _RUN[backend](initial_state[slot], own, queries[row], output[row], wanted).items():
            if snapshots is not None:
                snapshots[row, t] = S
            if targets[t] >= 0:
                initial_state[targets[t]] = S
        if rawv is not None and rawk is not None and g_window is not None and beta_window is not None:
            rawv[slot], rawk[slot] = v[row].transpose(0, 1), k[row].transpose(0, 1)
            g_window[slot], beta_window[slot] = g[row].t(), beta[row].t()


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
    for layer, state in enumerate(checkpoint_state.unbind()):
        rings = rawv_cache[layer], rawk_cache[layer], g_cache[layer], beta_cache[layer]
        for slot, count, track_slot, track_step in commits:
            tokens = _recorded(rings, slot, 0, count, use_qk_l2norm)
            wanted = {count - 1, track_step} if track_slot >= 0 else {count - 1}
            states = _RUN[backend](state[slot], tokens, None, None, wanted)
            state[slot] = states[count - 1]
            if track_slot >= 0:
                state[track_slot] = states[track_step]


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
    for layer, state in enumerate(checkpoint_state.unbind()):
        rings = rawv_cache[layer], rawk_cache[layer], g_cache[layer], beta_cache[layer]
        for src, dst, start, count in copies:
            if count == 0:
                state[dst] = state[src]
                continue
            _fold(state[src], state[dst], _recorded(rings, src, start, count, use_qk_l2norm), backend)


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
    g, beta = log_decay(A_log, a, dt_bias), strength(b)
    queries = prepared_queries(q, scale, use_qk_l2norm)
    rings = v_cache, k_cache, g_cache, beta_cache
    for row, slot, start, live, flush in steps:
        if flush:
            tokens = _recorded(rings, slot, start, live, use_qk_l2norm)
            _fold(state[slot], state[slot], tokens, "simt")
            start, live = start + live, 0
        at = _rows(start + live, T, ring_len)
        for ring, new in zip(rings, (v, k, g, beta), strict=True):
            # Rows that cross the ring's end are a list, into which PyTorch stores values of the same type only.
            ring[slot][:, at] = new[row].transpose(0, 1).to(ring.dtype)
        tokens = _recorded(rings, slot, start, live + T, use_qk_l2norm)
        _RUN[backend](state[slot], tokens, queries[row], output[row], ())


def _recorded(rings: Collection[Tensor], slot: int, start: int, count: int, use_qk_l2norm: bool) -> Tokens:
    """``count`` records of a slot from ring row ``start`` on."""
    v, k, g, beta = (ring[slot][:, _rows(start, count, ring.shape[2])] for ring in rings)
    return prepared(k, v, g, beta, use_qk_l2norm)


def _rows(start: int, count: int, ring_len: int) -> slice | list[int]:
    """Index of ``count`` ring rows from ``start`` on."""
    start %= ring_len
    if start + count <= ring_len:
        return slice(start, start + count)
    return [(start + i) % ring_len for i in range(count)]


def _fold(source: Tensor, target: Tensor, tokens: Tokens, backend: str) -> None:
    """Write the state after all tokens into ``target``, which may be ``source``."""
    newest = tokens.k.shape[1] - 1
    target.copy_(_RUN[backend](source, tokens, None, None, (newest,))[newest])
