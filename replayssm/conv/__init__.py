"""The short causal convolution in front of a recurrent layer, with a history that rolls back for free."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.checks import (
    FLOATS,
    INDICES,
    check_device,
    check_dtype,
    check_integer,
    check_packed,
    check_range,
    check_separate,
    check_shape,
    once_per_layout,
)
from replayssm.conv.checked import check_values
from replayssm.custom_op import define
from replayssm.dispatch import by_device

__all__ = ["causal_conv1d_replay"]

_op = define(
    "causal_conv1d_replay(Tensor(a!) rows, Tensor conv_start, Tensor x, Tensor weight, Tensor? bias, str? activation, "
    "Tensor? state_batch_indices, int pad_slot_id, Tensor? cu_seqlens, int? max_seqlen, Tensor(b!) out) -> ()",
    by_device("conv", "causal_conv1d_replay", check_values),
)


def causal_conv1d_replay(
    rows: Tensor,
    conv_start: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Depthwise causal convolution of T new tokens, whose inputs are kept in a ring per slot.

    With ``r(j) = rows[slot, (conv_start[slot] + j) % conv_len]`` the history is ``r(0) .. r(width-2)``, oldest first,
    and token ``i`` is written to ``r(width-1+i)``. The output of token ``i`` is::

        out[i] = act(bias + r(i) * weight[:, 0] + ... + r(i+width-1) * weight[:, width-1])

    summed in this order in FP32 and rounded once. ``conv_start`` is not moved here: after ``n`` of the T tokens are
    accepted, a commit advances it by ``n`` (:func:`replayssm.cursors.commit`), which is all that a rollback takes.
    Without a commit a second call gives the same result. The bits of a token's output depend on its window alone, not
    on T, the batch or the order of the slots.

    Args:
        rows: ring of inputs ``[slots, conv_len, channels]``, fp32, bf16 or fp16, ``conv_len >= width - 1 + T``; any
            slot stride, the rest packed. Written in place, the rows of the new tokens only.
        conv_start: row of the oldest history token, int32 ``[slots]``, in ``0..conv_len-1``. Read only.
        x: new inputs ``[batch, T, channels]``, dtype of ``rows``, channels packed; with ``cu_seqlens``
            ``[1, total, channels]``.
        weight: taps ``[channels, width]``, width 2..5, oldest first, fp32 or the dtype of ``rows``; any strides (the
            transpose of a packed ``[width, channels]`` tensor is the cheapest).
        bias: ``[channels]``, dtype of ``weight``, or None.
        activation: None or ``"silu"``.
        state_batch_indices: slot of each request, int32 or int64 ``[batch]``, distinct. None: request b has slot b.
            A negative id, and ``pad_slot_id``, is padding: nothing is read or written for it.
        pad_slot_id: one more id that means padding.
        cu_seqlens: int32 ``[batch + 1]``: request b owns tokens ``cu_seqlens[b] .. cu_seqlens[b+1]``.
        max_seqlen: longest request, needed with ``cu_seqlens`` (it bounds the ring rows that are written).
        out: like ``x``; padding and tokens of no request keep what it holds. None: allocated, zero there.

    Returns:
        ``out``.

    Raises:
        TypeError: an argument is no tensor, an option of another type.
        ValueError: wrong shape, dtype, device or strides, width outside 2..5, ring too short, unknown activation; on
            the CPU also a slot, cursor or length out of range and a slot named twice. Nothing has been written then.
        NotImplementedError: no implementation for this device.

    Example:
        One channel, width 2, weights 10 (older) and 1; of three tokens two are accepted, so the next token sees 2.

        >>> import torch
        >>> rows, start = torch.zeros(1, 4, 1), torch.zeros(1, dtype=torch.int32)
        >>> weight = torch.tensor([[10.0, 1.0]])
        >>> causal_conv1d_replay(rows, start, torch.tensor([[[1.0], [2.0], [3.0]]]), weight).flatten().tolist()
        [1.0, 12.0, 23.0]
        >>> start += 2
        >>> causal_conv1d_replay(rows, start, torch.tensor([[[4.0]]]), weight).flatten().tolist()
        [24.0]
    """
    _check(
        rows, conv_start, x, weight, bias, activation, state_batch_indices, pad_slot_id, cu_seqlens, max_seqlen, out
    )  # fmt: skip
    if out is None:
        out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    _op(
        rows, conv_start, x, weight, bias, activation,
        state_batch_indices, pad_slot_id, cu_seqlens, max_seqlen, out,
    )  # fmt: skip
    return out


@once_per_layout
def _check(
    rows: Tensor,
    conv_start: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    state_batch_indices: Tensor | None,
    pad_slot_id: int,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    out: Tensor | None,
) -> None:
    sizes: dict[str, int] = {}
    check_shape("rows", rows, "slots conv_len channels", sizes)
    check_shape("conv_start", conv_start, "slots", sizes)
    check_shape("weight", weight, "channels width", sizes)
    check_shape("x", x, "batch T channels" if cu_seqlens is None else "1 T channels", sizes)
    check_dtype("rows", rows, *FLOATS)
    check_dtype("conv_start", conv_start, torch.int32)
    check_dtype("x", x, rows.dtype)
    check_dtype("weight", weight, torch.float32, rows.dtype)
    check_packed("rows", rows, 1)
    check_separate("rows", rows, 1)
    check_packed("x", x, 2)
    named = {"conv_start": conv_start, "x": x, "weight": weight}
    if bias is not None:
        check_shape("bias", bias, "channels", sizes)
        check_dtype("bias", bias, weight.dtype)
        named["bias"] = bias
    if out is not None:
        check_shape("out", out, "batch T channels" if cu_seqlens is None else "1 T channels", sizes)
        check_dtype("out", out, x.dtype)
        check_packed("out", out, 2)
        check_separate("out", out, 2)
        named["out"] = out
    named |= _check_indices(state_batch_indices, cu_seqlens, max_seqlen, sizes)
    for name, tensor in named.items():
        check_device(name, tensor, rows.device)
    check_range("pad_slot_id", pad_slot_id, -(1 << 63), (1 << 63) - 1)
    if not 2 <= sizes["width"] <= 5:
        raise ValueError(f"weight: expected 2 <= width <= 5, got width={sizes['width']}")
    if activation is not None and not isinstance(activation, str):
        raise TypeError(f"activation: expected None or 'silu', got {activation!r}")
    if activation not in (None, "silu"):
        raise ValueError(f"activation: expected None or 'silu', got {activation!r}")
    longest = sizes["T"] if max_seqlen is None else max_seqlen
    if sizes["conv_len"] < sizes["width"] - 1 + longest:
        raise ValueError(
            f"rows: expected conv_len >= width - 1 + T = {sizes['width'] - 1 + longest} "
            f"(width={sizes['width']}, T={longest}), got conv_len={sizes['conv_len']}"
        )


def _check_indices(
    state_batch_indices: Tensor | None, cu_seqlens: Tensor | None, max_seqlen: int | None, sizes: dict[str, int]
) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    if (cu_seqlens is None) != (max_seqlen is None):
        raise ValueError("max_seqlen: expected together with cu_seqlens, and only then")
    if cu_seqlens is not None and max_seqlen is not None:
        check_shape("cu_seqlens", cu_seqlens, "batch+1", sizes)
        check_dtype("cu_seqlens", cu_seqlens, torch.int32)
        sizes["batch"] = sizes["batch+1"] - 1
        check_integer("max_seqlen", max_seqlen)
        named["cu_seqlens"] = cu_seqlens
    if state_batch_indices is not None:
        check_shape("state_batch_indices", state_batch_indices, "batch", sizes)
        check_dtype("state_batch_indices", state_batch_indices, *INDICES)
        named["state_batch_indices"] = state_batch_indices
    elif sizes["batch"] > sizes["slots"]:
        raise ValueError(
            f"state_batch_indices: expected one slot per request, since batch={sizes['batch']} exceeds "
            f"slots={sizes['slots']}, got None"
        )
    return named
