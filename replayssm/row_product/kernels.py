"""``row_product`` in Triton: a program sums some outputs of some rows over all inputs, in steps of one depth."""

import triton
import triton.language as tl
from torch import Tensor

from replayssm.row_product.configs import tile as product_tile


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    out, x, weight, bias, s_out, s_x, s_weight, rows, columns, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(columns, COLUMNS)
    n = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    n_in = (n < columns)[:, None]
    m_in = (m < rows)[None, :]
    weight += n.to(tl.int64)[:, None] * s_weight + k[None, :]
    x += m.to(tl.int64)[None, :] * s_x + k[:, None]
    # The weight is the left factor: its many outputs fill the longer side of the unit's tile.
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for first in tl.range(0, depth, DEPTH, num_stages=STAGES):
        k_in = k < depth - first
        w = tl.load(weight + first, mask=n_in & k_in[None, :], other=0.0).to(tl.float32)
        v = tl.load(x + first, mask=m_in & k_in[:, None], other=0.0)
        total = tl.dot(w, v, total, input_precision="tf32x3")
    if bias is not None:
        total += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[:, None]
    tl.store(out + m.to(tl.int64)[None, :] * s_out + n[:, None], total, mask=n_in & m_in)


def row_product(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """See :func:`replayssm.row_product.row_product`."""
    (rows, depth), columns = x.shape, weight.shape[0]
    if rows * columns == 0:
        return
    tile = product_tile(rows, columns, weight.element_size())
    grid = (triton.cdiv(columns, tile.columns) * triton.cdiv(rows, tile.rows),)
    _multiply[grid](
        out, x, weight, bias, out.stride(0), x.stride(0), weight.stride(0), rows, columns, depth,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
