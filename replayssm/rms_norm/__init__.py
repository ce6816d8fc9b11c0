"""Root-mean-square normalisation, with a gate if wanted, in one launch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from replayssm.checks import (
    check_device,
    check_dtype,
    check_flag,
    check_number,
    check_packed,
    check_separate,
    check_shape,
    once_per_layout,
)
from replayssm.custom_op import define
from replayssm.dispatch import by_device

__all__ = ["rms_norm"]

_MOST_CHANNELS = 1 << 15


_op = define(
    "rms_norm(Tensor(a!) out, Tensor x, Tensor weight, Tensor? gate, float eps, float offset, bool gate_first) -> ()",
    by_device("rms_norm", "rms_norm"),
)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    gate_first: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Normalise rows in FP32 (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019).

    The forms::

        n(v)   = v / sqrt(mean(v^2) + eps) * (offset + weight)
        out    = n(x)                      without a gate
        out    = n(x silu(gate))           gate_first, as Mamba-2 has it
        out    = n(x) silu(gate)           otherwise, as Gated DeltaNet has it

    The bits of a row depend on that row alone.

    Args:
        x: fp32 ``[rows, channels]``, packed from axis 1; 1 to 32768 channels.
        weight: ``[channels]``, fp32, bf16 or fp16, packed.
        gate: fp32 ``[rows, channels]``, packed from axis 1, or None.
        eps: added to the mean square, >= 0.
        offset: added to the weight; 1 for weights that are stored as a difference from one.
        gate_first: which of the two gated forms.
        out: fp32 ``[rows, channels]``, packed from axis 1, written; must not overlap the inputs. None
            allocates it.

    Returns:
        ``out``.

    Raises:
        TypeError: an argument is no tensor, no number or no bool.
        ValueError: wrong shape, dtype, device, strides or number. Nothing has been written then.
        NotImplementedError: no implementation for this device.

    Example:
        >>> import torch
        >>> rms_norm(torch.tensor([[3.0, -4.0]]), torch.tensor([1.0, 2.0]), eps=0.0).mul(12.5**0.5).tolist()
        [[3.0, -8.0]]
    """
    _check(x, weight, gate, eps, offset, gate_first, out)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _op(out, x, weight, gate, float(eps), float(offset), gate_first)
    return out


@once_per_layout
def _check(
    x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, offset: float, gate_first: bool, out: Tensor | None
) -> None:
    sizes: dict[str, int] = {}
    check_shape("x", x, "rows channels", sizes)
    check_shape("weight", weight, "channels", sizes)
    check_dtype("x", x, torch.float32)
    check_dtype("weight", weight, torch.float32, torch.bfloat16, torch.float16)
    check_packed("x", x, 1)
    check_packed("weight", weight, 0)
    check_device("weight", weight, x.device)
    for name, tensor in (("gate", gate), ("out", out)):
        if tensor is not None:
            check_shape(name, tensor, "rows channels", sizes)
            check_dtype(name, tensor, torch.float32)
            check_packed(name, tensor, 1)
            check_device(name, tensor, x.device)
    if out is not None:
        check_separate("out", out, 1)
    if not 1 <= sizes["channels"] <= _MOST_CHANNELS:
        raise ValueError(f"x: expected 1 to {_MOST_CHANNELS} channels, got {sizes['channels']}")
    check_number("eps", eps)
    check_number("offset", offset)
    check_flag("gate_first", gate_first)
    if not (eps >= 0 and math.isfinite(eps) and math.isfinite(offset)):
        raise ValueError(f"eps, offset: expected finite numbers, eps not negative, got {eps} and {offset}")
