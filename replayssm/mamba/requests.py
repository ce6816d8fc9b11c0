"""What a call asks of each request, read from the cursors and checked before anything is written."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Request(NamedTuple):
    """One request that is not padding.

    Attributes:
        row: index in the batch.
        slot: index in the pool.
        start: ring row of the oldest live token.
        live: live rows from there on.
        first: the request's first token in x's token axis.
        length: its new tokens, at least 1.
        flush: whether the live rows are folded into the checkpoint before the new tokens are scored.
    """

    row: int
    slot: int
    start: int
    live: int
    first: int
    length: int
    flush: bool


def plan(
    slots: Tensor | None,
    pad_slot_id: int,
    ring_start: Tensor,
    num_live: Tensor,
    cu_seqlens: Tensor | None,
    batch: int,
    seq_len: int,
    num_tokens: int,
    num_slots: int,
    ring_len: int,
    window: int,
) -> list[Request]:
    """Read the metadata of ``checkpointing_ssu`` back to the host and check its values.

    Args:
        slots: ``state_batch_indices``.
        pad_slot_id: a further slot number that means padding; negative ones always do.
        ring_start: int32 ``[slots]``.
        num_live: ``prev_num_accepted_tokens``, int32 ``[slots]``.
        cu_seqlens: int32 ``[batch + 1]`` or None.
        batch: number of requests, padding included.
        seq_len: new tokens of every request; with ``cu_seqlens`` the most that one may have.
        num_tokens: length of x's token axis.
        num_slots: slots of the pool.
        ring_len: rows of the ring.
        window: most rows that may be replayed.

    Returns:
        The requests that are not padding and have at least one token.

    Raises:
        ValueError: a slot, cursor or length is out of range, or two requests share a slot.
    """
    starts, lives = ring_start.tolist(), num_live.tolist()
    bounds = None if cu_seqlens is None else cu_seqlens.tolist()
    requests: list[Request] = []
    for row, slot in enumerate(range(batch) if slots is None else slots.tolist()):
        if slot < 0 or slot == pad_slot_id:
            continue
        if slot >= num_slots:
            raise ValueError(f"state_batch_indices: expected values below slots={num_slots}, got {slot} at [{row}]")
        first, length = (0, seq_len) if bounds is None else (bounds[row], bounds[row + 1] - bounds[row])
        if length > seq_len:
            raise ValueError(
                f"cu_seqlens: expected at most max_seqlen={seq_len} tokens a request, got {length} at [{row}]"
            )
        if length <= 0:
            continue
        if first < 0 or first + length > num_tokens:
            raise ValueError(
                f"cu_seqlens: expected rows within x's {num_tokens} tokens, got {first}..{first + length} at [{row}]"
            )
        start, live = starts[slot], lives[slot]
        if not 0 <= start < ring_len:
            raise ValueError(
                f"ring_start: expected 0 <= ring_start < ring_len={ring_len}, got {start} at slot {slot} of [{row}]"
            )
        if not 0 <= live <= window:
            raise ValueError(
                f"prev_num_accepted_tokens: expected 0 <= prev_num_accepted_tokens <= window={window}, "
                f"got {live} at slot {slot} of [{row}]"
            )
        requests.append(Request(row, slot, start, live, first, length, live > 0 and live + length > window))
    if len({request.slot for request in requests}) < len(requests):
        used = [request.slot for request in requests]
        twice = next(slot for slot in used if used.count(slot) > 1)
        raise ValueError(f"state_batch_indices: expected distinct slots, got {twice} more than once")
    return requests
