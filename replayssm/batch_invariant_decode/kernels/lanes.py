"""What a lane is and where its rows lie."""

import triton
import triton.language as tl

from replayssm.kernels import ring_row


@triton.jit
def place(start, row, ring_len, LAZY: tl.constexpr):
    """Ring row of the row that comes ``row`` after the oldest, which without a ring lies at zero."""
    if LAZY:
        return ring_row(start, row, ring_len)
    else:
        return row


@triton.jit
def move_cursors(num_buffered, ring_start, slot, active, start, live, ring_len, chunk_size, folds, full,
                 LAZY: tl.constexpr):  # fmt: skip
    """The cursors of lanes behind a step; with ``LAZY`` their tokens are not committed yet."""
    if LAZY:
        passed = tl.where(folds, chunk_size, 0)
        tl.store(ring_start + slot, ring_row(start, passed, ring_len).to(tl.int32), mask=active)
        tl.store(num_buffered + slot, live - passed, mask=active)
    else:
        tl.store(num_buffered + slot, tl.where(full, 0, live + 1), mask=active)


@triton.jit
def pad(out, target_rows, chunk_flags, lane, leads, p, p_in, seq_len, s_out, TOKENS: tl.constexpr, FLAT: tl.constexpr):
    """What an inactive lane returns: exact zeros, unless the call is flat."""
    if not FLAT:
        t = tl.arange(0, TOKENS)
        zero = tl.zeros((p.shape[0], TOKENS), out.dtype.element_ty)
        tl.store(out + (t * s_out)[None, :] + p[:, None], zero, mask=p_in[:, None] & (t < seq_len)[None, :])
        if leads:
            tl.store(target_rows + lane, -1)
            tl.store(chunk_flags + lane, 0)
