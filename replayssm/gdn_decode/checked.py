"""The checked mode (``REPLAYSSM_CHECK=1``): read everything a call will read, and refuse what cannot be right.

Each function takes the arguments of the op of the same name in ``cpu.py``. Slots, counts and cursors are checked by the
plan, which reads them back; then the numbers are looked at, of the memory that the call reads and of no other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from replayssm.checks import check_finite
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
    """Raise ValueError for a slot that cannot be right or a number that is not finite."""
    requests = plan_verify(
        initial_state_indices, output_state_indices, ssm_state_indices, update, rawv is not None,
        initial_state.shape[0], q.shape[1],
    )  # fmt: skip
    _check_gates(A_log, dt_bias)
    for row, slot, _ in requests:
        check_finite("initial_state", initial_state[slot], f" of slot {slot}")
        _check_tokens(row, q=q, k=k, v=v, a=a, b=b)


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
    """Raise ValueError for a slot or count that cannot be right or a number that is not finite."""
    commits = plan_commits(
        state_indices, accept_lens, track_state_indices, track_steps, null_block_id, checkpoint_state.shape[1],
        rawv_cache.shape[3],
    )  # fmt: skip
    for commit in commits:
        check_finite("checkpoint_state", checkpoint_state[:, commit.slot], f" of slot {commit.slot}")
        rings = {"rawv_cache": rawv_cache, "rawk_cache": rawk_cache, "g_cache": g_cache, "beta_cache": beta_cache}
        _check_records({n: t[:, commit.slot] for n, t in rings.items()}, range(commit.num_tokens), commit.slot)


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
    """Raise ValueError for a slot or count that cannot be right or a number that is not finite."""
    copies = plan_copies(
        src_slots, dst_slots, prefix_lens, ring_start, null_block_id, checkpoint_state.shape[1], rawv_cache.shape[3]
    )  # fmt: skip
    for copy in copies:
        check_finite("checkpoint_state", checkpoint_state[:, copy.src], f" of slot {copy.src}")
        rings = {"rawv_cache": rawv_cache, "rawk_cache": rawk_cache, "g_cache": g_cache, "beta_cache": beta_cache}
        rows = [(copy.start + i) % rawv_cache.shape[3] for i in range(copy.num_tokens)]
        _check_records({n: t[:, copy.src] for n, t in rings.items()}, rows, copy.src)


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
    """Raise ValueError for a slot or cursor that cannot be right or a number that is not finite."""
    batch, T = q.shape[:2]
    ring_len = v_cache.shape[2]
    _check_gates(A_log, dt_bias)
    for step in plan_steps(state_batch_indices, pad_slot_id, ring_start, num_live, batch, T, window, ring_len):
        check_finite("state", state[step.slot], f" of slot {step.slot}")
        rows = [(step.start + i) % ring_len for i in range(step.live)]
        rings = {"v_cache": v_cache, "k_cache": k_cache, "g_cache": g_cache, "beta_cache": beta_cache}
        _check_records({name: ring[step.slot] for name, ring in rings.items()}, rows, step.slot)
        _check_tokens(step.row, q=q, k=k, v=v, a=a, b=b)


def _check_gates(A_log: Tensor, dt_bias: Tensor) -> None:
    check_finite("A_log", A_log.clamp(min=torch.finfo(A_log.dtype).min), "")  # -inf: a head that never forgets
    check_finite("dt_bias", dt_bias, "")


def _check_tokens(row: int, **tokens: Tensor) -> None:
    for name, tensor in tokens.items():
        check_finite(name, tensor[row], f" of request {row}")


def _check_records(rings: dict[str, Tensor], rows: Sequence[int], slot: int) -> None:
    """Check rows of the rings ``[..., rows, channels]``, gates and beta without channels; g may be -inf: decay 0."""
    for name, ring in rings.items():
        axis = ring.dim() - 1 if name in ("g_cache", "beta_cache") else ring.dim() - 2
        records = ring.index_select(axis, torch.tensor(list(rows), dtype=torch.long, device=ring.device))
        if name == "g_cache":
            records = records.clamp(min=torch.finfo(records.dtype).min)
        check_finite(name, records, f" of the live rows of slot {slot}")
