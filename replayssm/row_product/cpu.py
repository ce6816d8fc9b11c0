"""The product on the CPU: one product with a vector per row.

``replayssm.hf.linear`` multiplies rows together there where it has measured that their bits agree, which is faster.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_product(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """See :func:`replayssm.row_product.row_product`."""
    weight = weight.float()
    for row, result in zip(x, out, strict=True):
        # A copy: the product's order of summation may depend on how its vector is aligned.
        result.copy_(torch.mv(weight, row.clone()))
    if bias is not None:
        out += bias.float()
