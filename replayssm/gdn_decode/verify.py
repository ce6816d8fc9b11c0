"""``gated_delta_rule_mtp``: score several tokens of each request from its state."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from replayssm.custom_op import define
from replayssm.dispatch import by_device
from replayssm.gdn_decode import checked
from replayssm.gdn_decode.arguments import check_verify

_op = define(
    "gated_delta_rule_mtp(Tensor(a!) initial_state, Tensor(b!) output, Tensor(c!)? intermediate_states_buffer, "
    "Tensor(d!)? replayssm_rawv, Tensor(e!)? replayssm_rawk, Tensor(f!)? replayssm_g, Tensor(g!)? replayssm_beta, "
    "Tensor q, Tensor k, Tensor v, Tensor initial_state_indices, Tensor? output_state_indices, "
    "Tensor? ssm_state_indices, Tensor A_log, Tensor a, Tensor dt_bias, Tensor b, float scale, bool update, "
    "bool use_qk_l2norm, str backend) -> ()",
    by_device("gdn_decode", "gated_delta_rule_mtp", checked.gated_delta_rule_mtp),
)


def gated_delta_rule_mtp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    disable_state_update: bool | None = None,
    use_qk_l2norm: bool = True,
    output_state_indices: Tensor | None = None,
    cache_replayssm: bool = False,
    replayssm_rawv: Tensor | None = None,
    replayssm_rawk: Tensor | None = None,
    replayssm_g: Tensor | None = None,
    replayssm_beta: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Run T tokens of each request through the gated delta rule, from the request's state (``docs/maths.md`` §6).

    Per value head, with ``g = -exp(A_log) softplus(a + dt_bias)`` (softplus is the identity above 20) and ``beta =
    sigmoid(b)``::

        S' = exp(g_t) S_{t-1}    u_t = beta_t (v_t - S' k_t)    S_t = S' + u_t k_t^T    o_t = scale S_t q_t

    (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024), where q and k are divided by ``sqrt(sum x^2 + 1e-6)``
    first if ``use_qk_l2norm``. What becomes of the states is the caller's choice:

    * frozen (``disable_state_update=True``): they are not written; with ``cache_replayssm`` the tokens' inputs go into
      windows, from which ``gated_delta_rule_replayssm_commit`` applies the accepted ones;
    * updated (False): the state after the last token is written to the request's slot, or to another;
    * snapshots: ``intermediate_states_buffer`` gets the state after every token, frozen or updated;
    * scattered: ``ssm_state_indices`` names a slot for the state after every token.

    Sizes: batch, T 1..16, key heads H, value heads HV (a multiple; head h uses key head ``h // (HV / H)``), K and V
    1..256. Float dtypes are fp32, bf16 and fp16. Strides of tensors that are only read are free. "Packed" names axes
    that must have their natural strides. A negative slot is padding: nothing of it is read or written.

    Args:
        q: ``[batch, T, H, K]``, float.
        k: ``[batch, T, H, K]``, q's dtype.
        v: ``[batch, T, HV, V]``, q's dtype.
        initial_state: ``[slots, HV, V, K]``, float, packed from axis 1. Written as told above, rounded to nearest.
        initial_state_indices: int32 or int64 ``[batch]``: slots to read. Padding here is padding of the request.
        A_log: ``[HV]``, float.
        a: ``[batch, T, HV]``, float.
        dt_bias: ``[HV]``, float.
        b: ``[batch, T, HV]``, float.
        scale: of the queries; None means ``K ** -0.5``.
        output: ``[batch, T, HV, V]``, float, packed from axis 2, written; padding keeps what it held. None allocates
            one of q's dtype, with zeros for padding.
        intermediate_states_buffer: ``[>= batch, >= T, HV, V, K]``, initial_state's dtype, packed from axis 2; entry
            [i, t] is the state after token t of request i (not: of slot i).
        ssm_state_indices: int32 or int64 ``[batch, T]``: slots for the state after each token, in place of the one
            after the last; only with updates and without a buffer.
        disable_state_update: freeze the states. None means True, with a warning unless ``cache_replayssm`` implies it;
            FlashInfer announces that None will mean False.
        use_qk_l2norm: normalise q and k.
        output_state_indices: int32 or int64 ``[batch]``: slots for the state after the last token; None means those
            that are read, a negative one skips the write. With frozen or scattered states there is no such write: the
            values are ignored then, as FlashInfer does, whose callers pass them along with every call.
        cache_replayssm: write the windows. States must be frozen, without buffer and scatter.
        replayssm_rawv: ``[slots, HV, T, V]``, float, packed from axis 1: gets v. Where its dtype differs from v's, k
            and v are rounded to it before they are used.
        replayssm_rawk: ``[slots, H, T, K]``, replayssm_rawv's dtype, packed from axis 1: gets k before normalisation.
        replayssm_g: fp32 ``[slots, HV, T]``, packed from axis 1: gets g.
        replayssm_beta: fp32 ``[slots, HV, T]``, packed from axis 1: gets beta. All windows are indexed by the slots
            that are read; token t goes to position t; windows of other slots stay as they are.
        backend: ``"simt"``: fp32, one token after the other; with fp32 states the same bits for every split of the
            tokens into calls. ``"tensor_core"``: one pass over the state for all tokens (``docs/maths.md`` §7); on a
            GPU for frozen states without snapshots, others run simt. ``"auto"``: on a GPU of SM90 tensor_core for
            frozen states without snapshots and three or more tokens in bf16, four or more in another type; else
            simt.

    Returns:
        ``(output, initial_state)``.

    Raises:
        TypeError: an argument is no tensor, an option of another type.
        ValueError: a shape, dtype, device, stride or number does not fit, or options contradict each other; on the CPU
            also a slot out of range, written twice, or written for one request and read for another. Nothing has been
            written then.
        NotImplementedError: no implementation for this device.

    Example:
        One head with K = V = 1; beta is 1/2, so the state goes half of the way to v = 1 with every token.

        >>> import torch
        >>> ones, zeros = torch.ones(1, 3, 1, 1), torch.zeros(1, 3, 1)
        >>> state, index = torch.zeros(2, 1, 1, 1), torch.tensor([1])
        >>> no_decay = torch.tensor([-torch.inf])
        >>> out, _ = gated_delta_rule_mtp(ones, ones, ones, state, index, no_decay, zeros, torch.zeros(1), zeros,
        ...                               disable_state_update=False, use_qk_l2norm=False)
        >>> out.flatten().tolist(), state.flatten().tolist()
        ([0.5, 0.75, 0.875], [0.0, 0.875])
    """
    if disable_state_update is None:
        if not cache_replayssm:
            warnings.warn(
                "gated_delta_rule_mtp: disable_state_update=None means True; pass True or False, as FlashInfer "
                "announces that None will mean False",
                FutureWarning,
                stacklevel=2,
            )
        disable_state_update = True
    update = not disable_state_update if isinstance(disable_state_update, bool) else disable_state_update
    check_verify(
        initial_state, q, k, v, initial_state_indices, A_log, a, dt_bias, b, output, intermediate_states_buffer,
        ssm_state_indices, output_state_indices, replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta, update,
        cache_replayssm, scale, use_qk_l2norm, backend,
    )  # fmt: skip
    if output is None:
        output = torch.zeros(v.shape, dtype=q.dtype, device=v.device)
    _op(
        initial_state, output, intermediate_states_buffer, replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta,
        q, k, v, initial_state_indices, output_state_indices, ssm_state_indices, A_log, a, dt_bias, b,
        float(q.shape[3] ** -0.5 if scale is None else scale), update, use_qk_l2norm, backend,
    )  # fmt: skip
    return output, initial_state
