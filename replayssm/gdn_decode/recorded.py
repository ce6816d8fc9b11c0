"""Ops on recorded windows, for all layers: commit an accepted prefix, or write the state after one elsewhere."""

from __future__ import annotations

from torch import Tensor

from replayssm.custom_op import define
from replayssm.dispatch import by_device
from replayssm.gdn_decode import checked
from replayssm.gdn_decode.arguments import check_recorded

_WINDOWS = "Tensor(a!) checkpoint_state, Tensor rawv_cache, Tensor rawk_cache, Tensor g_cache, Tensor beta_cache, "
_commit = define(
    f"gated_delta_rule_replayssm_commit({_WINDOWS}Tensor state_indices, Tensor accept_lens, "
    "Tensor? track_state_indices, Tensor? track_steps, bool use_qk_l2norm, int null_block_id, str backend) -> ()",
    by_device("gdn_decode", "gated_delta_rule_replayssm_commit", checked.gated_delta_rule_replayssm_commit),
)
_materialize = define(
    f"gated_delta_rule_replayssm_materialize({_WINDOWS}Tensor src_slots, Tensor dst_slots, Tensor prefix_lens, "
    "Tensor? ring_start, bool use_qk_l2norm, int null_block_id, str backend) -> ()",
    by_device("gdn_decode", "gated_delta_rule_replayssm_materialize", checked.gated_delta_rule_replayssm_materialize),
)


def gated_delta_rule_replayssm_commit(
    checkpoint_state: Tensor,
    rawv_cache: Tensor,
    rawk_cache: Tensor,
    g_cache: Tensor,
    beta_cache: Tensor,
    state_indices: Tensor,
    accept_lens: Tensor,
    *,
    track_state_indices: Tensor | None = None,
    track_steps: Tensor | None = None,
    use_qk_l2norm: bool = True,
    null_block_id: int = -1,
    backend: str = "auto",
) -> None:
    """Apply the accepted prefix of the windows to the checkpoints of all layers (``docs/maths.md`` §8).

    Run ``gated_delta_rule_mtp`` with ``cache_replayssm=True`` for each layer first; it leaves the checkpoints as they
    are. When acceptance is known, call this once: for t below the accepted length of a live request, per value head::

        S = exp(g_t) S    u = beta_t (v_t - S k_t)    S = S + u k_t^T

    A request is live if its slot is above ``null_block_id`` and it accepts a token; slots of others, which may occur
    twice, are not looked at. The windows are neither cleared nor moved: the next verify overwrites them. Tokens that
    were not accepted are not read, and committing twice applies the tokens twice.

    Sizes: layers, slots, key heads H, value heads HV (a multiple of H), T 1..16, K and V 1..256, batch B. Float dtypes
    are fp32, bf16 and fp16. The strides of the axes layers and slots are free, the axes after them are packed.

    Args:
        checkpoint_state: ``[layers, slots, HV, V, K]``, float. Updated in place, rounded to nearest.
        rawv_cache: ``[layers, slots, HV, T, V]``, float: values.
        rawk_cache: ``[layers, slots, H, T, K]``, rawv_cache's dtype: keys before normalisation.
        g_cache: fp32 ``[layers, slots, HV, T]``: log decays.
        beta_cache: fp32 ``[layers, slots, HV, T]``: sigmoid(b).
        state_indices: int32 or int64 ``[B]``: slots, those of live requests distinct.
        accept_lens: int32 or int64 ``[B]``: accepted tokens, 0..T. 0 changes nothing, tracking included.
        track_state_indices: int32 or int64 ``[B]``: slots for one more state each; those above ``null_block_id`` are
            distinct and none of the live ``state_indices``. Together with track_steps.
        track_steps: int32 or int64 ``[B]``: the token after which that state is taken; a token that is not accepted, or
            a negative one, leaves the slot as it is.
        use_qk_l2norm: divide keys by ``sqrt(sum k^2 + 1e-6)``, as the verify did.
        null_block_id: the largest slot that is not one, >= -1.
        backend: ``"simt"``: fp32, one token after the other: with fp32 checkpoints the bits of decoding token by token.
            ``"tensor_core"``: all tokens in one pass, with the accuracy of fp32 (``docs/maths.md`` §7); on a GPU for
            windows in bf16, others run simt. ``"auto"``: on a GPU of SM90 tensor_core for windows of four and more
            rows in bf16, fp32 checkpoints and K up to 128, else simt. ``"tcgen05"``: for GPUs of SM10x only, where it
            is simt.

    Raises:
        TypeError: an argument is no tensor, the dtype of the checkpoint or of a window is wrong, or the type of an
            option.
        ValueError: a shape, stride, device, index dtype, number or backend does not fit, or one of the two track
            arguments is missing; on the CPU also a live slot or a count out of range and a slot written twice. Nothing
            has been written then.
        NotImplementedError: no implementation for this device.

    Example:
        Of two recorded tokens (v = 1, beta = 1/2, no decay) one is accepted: the state goes half of the way to 1.

        >>> import torch
        >>> state, v, k = torch.zeros(1, 3, 1, 1, 1), torch.ones(1, 3, 1, 2, 1), torch.ones(1, 3, 1, 2, 1)
        >>> g, beta = torch.zeros(1, 3, 1, 2), torch.full((1, 3, 1, 2), 0.5)
        >>> gated_delta_rule_replayssm_commit(state, v, k, g, beta, torch.tensor([2, -1]), torch.tensor([1, 2]),
        ...                                   use_qk_l2norm=False)
        >>> state.flatten().tolist()
        [0.0, 0.0, 0.5]
    """
    check_recorded(
        ("state_indices", "accept_lens", "track_state_indices", "track_steps"), checkpoint_state, rawv_cache,
        rawk_cache, g_cache, beta_cache, use_qk_l2norm, null_block_id, backend, state_indices, accept_lens,
        track_state_indices, track_steps,
    )  # fmt: skip
    _commit(
        checkpoint_state, rawv_cache, rawk_cache, g_cache, beta_cache, state_indices, accept_lens, track_state_indices,
        track_steps, use_qk_l2norm, null_block_id, backend,
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
    *,
    ring_start: Tensor | None = None,
    use_qk_l2norm: bool = True,
    null_block_id: int = -1,
    backend: str = "auto",
) -> None:
    """Write the state after a prefix of a window into another slot, for all layers at once (``docs/maths.md`` §8).

    For every request and layer: take the checkpoint of the source slot, apply the first ``prefix_lens`` tokens of its
    windows, and store the result in the destination slot. Source and windows stay as they are. Zero tokens copy the
    checkpoint. With one backend, the result has the bits that a commit of the same tokens stores.

    Args:
        checkpoint_state: as in ``gated_delta_rule_replayssm_commit``, like all tensors below that are not told of here.
            Destination slots are written.
        rawv_cache: values.
        rawk_cache: keys before normalisation.
        g_cache: log decays.
        beta_cache: sigmoid(b).
        src_slots: int32 or int64 ``[B]``: slots that are read. A request is skipped when either slot is at most
            ``null_block_id``.
        dst_slots: int32 or int64 ``[B]``: slots that are written, distinct. One may equal its own source, but no other
            request's.
        prefix_lens: int32 or int64 ``[B]``, 0..T: tokens to apply.
        ring_start: int32 or int64 ``[B]``, 0..T-1: the rows of the first tokens to apply, from where on the windows are
            rings of T rows; None means 0. With it the layers of ``gated_delta_rule_checkpointing`` can be
            materialized, whose rings may have up to 80 rows.
        use_qk_l2norm: normalise keys, as the verify did.
        null_block_id: the largest slot that is not one, >= -1.
        backend: as in ``gated_delta_rule_replayssm_commit``; rings run simt on a GPU.

    Raises:
        TypeError: as ``gated_delta_rule_replayssm_commit``.
        ValueError: as there; on the CPU also a slot that is written for one request and read for another.
        NotImplementedError: no implementation for this device.

    Example:
        >>> import torch
        >>> state, v, k = torch.zeros(1, 3, 1, 1, 1), torch.ones(1, 3, 1, 2, 1), torch.ones(1, 3, 1, 2, 1)
        >>> g, beta = torch.zeros(1, 3, 1, 2), torch.full((1, 3, 1, 2), 0.5)
        >>> one = lambda number: torch.tensor([number])
        >>> gated_delta_rule_replayssm_materialize(state, v, k, g, beta, one(0), one(2), one(2), use_qk_l2norm=False)
        >>> state.flatten().tolist()
        [0.0, 0.0, 0.75]
    """
    check_recorded(
        ("src_slots", "dst_slots", "prefix_lens", "ring_start"), checkpoint_state, rawv_cache, rawk_cache, g_cache,
        beta_cache, use_qk_l2norm, null_block_id, backend, src_slots, dst_slots, prefix_lens, ring_start,
    )  # fmt: skip
    _materialize(
        checkpoint_state, rawv_cache, rawk_cache, g_cache, beta_cache, src_slots, dst_slots, prefix_lens, ring_start,
        use_qk_l2norm, null_block_id, backend,
    )  # fmt: skip
