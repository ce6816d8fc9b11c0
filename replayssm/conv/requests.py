"""The requests of a call: slots, cursors and lengths, read back to the host and checked."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Request(NamedTuple):
    """A request with tokens that is not padding: its slot, the first row of its history, where its tokens are in x."""

    slot: int
    start: int
    row: int
    first: int
    length: int

    def tokens_of(self, x: Tensor) -> Tensor:
        """The request's part ``[length, channels]`` of x or out."""
        return x[self.row] if self.length == x.shape[1] else x[self.row, self.first : self.first + self.length]


def plan(
    rows: Tensor,
    conv_start: Tensor,
    x: Tensor,
    state_batch_indices: Tensor | None,
    pad_slot_id: int,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> list[Request]:
    """Read slots, cursors and lengths back and check their values, before anything is written."""
    (num_slots, conv_len, _), num_tokens = rows.shape, x.shape[1]
    starts = conv_start.tolist()
    bounds = None if cu_seqlens is None else cu_seqlens.tolist()
    batch = x.shape[0] if bounds is None else len(bounds) - 1
    requests, seen = [], set()
    for b, slot in enumerate(range(batch) if state_batch_indices is None else state_batch_indices.tolist()):
        if slot < 0 or slot == pad_slot_id:
            continue
        if slot >= num_slots:
            raise ValueError(f"state_batch_indices: expected values below slots={num_slots}, got {slot} at [{b}]")
        if slot in seen:
            raise ValueError(f"state_batch_indices: expected distinct slots, got {slot} more than once")
        if not 0 <= starts[slot] < conv_len:
            raise ValueError(
                f"conv_start: expected 0 <= conv_start < conv_len={conv_len}, got {starts[slot]} at slot {slot}"
            )
        row, first, length = b, 0, num_tokens
        if bounds is not None:
            row, first, length = 0, bounds[b], bounds[b + 1] - bounds[b]
            if not 0 <= length <= max_seqlen:
                raise ValueError(
                    f"cu_seqlens: expected 0 to max_seqlen={max_seqlen} tokens a request, got {length} at [{b}]"
                )
            if first < 0 or bounds[b + 1] > num_tokens:
                raise ValueError(
                    f"cu_seqlens: expected tokens within x's {num_tokens}, got {first}..{bounds[b + 1]} at [{b}]"
                )
        seen.add(slot)
        if length:
            requests.append(Request(slot, starts[slot], row, first, length))
    return requests
