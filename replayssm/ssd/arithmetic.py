"""One chunk of the scan, as every caller computes it: prefill, decode, any split. ``docs/maths.md`` §5.

The bits of an output row depend on the rows of its chunk up to itself and on the state before the chunk, never on how
many rows are computed together. Two facts about the CPU carry this (``docs/numerics.md`` §5 says how to check them):
``exp``, ``log1p``, sums, products and quotients of single elements have the same bits wherever the element lies, and an
element of a matrix product depends on its own row and column alone as long as the product's shape, strides and
alignment stay. So products have fixed shapes: rows that are not asked for are zeros.

Shapes: Q chunk size, H heads, G groups, P head dim, N state dim, n live rows of the chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Output rows of one product. A row is always computed at its own place within its tile.
TILE = 16
# Bytes that operands of products start at multiples of; PyTorch allocates no less.
_ALIGNMENT = 64


class Parameters(NamedTuple):
    """What all rows share: fp32 ``A [H]``, ``D [H, 1]`` or ``[H, P]``, ``bias [H]``, and how dt is processed."""

    A: Tensor
    D: Tensor | None
    bias: Tensor | None
    softplus: bool
    dt_min: float
    dt_max: float


def parameters(
    A: Tensor, D: Tensor | None, bias: Tensor | None, softplus: bool, dt_min: float, dt_max: float
) -> Parameters:
    """The parameters of a call, in fp32."""
    if D is not None:
        D = D.float() if D.dim() == 2 else D.float().unsqueeze(1)
    return Parameters(A.float(), D, None if bias is None else bias.float(), softplus, dt_min, dt_max)


class Rows(NamedTuple):
    """Rows of inputs, token axis first: ``x [k, H, P]``, raw ``dt [k, H]``, ``B [k, G, N]``."""

    x: Tensor
    dt: Tensor
    B: Tensor

    def part(self, first: int, count: int) -> Rows:
        """``count`` rows from ``first`` on."""
        return Rows(self.x.narrow(0, first, count), self.dt.narrow(0, first, count), self.B.narrow(0, first, count))


def ring_rows(ring: Rows, start: int, count: int) -> list[Rows]:
    """Views of ``count >= 1`` rows of a slot from row ``start`` on, around its end: one piece or two."""
    size = ring.x.shape[0]
    start %= size
    first = min(count, size - start)
    return [ring.part(start, first)] if first == count else [ring.part(start, first), ring.part(0, count - first)]


class Chunk(NamedTuple):
    """The first n rows of a chunk, zeros behind them.

    Attributes:
        x: fp32 ``[H, Q, P]``.
        B: fp32 ``[G, Q, N]``.
        dt: processed dt, fp32 ``[H, Q]``.
        sums: fp64 ``[H, Q]``: ``A`` times the sum of dt up to and with the row.
        length: n.
        dtype: activation dtype, to which what meets in products is rounded.
    """

    x: Tensor
    B: Tensor
    dt: Tensor
    sums: Tensor
    length: int
    dtype: torch.dtype


def process_dt(dt: Tensor, shared: Parameters) -> Tensor:
    """``clamp(softplus(dt + bias))`` in fp32, softplus being the identity above 20.

    Written with ``exp`` and ``log1p``: torch's softplus gives other bits at the end of a tensor.
    """
    dt = dt.float() if shared.bias is None else dt.float() + shared.bias
    if shared.softplus:
        dt = torch.where(dt > 20.0, dt, torch.log1p(torch.exp(dt)))
    return dt.clamp(shared.dt_min, shared.dt_max)


def build(pieces: list[Rows], chunk_size: int, shared: Parameters) -> Chunk:
    """The chunk whose rows are those of the pieces, in order.

    Args:
        pieces: at least one; together 1..chunk_size rows.
        chunk_size: Q.
        shared: see ``Parameters``.

    Returns:
        The chunk, new memory.
    """
    first = pieces[0]
    _, H, P = first.x.shape
    x = first.x.new_zeros(H, chunk_size, P, dtype=torch.float32)
    B = x.new_zeros(first.B.shape[1], chunk_size, first.B.shape[2])
    dt = x.new_zeros(H, chunk_size)
    end = 0
    for piece in pieces:
        count = piece.x.shape[0]
        x.narrow(1, end, count).copy_(piece.x.transpose(0, 1))
        B.narrow(1, end, count).copy_(piece.B.transpose(0, 1))
        dt.narrow(1, end, count).copy_(process_dt(piece.dt, shared).t())
        end += count
    # In fp64: where sums reach hundreds, fp32 would cost the decays three digits. The sum runs from left to right.
    sums = dt.cumsum(1, dtype=torch.float64).mul_(shared.A.unsqueeze(1))
    return Chunk(x, B, dt, sums, end, first.x.dtype)


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 values rounded to the activation dtype, as fp32."""
    return values if dtype == torch.float32 else values.to(dtype).float()


def _aligned(operand: Tensor) -> Tensor:
    """A packed fp32 operand of a product where it starts at a multiple of 64 bytes, else a copy that does."""
    return operand if operand.data_ptr() % _ALIGNMENT == 0 else operand.clone()


def fold(state: Tensor, chunk: Chunk) -> Tensor:
    """The state after the chunk's live rows: ``exp(G_n) S + sum_j x_j r(B_j exp(G_n - G_j) dt_j)^T``.

    Args:
        state: before the chunk, fp32 ``[H, P, N]``, left as it is.
        chunk: see ``Chunk``.

    Returns:
        fp32 ``[H, P, N]``, new.
    """
    H = state.shape[0]
    total = chunk.sums.narrow(1, chunk.length - 1, 1)
    scale = (total - chunk.sums).float().exp_().mul_(chunk.dt)
    B = chunk.B.repeat_interleave(H // chunk.B.shape[0], 0) * scale.unsqueeze(2)
    added = torch.bmm(chunk.x.transpose(1, 2), rounded(B, chunk.dtype))
    return added.add_(state * total.float().exp_().unsqueeze(2))


def score(chunk: Chunk, state: Tensor, C: Tensor, first: int) -> Tensor:
    """Outputs of rows of a chunk before skip and gate.

    ``y_t = (C_t r(S)) exp(G_t) + sum_{j<=t} r((C_t B_j) exp(G_t - G_j) dt_j) x_j``.

    Args:
        chunk: holds at least the rows that are asked for.
        state: before the chunk, fp32 ``[H, P, N]``, packed.
        C: of the rows, any dtype ``[count, G, N]``.
        first: number of the first row within the chunk.

    Returns:
        fp32 ``[count, H, P]``, new.
    """
    state = _aligned(rounded(state, chunk.dtype))
    count = C.shape[0]
    y = state.new_empty(count, *state.shape[:2])
    row = first
    while row < first + count:
        end = min(first + count, (row // TILE + 1) * TILE)
        # A zero weight times NaN is NaN: a row that is not finite would reach earlier rows of its tile.
        if end - row > 1 and not bool(chunk.x.narrow(1, row, end - row).isfinite().all()):
            end = row + 1
        y[row - first : end - first] = _tile(chunk, state, C[row - first : end - first], row)
        row = end
    return y


def _tile(chunk: Chunk, state: Tensor, C: Tensor, first: int) -> Tensor:
    """``score`` for rows of one tile; the state is rounded, and no later row than the last one is looked at."""
    H, P, N = state.shape
    count, G, _ = C.shape
    origin = first // TILE * TILE
    place = first - origin
    end, columns = first + count, min(origin + TILE, chunk.x.shape[1])
    query = state.new_zeros(G, TILE, N)
    query[:, place : place + count] = C.transpose(0, 1)
    products = torch.bmm(query, chunk.B.narrow(1, 0, columns).transpose(1, 2)).narrow(1, place, count)
    newest = chunk.sums[:, first:end].unsqueeze(2)
    decays = (newest - chunk.sums[:, :columns].unsqueeze(1)).float().exp_()
    weights = (products.unsqueeze(1) * decays.view(G, H // G, count, columns)).view(H, count, columns)
    weights.mul_(chunk.dt[:, :columns].unsqueeze(1))
    numbers = torch.arange(columns, device=state.device)
    later = numbers > numbers[first:end].unsqueeze(1)
    tile = state.new_zeros(H, TILE, columns)
    tile[:, place : place + count] = rounded(weights.masked_fill_(later, 0.0), chunk.dtype)
    x = chunk.x
    if end < min(chunk.length, columns):
        x = x.clone()
        x[:, end:columns] = 0.0
    intra = torch.bmm(tile, x.narrow(1, 0, columns)).narrow(1, place, count)
    carried = torch.bmm(query, state.view(G, H // G * P, N).transpose(1, 2)).narrow(1, place, count)
    carried = carried.reshape(G, count, H // G, P).transpose(1, 2).reshape(H, count, P)
    return (carried * newest.float().exp_() + intra).transpose(0, 1)


def finish(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """Skip and gate: ``(y + x D) z sigmoid(z)``, fp32.

    Args:
        y: fp32 ``[count, H, P]``, changed.
        x: any dtype, ``[count, H, P]``.
        D: fp32 ``[H, 1]`` or ``[H, P]``, or None.
        z: any dtype, ``[count, H, P]``, or None.

    Returns:
        fp32 ``[count, H, P]``.
    """
    if D is not None:
        y += x.float() * D
    if z is not None:
        # Not torch.sigmoid, which gives other bits at the end of a tensor.
        gate = z.float()
        y *= gate * (1.0 / (1.0 + torch.exp(-gate)))
    return y
