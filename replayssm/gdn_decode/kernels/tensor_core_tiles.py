"""Tiles for the matrix unit: loads that are operands, exact parts of numbers, products of parts.

A state never passes through shared memory. A thread reads E columns (16 bytes) of every eighth row, which is its share
of an operand, and of a result, if the columns of states and keys are multiplied in the order that follows from that.
"""

import triton
import triton.language as tl


@triton.jit
def appended(items, x):
    """A tuple with one more element."""
    return items + (x,)  # noqa: RUF005 (the compiler takes no splat)


@triton.jit
def part(x, OPERAND: tl.constexpr):
    """The leading 8 bits of fp32 numbers as bf16 (or, where products of that are wrong, as fp32), and the rest.

    Three parts are the whole number.
    """
    bits = x.to(tl.int32, bitcast=True)
    head = (bits & -65536).to(tl.float32, bitcast=True)
    rest = x - head
    if OPERAND.primitive_bitwidth == 16:
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), rest
    else:
        return head, rest


@triton.jit
def halves(x):
    """The left and the right half of the columns."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def side_by_side(x, y):
    """``[x y]``, of equal shapes."""
    return tl.reshape(tl.permute(tl.join(x, y), (0, 2, 1)), (x.shape[0], 2 * x.shape[1]))


@triton.jit
def _places(first, first_row, KB: tl.constexpr, BV: tl.constexpr, WARPS: tl.constexpr, E: tl.constexpr):
    """Rows and columns of a tile ``[8, BV / 8, KB / 4E, 4E]``."""
    eighth = tl.arange(0, 8)[:, None, None, None]
    block = tl.arange(0, BV // 8)[None, :, None, None]
    row = first_row + (block // (2 * WARPS) * WARPS + block % WARPS) * 16 + block // WARPS % 2 * 8 + eighth
    within = tl.arange(0, 4 * E)[None, None, None, :]
    return row, first + tl.arange(0, KB // (4 * E))[None, None, :, None] * (4 * E) + within


@triton.jit
def load_tile(
    state, first, first_row, rows, K: tl.constexpr, KB: tl.constexpr, BV: tl.constexpr, WARPS: tl.constexpr,
    E: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """KB columns from ``first`` on of BV rows of a head's state."""
    row, column = _places(first, first_row, KB, BV, WARPS, E)
    if MASKED:
        return tl.load(state + row * K + column, mask=(row < rows) & (column < K), other=0.0)
    else:
        return tl.load(state + row * K + column)


@triton.jit
def load_tiles(
    state, first_row, rows, K: tl.constexpr, KB: tl.constexpr, BV: tl.constexpr, WARPS: tl.constexpr, E: tl.constexpr,
    BLOCKS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """All columns of BV rows, as BLOCKS such tiles."""
    tiles = ()
    for b in tl.static_range(BLOCKS):
        tiles = appended(tiles, load_tile(state, b * KB, first_row, rows, K, KB, BV, WARPS, E, MASKED))
    return tiles


@triton.jit
def store_tile(
    state, S, first, first_row, rows, K: tl.constexpr, KB: tl.constexpr, BV: tl.constexpr, WARPS: tl.constexpr,
    E: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Store such a tile, rounded to the type of the state."""
    row, column = _places(first, first_row, KB, BV, WARPS, E)
    S = S.to(state.dtype.element_ty)
    if MASKED:
        tl.store(state + row * K + column, S, mask=(row < rows) & (column < K))
    else:
        tl.store(state + row * K + column, S)


@triton.jit
def as_operand(S, BV: tl.constexpr, KB: tl.constexpr, WARPS: tl.constexpr, E: tl.constexpr):
    """A tile as the operand ``[BV, KB]``, its columns in operand order."""
    S = tl.reshape(S, (8, BV // (16 * WARPS), 2, WARPS, KB // (4 * E), 4, E // 2, 2))
    return tl.reshape(tl.permute(S, (1, 3, 2, 0, 4, 6, 5, 7)), (BV, KB))


@triton.jit
def as_tile(x, BV: tl.constexpr, KB: tl.constexpr, WARPS: tl.constexpr, E: tl.constexpr):
    """The opposite, of a result whose columns are in operand order."""
    x = tl.reshape(x, (BV // (16 * WARPS), WARPS, 2, 8, KB // (4 * E), E // 2, 4, 2))
    return tl.reshape(tl.permute(x, (3, 0, 2, 1, 4, 6, 5, 7)), (8, BV // 8, KB // (4 * E), 4 * E))


@triton.jit
def operand_order(x, E: tl.constexpr):
    """Columns in the order in which loads of E columns a thread make an operand."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    x = tl.reshape(x, (ROWS, COLUMNS // (4 * E), 4, E // 2, 2))
    return tl.reshape(tl.permute(x, (0, 1, 3, 2, 4)), (ROWS, COLUMNS))


@triton.jit
def store_parts(pointer, M, OPERAND: tl.constexpr):
    """Store the parts of an fp32 ``[N, N]``, each transposed, for ``load_factor`` of another kernel."""
    N: tl.constexpr = M.shape[0]
    at = pointer.to(tl.pointer_type(OPERAND)) + tl.arange(0, N)[None, :] * N + tl.arange(0, N)[:, None]
    for i in tl.static_range(3):
        x, M = part(M, OPERAND)
        tl.store(at + i * (N * N), x)


@triton.jit
def load_factor(pointer, N: tl.constexpr, OPERAND: tl.constexpr):
    """What ``store_parts`` stored as the factor ``[8 N, N]`` of ``product``."""
    row = tl.arange(0, 8 * N)[:, None]
    which = (0b0001000010010000 >> (row // N * 2)) & 3
    at = pointer.to(tl.pointer_type(OPERAND)) + which * (N * N) + row % N * N + tl.arange(0, N)[None, :]
    return tl.load(at, mask=row >= 2 * N, other=0.0)


@triton.jit
def product(W, factor, OPERAND: tl.constexpr):
    """``W M^T`` of fp32 ``[BV, N]`` and ``[N, N]``: of the nine products of parts the six largest, small ones first."""
    W0, rest = part(W, OPERAND)
    W1, rest = part(rest, OPERAND)
    W2, _ = part(rest, OPERAND)
    left = side_by_side(side_by_side(W0, W0), side_by_side(W1, W0))  # with 0 0 M1 M2
    right = side_by_side(side_by_side(W2, W1), side_by_side(W0, W0))  # with M0 M0 M1 M0
    return tl.dot(side_by_side(left, right), factor, input_precision="ieee")
