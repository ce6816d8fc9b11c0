"""Copies of rows in and out of the buffers; plain PyTorch, which the CPU path and the reference share."""

from __future__ import annotations

from torch import Tensor

from replayssm.ssd.requests import plan


def write_rows(ring: Tensor, start: int, rows: Tensor) -> None:
    """Write ``rows`` (axis 0) into a slot from row ``start`` on, around its end."""
    size, count = ring.shape[0], rows.shape[0]
    start %= size
    first = min(count, size - start)
    ring.narrow(0, start, first).copy_(rows.narrow(0, 0, first))
    if first < count:
        ring.narrow(0, 0, count - first).copy_(rows.narrow(0, first, count - first))


def masked_update_rows(states: Tensor, indices: Tensor, values: Tensor) -> None:
    """See ``replayssm.batch_invariant_decode._masked_update_rows``."""
    rows = indices.tolist()
    for index, row in enumerate(rows):
        if row >= states.shape[0]:
            raise ValueError(f"indices: expected values below rows={states.shape[0]}, got {row} at [{index}]")
    for index, row in enumerate(rows):
        if row >= 0:
            states[row] = values[index]


def refresh(shadow: Tensor, ssm_state: Tensor, batch_indices: Tensor) -> None:
    """See ``BatchInvariantDecodeBuffers.refresh``."""
    slots = [slot for slot in batch_indices.tolist() if slot >= 0]
    for slot in slots:
        if slot >= shadow.shape[0]:
            raise ValueError(f"batch_indices: expected values below slots={shadow.shape[0]}, got {slot}")
    for slot in slots:
        shadow[slot] = ssm_state[slot]


def store_tails(
    x_rows: Tensor,
    z_rows: Tensor | None,
    dt_rows: Tensor,
    B_rows: Tensor,
    C_rows: Tensor | None,
    num_buffered: Tensor,
    ring_start: Tensor | None,
    num_summed: Tensor | None,
    x: Tensor,
    z: Tensor | None,
    dt: Tensor,
    B: Tensor,
    C: Tensor | None,
    cu_seqlens: Tensor,
    batch_indices: Tensor,
    chunk_size: int,
    extend: bool,
) -> None:
    """Store each sequence's unfinished chunk: ``BatchInvariantDecodeBuffers.seed`` and ``extend``."""
    before = num_buffered if extend else num_buffered.new_zeros(num_buffered.shape)
    pairs = [(x_rows, x), (z_rows, z), (dt_rows, dt), (B_rows, B), (C_rows, C)]
    starts = ring_start if extend else None
    for sequence in plan(cu_seqlens, batch_indices, before, starts, x_rows.shape[1], x.shape[0], chunk_size):
        slot, start, end = sequence.slot, sequence.start, sequence.first + sequence.length
        total = sequence.buffered + sequence.length
        tail = total % chunk_size
        folded = total - tail
        if folded <= sequence.buffered:  # new rows behind those old ones that stay
            place, new = start + sequence.buffered, sequence.length
            start = (start + folded) % x_rows.shape[1]
        else:
            place, new = start, tail
        for rows, values in pairs:
            if rows is not None and values is not None and sequence.length:
                write_rows(rows[slot], place, values[end - new : end])
                if not extend:
                    rows[slot, tail:] = values[end - 1]
        num_buffered[slot] = tail
        if ring_start is not None:
            ring_start[slot] = start
        if num_summed is not None:
            num_summed[slot] = 0


def commit(num_buffered: Tensor, batch_indices: Tensor, num_accepted: Tensor, max_tokens: int) -> None:
    """See ``BatchInvariantDecodeBuffers.commit``."""
    pairs = list(zip(batch_indices.tolist(), num_accepted.tolist(), strict=True))
    for lane, (slot, count) in enumerate(pairs):
        if slot >= num_buffered.shape[0]:
            raise ValueError(
                f"batch_indices: expected values below slots={num_buffered.shape[0]}, got {slot} at [{lane}]"
            )
        if slot >= 0 and not 0 <= count <= max_tokens:
            raise ValueError(f"num_accepted: expected 0 <= num_accepted <= {max_tokens}, got {count} at [{lane}]")
    for slot, count in pairs:
        if slot >= 0:
            num_buffered[slot] += count
