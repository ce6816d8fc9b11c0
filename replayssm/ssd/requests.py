"""What a call asks of each sequence, read from its metadata and checked before anything is written."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Sequence(NamedTuple):
    """One sequence that is not padding.

    Attributes:
        row: index among the sequences.
        slot: slot of the buffers that holds its unfinished chunk; 0 without buffers.
        start: the oldest of its rows there.
        buffered: rows from there on, which come before the new tokens.
        first: its first new token.
        length: its new tokens, perhaps none.
        first_boundary: row of ``chunk_states`` for the first chunk that new tokens complete.
    """

    row: int
    slot: int
    start: int
    buffered: int
    first: int
    length: int
    first_boundary: int


def plan(
    cu_seqlens: Tensor | None,
    batch_indices: Tensor | None,
    num_buffered: Tensor | None,
    ring_start: Tensor | None,
    num_rows: int,
    num_tokens: int,
    chunk_size: int,
) -> list[Sequence]:
    """Read the metadata of ``chunk_scan`` back to the host and check its values.

    Args:
        cu_seqlens: int32 ``[sequences + 1]``; None means one sequence of all tokens.
        batch_indices: int32 or int64 ``[sequences]``, or None; negative ones are padding.
        num_buffered: int32 ``[slots]``, or None without buffers.
        ring_start: int32 ``[slots]``, or None: rows begin at 0, and fewer than chunk_size are live.
        num_rows: rows of a slot.
        num_tokens: tokens of the call.
        chunk_size: Q.

    Returns:
        The sequences that are not padding.

    Raises:
        ValueError: a bound, slot or cursor is out of range, or two sequences share a slot.
    """
    bounds = [0, num_tokens] if cu_seqlens is None else cu_seqlens.tolist()
    slots = [0] * (len(bounds) - 1) if batch_indices is None else batch_indices.tolist()
    cursors = None if num_buffered is None else num_buffered.tolist()
    starts = None if ring_start is None else ring_start.tolist()
    most = chunk_size - 1 if starts is None else num_rows
    sequences: list[Sequence] = []
    for row, slot in enumerate(slots):
        first, end = bounds[row], bounds[row + 1]
        if not 0 <= first <= end <= num_tokens:
            raise ValueError(
                f"cu_seqlens: expected values that ascend within x's {num_tokens} tokens, got {first}..{end} at [{row}]"
            )
        if slot < 0:
            continue
        start = buffered = 0
        if cursors is not None:
            if slot >= len(cursors):
                raise ValueError(f"batch_indices: expected values below slots={len(cursors)}, got {slot} at [{row}]")
            start, buffered = 0 if starts is None else starts[slot], cursors[slot]
            _check_cursor("num_buffered", buffered, most, slot, row)
            _check_cursor("ring_start", start, max(num_rows - 1, 0), slot, row)
        sequences.append(Sequence(row, slot, start, buffered, first, end - first, first // chunk_size + row))
    if cursors is not None:
        used = [sequence.slot for sequence in sequences]
        if len(set(used)) < len(used):
            twice = next(slot for slot in used if used.count(slot) > 1)
            raise ValueError(f"batch_indices: expected distinct slots, got {twice} more than once")
    return sequences


def _check_cursor(name: str, value: int, most: int, slot: int, row: int) -> None:
    if not 0 <= value <= most:
        raise ValueError(f"{name}: expected 0 <= {name} <= {most}, got {value} at slot {slot} of [{row}]")
