"""Which request a program takes."""

import triton
import triton.language as tl


@triton.jit
def turn(
    rank, batch, slots, s_slots, pad_slot_id, num_live, s_live, cu_seqlens, seq_len, window, LISTED: tl.constexpr,
    BETWEEN: tl.constexpr,
):  # fmt: skip
    """Request number ``rank`` when one that flushes comes first and BETWEEN others follow it, and so on.

    Those that flush take longest, so none should start last; the others use the memory better, so they go along.
    """
    b = tl.arange(0, LISTED)
    listed = b < batch
    slot = b.to(tl.int64)
    if slots is not None:
        slot = tl.load(slots + b * s_slots, mask=listed, other=-1).to(tl.int64)
    if cu_seqlens is not None:
        seq_len = tl.load(cu_seqlens + b + 1, mask=listed, other=0) - tl.load(cu_seqlens + b, mask=listed, other=0)
    is_slot = listed & (slot >= 0) & (slot != pad_slot_id)
    live = tl.load(num_live + slot * s_live, mask=is_slot, other=0)
    flush = ((live > 0) & (live + seq_len > window)).to(tl.int32)
    before = tl.cumsum(flush, 0)  # that flush, up to and with the request itself
    total = tl.sum(flush, 0)
    others = b - before  # before a request that does not flush
    if BETWEEN == 0:
        place = tl.where(flush > 0, before - 1, total + others)
    else:
        turns = tl.minimum(total, (batch - total) // BETWEEN)
        extra = total - turns  # that flush before the first turn, as there are not enough others
        place_flush = tl.where(before <= extra, before - 1, extra + (before - extra - 1) * (BETWEEN + 1))
        place = tl.where(flush > 0, place_flush, extra + others + tl.minimum(others // BETWEEN + 1, turns))
    return tl.sum(tl.where(place == rank, b, 0), 0)
