"""Matrix products whose rows do not depend on how many rows are multiplied together, nor on which."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.checks import check_device, check_dtype, check_packed, check_separate, check_shape, once_per_layout
from replayssm.custom_op import define
from replayssm.dispatch import by_device

__all__ = ["row_product"]


_op = define(
    "row_product(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias) -> ()", by_device("row_product", "row_product")
)


def row_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """``out[i] = weight x[i] + bias``, where the bits of ``out[i]`` are a function of ``x[i]``, weight and bias alone.

    A BLAS chooses its kernel by the number of rows, and a token gets other bits when it is scored alone than when it is
    scored with its neighbours. Here an element is always summed in one order, which depends on the weight's shape only.
    Sums are FP32. On CUDA each factor counts with at least 21 bits (three TF32 products), on the CPU with all 24.

    Args:
        x: fp32 ``[rows, in]``, packed from axis 1. Zero rows are fine.
        weight: ``[out, in]``, fp32, bf16 or fp16, packed from axis 1, as a linear layer stores it. It is not converted
            in memory, so bf16 weights cost half the bytes of fp32 ones.
        bias: ``[out]``, a type that weight may have, packed, or None.
        out: fp32 ``[rows, out]``, packed from axis 1, written; must not overlap the inputs. None allocates it.

    Returns:
        ``out``.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: wrong shape, dtype, device or strides. Nothing has been written then.
        NotImplementedError: no implementation for this device.

    Example:
        >>> import torch
        >>> x, weight = torch.randn(9, 33), torch.randn(57, 33)
        >>> torch.equal(row_product(x, weight)[4:5], row_product(x[4:5], weight))
        True
    """
    _check(x, weight, bias, out)
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    _op(out, x, weight, bias)
    return out


@once_per_layout
def _check(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> None:
    sizes: dict[str, int] = {}
    check_shape("x", x, "rows in", sizes)
    check_shape("weight", weight, "out in", sizes)
    check_dtype("x", x, torch.float32)
    check_dtype("weight", weight, torch.float32, torch.bfloat16, torch.float16)
    named = {"x": x, "weight": weight}
    if bias is not None:
        check_shape("bias", bias, "out", sizes)
        check_dtype("bias", bias, torch.float32, torch.bfloat16, torch.float16)
        check_packed("bias", bias, 0)
        named["bias"] = bias
    if out is not None:
        check_shape("out", out, "rows out", sizes)
        check_dtype("out", out, torch.float32)
        check_separate("out", out, 1)
        named["out"] = out
    for name, tensor in named.items():
        check_device(name, tensor, x.device)
        if name != "bias":
            check_packed(name, tensor, 1)
