"""What a step asks of each lane, read from the cursors and checked before anything is written."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Lane(NamedTuple):
    """One lane that is not padding.

    Attributes:
        lane: index in the call.
        slot: index in the buffers.
        start: buffer row of the oldest live token, before a fold.
        live: live rows from there on, before a fold.
    """

    lane: int
    slot: int
    start: int
    live: int


def plan(
    batch_indices: Tensor,
    num_buffered: Tensor,
    ring_start: Tensor | None,
    num_rows: int,
    most_live: int,
) -> list[Lane]:
    """Read the lanes' slots and cursors back to the host and check their values.

    Args:
        batch_indices: int32 or int64 ``[lanes]``; negative ones are padding.
        num_buffered: int32 ``[slots]``.
        ring_start: int32 ``[slots]``, or None: rows begin at 0.
        num_rows: rows of a slot.
        most_live: most live rows that a slot may have before the call.

    Returns:
        The lanes that are not padding.

    Raises:
        ValueError: a slot or cursor is out of range, or two lanes share a slot.
    """
    counts = num_buffered.tolist()
    starts = [0] * len(counts) if ring_start is None else ring_start.tolist()
    lanes: list[Lane] = []
    seen: set[int] = set()
    for lane, slot in enumerate(batch_indices.tolist()):
        if slot < 0:
            continue
        if slot >= len(counts):
            raise ValueError(f"batch_indices: expected values below slots={len(counts)}, got {slot} at [{lane}]")
        if slot in seen:
            raise ValueError(f"batch_indices: expected distinct slots, got {slot} more than once")
        seen.add(slot)
        if not 0 <= counts[slot] <= most_live:
            raise ValueError(
                f"num_buffered: expected 0 <= num_buffered <= {most_live}, got {counts[slot]} at slot {slot} of "
                f"[{lane}]"
            )
        if not 0 <= starts[slot] < num_rows:
            raise ValueError(
                f"ring_start: expected 0 <= ring_start < {num_rows} rows, got {starts[slot]} at slot {slot} of [{lane}]"
            )
        lanes.append(Lane(lane, slot, starts[slot], counts[slot]))
    return lanes


def plan_rows(
    chunk_starts: Tensor, slots: Tensor, target_rows: Tensor, num_rows: int, num_slots: int, chunk_size: int
) -> list[tuple[int, int, int, int]]:
    """The lanes of ``_mamba_chunk_scan_decode_rows`` that are not padding: (lane, first row, slot, target row).

    Args:
        chunk_starts: first buffer row of each lane's chunk, int32 or int64 ``[lanes]``.
        slots: slot of each lane's state.
        target_rows: row of the chunk that each lane wants; negative ones are padding.
        num_rows: rows of the flat buffers.
        num_slots: states.
        chunk_size: Q.

    Raises:
        ValueError: a number is out of range.
    """
    lanes = []
    for lane, (start, slot, row) in enumerate(
        zip(chunk_starts.tolist(), slots.tolist(), target_rows.tolist(), strict=True)
    ):
        if row < 0:
            continue
        if row >= chunk_size:
            raise ValueError(f"target_rows: expected values below chunk_size={chunk_size}, got {row} at [{lane}]")
        if not 0 <= start <= start + row < num_rows:
            raise ValueError(f"chunk_starts: expected rows within the buffers' {num_rows}, got {start} at [{lane}]")
        if not 0 <= slot < num_slots:
            raise ValueError(f"slots: expected 0 <= slots < {num_slots}, got {slot} at [{lane}]")
        lanes.append((lane, start, slot, row))
    return lanes
