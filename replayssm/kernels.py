"""What the Triton kernels of several op families share."""

import triton
import triton.language as tl


@triton.jit
def ring_row(start, row, ring_len):
    """Ring row of the row that comes ``row`` (below ``2 * ring_len - start``) after row ``start``; no division."""
    row = start + row
    return tl.where(row >= ring_len, row - ring_len, row)


@triton.jit
def held(tile, ASM: tl.constexpr):
    """The tile itself, but the compiler moves nothing that is done with it above this line. PTX, where ASM holds.

    A loaded tile that needs another layout goes through shared memory. The compiler writes it there right behind the
    load, which waits for it, so that later loads start one latency late; behind this line it cannot.
    """
    if ASM:
        PACK: tl.constexpr = 32 // tile.dtype.primitive_bitwidth
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], tile.dtype, False, PACK)
    else:
        return tile
