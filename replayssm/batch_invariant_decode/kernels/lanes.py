"""What a lane is and where its rows lie."""

import triton
import triton.language as tl


@triton.jit
def ring_row(start, row, ring_len):
    """Ring row of the row that comes ``row`` (below ``2 * ring_len - start``) after the oldest."""
    row = start + row
    return tl.where(row >= ring_len, row - ring_len, row)


@triton.jit
def row_pointers(rows, s_row, new, s_new, start, position, stored, ring_len):
    """Pointers to rows by their place behind the oldest: the first ``stored`` lie in the ring, the others are new."""
    old = rows + ring_row(start, position, ring_len) * s_row
    return tl.where(position < stored, old, new + (position - stored) * s_new)


@triton.jit
def lane_rows(lane, slots, num_buffered, ring_start, chunk_starts, FLAT: tl.constexpr):
    """``(slot, live rows, oldest row int64)`` of a lane; ``slot`` is negative where it is padding.

    In a flat call the cursors are given by lane: ``num_buffered`` holds the target rows, all rows are stored already.
    """
    slot = tl.load(slots + lane).to(tl.int64)
    if FLAT:
        live = tl.load(num_buffered + lane).to(tl.int32)
        start = tl.load(chunk_starts + lane).to(tl.int64)
        slot = tl.where(live < 0, live.to(tl.int64), slot)
    else:
        live = 0
        start = slot * 0
        if slot >= 0:
            live = tl.load(num_buffered + slot)
            if ring_start is not None:
                start = tl.load(ring_start + slot).to(tl.int64)
    return slot, live, start


@triton.jit
def append(rows, new, s_row, s_new, start, live, seq_len, ring_len, first, count,
           TOGETHER: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Store elements ``first..first + count`` of every new row, some rows at a time."""
    e = first + tl.arange(0, WIDTH)
    for t0 in range(0, seq_len, TOGETHER):
        t = t0 + tl.arange(0, TOGETHER)
        mask = (t < seq_len)[:, None] & (e < first + count)[None, :]
        value = tl.load(new + (t * s_new)[:, None] + e[None, :], mask=mask)
        at = ring_row(start, live + t, ring_len) * s_row
        tl.store(rows + at[:, None] + e[None, :], value, mask=mask)
