"""The product in FP64: the truth that the other implementations are compared with."""

from __future__ import annotations

from torch import Tensor


def row_product(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """See :func:`replayssm.row_product.row_product`."""
    result = x.double() @ weight.double().t()
    if bias is not None:
        result += bias.double()
    out.copy_(result)
