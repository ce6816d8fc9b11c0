"""``row_product`` in Triton: a program sums some outputs of some rows over all inputs.

The inputs come in parts, and a part in blocks; each part has a sum of its own, in the order of its blocks, and these
are added in the order of the parts. So the order does not depend on how many rows there are. Few rows would wait for
every addition, hence their parts go side by side; many rows keep a unit busy with one part after the other.
"""

import triton
import triton.language as tl
from torch import Tensor

from replayssm.row_product.configs import BLOCK, num_parts
from replayssm.row_product.configs import tile as product_tile


@triton.jit
def _add_block(total, weight, x, at, depth, k, n_in, m_in):
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
        return tl.dot(w, high, tl.dot(w, middle, tl.dot(w, low, total)))
    else:
        return tl.dot(w.to(tl.float32), v, total, input_precision="tf32x3")


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    out, x, weight, bias, s_out, s_x, s_weight, rows, columns, depth, part,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, TOGETHER: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(columns, COLUMNS)
    n = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK)
    n_in = (n < columns)[:, None]
    m_in = (m < rows)[None, :]
    weight += n.to(tl.int64)[:, None] * s_weight + k[None, :]
    x += m.to(tl.int64)[None, :] * s_x + k[:, None]
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    if TOGETHER:
        first, second, third, fourth = total, total, total, total
        for at in tl.range(0, part, BLOCK, num_stages=STAGES):
            first = _add_block(first, weight, x, at, depth, k, n_in, m_in)
            if PARTS > 1:
                second = _add_block(second, weight, x, at + part, depth, k, n_in, m_in)
            if PARTS > 2:
                third = _add_block(third, weight, x, at + 2 * part, depth, k, n_in, m_in)
                fourth = _add_block(fourth, weight, x, at + 3 * part, depth, k, n_in, m_in)
        total += first
        if PARTS > 1:
            total += second
        if PARTS > 2:
            total += third
            total += fourth
    else:
        for begin in range(PARTS):
            current = tl.zeros((COLUMNS, ROWS), tl.float32)
            for at in tl.range(0, part, BLOCK, num_stages=STAGES):
                current = _add_block(current, weight, x, begin * part + at, depth, k, n_in, m_in)
            total += current
    if bias is not None:
        total += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[:, None]
    tl.store(out + m.to(tl.int64)[None, :] * s_out + n[:, None], total, mask=n_in & m_in)


def row_product(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """See :func:`replayssm.row_product.row_product`."""
    (rows, depth), columns = x.shape, weight.shape[0]
    if rows * columns == 0:
        return
    tile, parts = product_tile(rows, columns, depth), num_parts(depth)
    grid = (triton.cdiv(columns, tile.columns) * triton.cdiv(rows, tile.rows),)
    _multiply[grid](
        out, x, weight, bias, out.stride(0), x.stride(0), weight.stride(0), rows, columns, depth,
        triton.cdiv(depth, parts * BLOCK) * BLOCK,
        ROWS=tile.rows, COLUMNS=tile.columns, BLOCK=BLOCK, PARTS=parts, TOGETHER=tile.together, STAGES=tile.stages,
        num_warps=tile.warps,
    )  # fmt: skip
