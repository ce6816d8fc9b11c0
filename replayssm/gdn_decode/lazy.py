"""``gated_delta_rule_checkpointing``: the lazy ring, one call per decoding step."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.custom_op import define
from replayssm.dispatch import by_device
from replayssm.gdn_decode import checked
from replayssm.gdn_decode.arguments import check_checkpointing

_op = define(
    "gated_delta_rule_checkpointing(Tensor(a!) state, Tensor(b!) v_cache, Tensor(c!) k_cache, Tensor(d!) g_cache, "
    "Tensor(e!) beta_cache, Tensor(f!) output, Tensor ring_start, Tensor num_live, Tensor q, Tensor k, Tensor v, "
    "Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor? state_batch_indices, int pad_slot_id, float scale, "
    "int window, bool use_qk_l2norm, str backend) -> ()",
    by_device("gdn_decode", "gated_delta_rule_checkpointing", checked.gated_delta_rule_checkpointing),
)


def gated_delta_rule_checkpointing(
    state: Tensor,
    v_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    beta_cache: Tensor,
    ring_start: Tensor,
    num_live: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    output: Tensor | None = None,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    max_window: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Score T new tokens per request from a checkpoint and the ring of raw inputs since then (``docs/maths.md`` §8).

    The recurrence is that of ``gated_delta_rule_mtp``. The new tokens' v, k, g and beta are written into the ring,
    behind the live rows, in every call. The state is written only when ``live + T > window``: then it becomes the state
    after the live rows and before the new tokens (a flush). No cursor moves; ``replayssm.cursors.commit`` moves them,
    once, after the accepted tokens are known. A rejected token therefore costs nothing.

    A flush applies the live rows one after the other from their raw inputs, whatever the backend: an fp32 state has
    the bits of committing after every step.

    Sizes: slots S, batch, T 1..16, key heads H, value heads HV (a multiple of H), K and V 1..256, ring_len R. Float
    dtypes are fp32, bf16 and fp16. Strides of tensors that are only read are free; those that are written are packed
    from axis 1, ``output`` from axis 2.

    Args:
        state: ``[S, HV, V, K]``, float. Written at a flush, rounded to nearest.
        v_cache: ``[S, HV, R, V]``, float. T rows are written per request, at ``(ring_start + live + i) % R``; row
            ``(ring_start + j) % R`` is live for j < live. Other rows are never read.
        k_cache: ``[S, H, R, K]``, v_cache's dtype, rows as there; keys before normalisation. New k and v are rounded to
            this dtype before they are used.
        g_cache: fp32 ``[S, HV, R]``, rows as there; log decays.
        beta_cache: fp32 ``[S, HV, R]``, rows as there; sigmoid(b).
        ring_start: int32 ``[S]``, 0..R-1. Read only.
        num_live: int32 ``[S]``, live rows, 0..window. Read only.
        q: ``[batch, T, H, K]``, float.
        k: ``[batch, T, H, K]``, q's dtype.
        v: ``[batch, T, HV, V]``, q's dtype.
        a: ``[batch, T, HV]``, float.
        b: ``[batch, T, HV]``, float.
        A_log: ``[HV]``, float.
        dt_bias: ``[HV]``, float.
        output: ``[batch, T, HV, V]``, float, written; padding keeps what it held. None allocates one of q's dtype, with
            zeros for padding.
        scale: of the queries; None means ``K ** -0.5``.
        use_qk_l2norm: divide q and k by ``sqrt(sum x^2 + 1e-6)``.
        state_batch_indices: int32 or int64 ``[batch]``: the requests' slots, distinct; None means request b in slot b.
            A negative slot is padding: nothing of that request is read or written.
        pad_slot_id: a further slot number that means padding.
        max_window: the window, T..64, with ``window + T <= R``; None means ``R - T``. A pool passes its own, because
            ``R - T`` changes with T.
        backend: of the outputs. ``"simt"``: fp32, live rows and new tokens one after the other; outputs too have the
            bits of committing after every step. ``"tensor_core"``: one pass over the state (``docs/maths.md`` §7) or,
            on a GPU, queries carried back through the tokens (§8), neither of which rebuilds the state. ``"auto"``:
            tensor_core.

    Returns:
        ``output``.

    Raises:
        TypeError: an argument is no tensor, an option of another type.
        ValueError: a shape, dtype, device, stride or number does not fit; on the CPU also a slot or cursor out of range
            or a slot used twice. Nothing has been written then.
        NotImplementedError: no implementation for this device.

    Example:
        One head with K = V = 1; beta is 1/2, so the state goes half of the way to v = 1 with every token.

        >>> import torch
        >>> state, v_cache, k_cache = torch.zeros(2, 1, 1, 1), torch.zeros(2, 1, 6, 1), torch.zeros(2, 1, 6, 1)
        >>> g_cache, beta_cache = torch.zeros(2, 1, 6), torch.zeros(2, 1, 6)
        >>> start = live = torch.zeros(2, dtype=torch.int32)
        >>> ones, zeros, no_decay = torch.ones(1, 3, 1, 1), torch.zeros(1, 3, 1), torch.tensor([-torch.inf])
        >>> out = gated_delta_rule_checkpointing(
        ...     state, v_cache, k_cache, g_cache, beta_cache, start, live, ones, ones, ones, zeros, zeros, no_decay,
        ...     torch.zeros(1), use_qk_l2norm=False, state_batch_indices=torch.tensor([1]))
        >>> out.flatten().tolist(), state.flatten().tolist(), v_cache[1].flatten().tolist()
        ([0.5, 0.75, 0.875], [0.0, 0.0], [1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    """
    window = check_checkpointing(
        state, v_cache, k_cache, g_cache, beta_cache, ring_start, num_live, q, k, v, a, b, A_log, dt_bias, output,
        state_batch_indices, pad_slot_id, scale, max_window, use_qk_l2norm, backend,
    )  # fmt: skip
    if output is None:
        output = torch.zeros(v.shape, dtype=q.dtype, device=v.device)
    _op(
        state, v_cache, k_cache, g_cache, beta_cache, output, ring_start, num_live, q, k, v, a, b, A_log, dt_bias,
        state_batch_indices, pad_slot_id, float(q.shape[3] ** -0.5 if scale is None else scale), window, use_qk_l2norm,
        "tensor_core" if backend == "auto" else backend,
    )  # fmt: skip
    return output
