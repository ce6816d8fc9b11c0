"""``replayssm.gdn_decode`` in Triton, for CUDA devices.

With ``simt`` states are computed token by token, so that they have the same bits in every op. ``tensor_core`` is
another way to the outputs of frozen states and to states after a window; all else runs ``simt`` whatever the backend.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from replayssm.gdn_decode.configs import verify_backend, windows_backend
from replayssm.gdn_decode.kernels import lazy, recorded, simt, tensor_core, tensor_core_commit

__all__ = [
    "gated_delta_rule_checkpointing",
    "gated_delta_rule_mtp",
    "gated_delta_rule_replayssm_commit",
    "gated_delta_rule_replayssm_materialize",
]


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
    frozen = snapshots is None and not update
    if frozen and verify_backend(backend, q.device, q.dtype, q.shape[1]) == "tensor_core":
        tensor_core.verify(
            initial_state, output, rawv, rawk, g_window, beta_window, q, k, v, initial_state_indices, A_log, a, dt_bias,
            b, scale, use_qk_l2norm, backend,
        )  # fmt: skip
        return
    simt.verify(
        initial_state, output, snapshots, rawv, rawk, g_window, beta_window, q, k, v, initial_state_indices,
        output_state_indices, ssm_state_indices, A_log, a, dt_bias, b, scale, update, use_qk_l2norm,
    )  # fmt: skip


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
    run = lazy.checkpointing if backend == "tensor_core" else simt.checkpointing
    run(
        state, v_cache, k_cache, g_cache, beta_cache, output, ring_start, num_live, q, k, v, a, b, A_log, dt_bias,
        state_batch_indices, pad_slot_id, scale, window, use_qk_l2norm,
    )  # fmt: skip


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
    apply = _apply(backend, checkpoint_state, rawk_cache, None)
    apply(
        checkpoint_state, (rawv_cache, rawk_cache, g_cache, beta_cache), state_indices, None, accept_lens, None,
        track_state_indices, track_steps, use_qk_l2norm, null_block_id,
    )  # fmt: skip


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
    apply = _apply(backend, checkpoint_state, rawk_cache, ring_start)
    apply(
        checkpoint_state, (rawv_cache, rawk_cache, g_cache, beta_cache), src_slots, dst_slots, prefix_lens, ring_start,
        None, None, use_qk_l2norm, null_block_id,
    )  # fmt: skip


def _apply(backend: str, state: Tensor, keys: Tensor, ring_start: Tensor | None) -> Callable[..., None]:
    """What applies recorded tokens: the matrix unit where it is wanted and knows the windows, else token by token."""
    fold = windows_backend(backend, state, keys) == "tensor_core" and tensor_core_commit.can_fold(keys, ring_start)
    return tensor_core_commit.fold if fold else recorded.apply
