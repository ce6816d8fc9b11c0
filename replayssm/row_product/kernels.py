"""``row_product`` in Triton: a program sums some outputs of some rows over all inputs, or over a part of them.

The inputs come in parts, and a part in blocks; each part has a sum of its own, in the order of its blocks, and these
are added in the order of the parts. So the order does not depend on how many rows there are. Few rows give too little
work to all multiprocessors: then every part has programs of its own, and a second launch adds the parts.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.row_product.configs import BLOCK, WIDE, num_parts
from replayssm.row_product.configs import tile as product_tile

_COLUMNS_ADDED = 256


@triton.jit
def _add_block(total, weight, x, at, depth, k, n_in, m_in, one):
    """``total`` plus the product of the block of inputs that begins at ``at``."""
    k_in = k < depth - at
    w = tl.load(weight + at, mask=n_in & k_in[None, :], other=0.0)
    v = tl.load(x + at, mask=m_in & k_in[:, None], other=0.0)
    # The weight is the left factor: its many outputs fill the longer side of the unit's tile.
    if w.dtype == tl.bfloat16:
        # Three parts of 8 bits hold the 24 of an fp32 number; each product with them is exact.
        high = v.to(tl.bfloat16)
        rest = v - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        product = tl.dot(w, high, tl.dot(w, middle, tl.dot(w, low)))
        # The unit rounds its sums towards zero, so a long chain of them drifts; the factor keeps the chains apart.
        return total + product * one
    else:
        return tl.dot(w.to(tl.float32), v, total, input_precision="tf32x3")


@triton.jit(do_not_specialize=["rows", "columns", "s_part"])
def _multiply(
    out, x, weight, bias, s_part, s_out, s_x, s_weight, rows, columns, depth, part, one,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum ``PARTS`` parts one after the other, from the part that is the program's second number on."""
    blocks = tl.cdiv(columns, COLUMNS)
    n = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK)
    n_in = (n < columns)[:, None]
    m_in = (m < rows)[None, :]
    weight += n.to(tl.int64)[:, None] * s_weight + k[None, :]
    x += m.to(tl.int64)[None, :] * s_x + k[:, None]
    out += tl.program_id(1).to(tl.int64) * s_part
    begin = tl.program_id(1) * part
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for _ in range(PARTS):
        current = tl.zeros((COLUMNS, ROWS), tl.float32)
        for at in tl.range(0, part, BLOCK, num_stages=STAGES):
            current = _add_block(current, weight, x, begin + at, depth, k, n_in, m_in, one)
        total += current
        begin += part
    if bias is not None:
        total += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[:, None]
    tl.store(out + m.to(tl.int64)[None, :] * s_out + n[:, None], total, mask=n_in & m_in)


@triton.jit(do_not_specialize=["columns", "s_part"])
def _add_parts(out, sums, bias, s_out, s_part, columns, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    n_in = n < columns
    sums += row * columns + n
    total = tl.zeros((COLUMNS,), tl.float32)
    for number in tl.static_range(PARTS):
        total += tl.load(sums + number * s_part, mask=n_in, other=0.0)
    if bias is not None:
        total += tl.load(bias + n, mask=n_in, other=0.0).to(tl.float32)
    tl.store(out + row * s_out + n, total, mask=n_in)


@cache
def _is_wide(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"] >= WIDE


def row_product(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """See :func:`replayssm.row_product.row_product`."""
    (rows, depth), columns = x.shape, weight.shape[0]
    if rows * columns == 0:
        return
    tile = product_tile(rows, columns, depth, weight.dtype == torch.bfloat16, _is_wide(x.device))
    parts = num_parts(depth)
    grid = triton.cdiv(columns, tile.columns) * triton.cdiv(rows, tile.rows)
    sums, its_bias = out, bias
    if tile.split:
        sums, its_bias = torch.empty(parts, rows, columns, dtype=torch.float32, device=x.device), None
    _multiply[(grid, parts if tile.split else 1)](
        sums, x, weight, its_bias, rows * columns, sums.stride(-2), x.stride(0), weight.stride(0), rows, columns, depth,
        triton.cdiv(depth, parts * BLOCK) * BLOCK, 1.0,
        ROWS=tile.rows, COLUMNS=tile.columns, BLOCK=BLOCK, PARTS=1 if tile.split else parts, STAGES=tile.stages,
        num_warps=tile.warps,
    )  # fmt: skip
    if tile.split:
        _add_parts[(triton.cdiv(columns, _COLUMNS_ADDED), rows)](
            out, sums, bias, out.stride(0), rows * columns, columns, PARTS=parts, COLUMNS=_COLUMNS_ADDED, num_warps=4,
        )  # fmt: skip
