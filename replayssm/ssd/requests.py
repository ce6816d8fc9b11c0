"""What a call asks of each sequence, read from its metadata and checked before anything is written."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Sequence(NamedTuple):
    """One sequence that is not padding.

    Attributes:
        row: index among the sequences.
        slot: slot of the buffers that holds its unfinished chunk; 0 without buffers.
        buffered: rows of that chunk, 0..chunk_size-1, which come before the new tokens.
        first: its first new token.
        length: its new tokens, perhaps none.
        first_boundary: row of ``chunk_states`` for the first chunk that is completed.
    """

    row: int
    slot: int
    buffered: int
    first: int
    length: int
    first_boundary: int


def plan(
    cu_seqlens: Tensor | None,
    batch_indices: Tensor | None,
    num_buffered: Tensor | None,
    num_tokens: int,
    chunk_size: int,
) -> list[Sequence]:
    """Read the metadata of ``chunk_scan`` back to the host and check its values.

    Args:
        cu_seqlens: int32 ``[sequences + 1]``; None means one sequence of all tokens.
        batch_indices: int32 or int64 ``[sequences]``, or None; negative ones are padding.
        num_buffered: int32 ``[slots]``, or None without buffers.
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
    sequences: list[Sequence] = []
    for row, slot in enumerate(slots):
        first, end = bounds[row], bounds[row + 1]
        if not 0 <= first <= end <= num_tokens:
            raise ValueError(
                f"cu_seqlens: expected values that ascend within x's {num_tokens} tokens, got {first}..{end} at [{row}]"
            )
        if slot < 0:
            continue
        buffered = 0
        if cursors is not None:
            if slot >= len(cursors):
                raise ValueError(f"batch_indices: expected values below slots={len(cursors)}, got {slot} at [{row}]")
            buffered = cursors[slot]
            if not 0 <= buffered < chunk_size:
                raise ValueError(
                    f"num_buffered: expected 0 <= num_buffered < chunk_size={chunk_size}, got {buffered} at slot "
                    f"{slot} of [{row}]"
                )
        sequences.append(Sequence(row, slot, buffered, first, end - first, first // chunk_size + row))
    if cursors is not None:
        used = [sequence.slot for sequence in sequences]
        if len(set(used)) < len(used):
            twice = next(slot for slot in used if used.count(slot) > 1)
            raise ValueError(f"batch_indices: expected distinct slots, got {twice} more than once")
    return sequences
