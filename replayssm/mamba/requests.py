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
    x: Tensor,
    state: Tensor,
    x_cache: Tensor,
    seq_len: int,
    window: int,
) -> list[Request]:
    """Read the metadata of ``checkpointing_ssu`` back to the host and check its values.

    Args:
        slots: ``state_batch_indices``.
        pad_slot_id: a further slot number that means padding; negative ones always do.
        ring_start: int32 ``[slots]``.
        num_live: ``prev_num_accepted_tokens``, int32 ``[slots]``.
        cu_seqlens: int32 ``[batch + 1]`` or None.
        x: the new tokens, of which the shape is looked at, as of the two tensors below.
        state: the checkpoints.
        x_cache: the ring of x.
        seq_len: new tokens of every request; with ``cu_seqlens`` the most that one may have.
        window: most rows that may be replayed.

    Returns:
        The requests that are not padding and have at least one token.

    Raises:
        ValueError: a slot, cursor or length is out of range, or two requests share a slot.
    """
    starts, lives = ring_start.tolist(), num_live.tolist()
    bounds = None if cu_seqlens is None else cu_seqlens.tolist()
    num_slots, ring_len = state.shape[0], x_cache.shape[2]
    num_tokens = x.shape[1]
    batch = x.shape[0] if bounds is None else len(bounds) - 1
    indices = range(batch) if slots is None else slots.tolist()
    requests: list[Request] = []
    for row, slot in enumerate(indices):
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


class Copy(NamedTuple):
    """One state that ``replayssm_materialize`` writes.

    Attributes:
        layer: index of the layer.
        src: slot that is read.
        dst: slot that is written; may be ``src``.
        start: ring row of the first token to apply.
        num_rows: tokens to apply; 0 copies the state as it is.
    """

    layer: int
    src: int
    dst: int
    start: int
    num_rows: int


def plan_copies(
    src_slots: Tensor,
    dst_slots: Tensor,
    ring_start: Tensor,
    replay_prefix_len: Tensor,
    active_request_indices: Tensor,
    pad_slot_id: int,
    max_window: int,
    ring_len: int,
) -> list[Copy]:
    """Read the metadata of ``replayssm_materialize`` back to the host and check its values.

    Args:
        src_slots: int32 ``[layers, batch]``.
        dst_slots: int32 ``[layers, batch]``.
        ring_start: int32 ``[batch]``.
        replay_prefix_len: int32 ``[batch]``.
        active_request_indices: int32 ``[batch]``; a negative element ends the list.
        pad_slot_id: a further slot number that means padding; negative ones always do.
        max_window: most tokens that may be applied.
        ring_len: rows of the ring.

    Returns:
        The copies to do, layer by layer.

    Raises:
        ValueError: a value is out of range, a request is selected twice, or a layer's slot that is written is also
            written or read for another request.
    """
    batch = ring_start.shape[0]
    starts, counts = ring_start.tolist(), replay_prefix_len.tolist()
    active: list[int] = []
    for position, request in enumerate(active_request_indices.tolist()):
        if request < 0:
            break
        where = f"of request {request}, active_request_indices[{position}]"
        if request >= batch:
            raise ValueError(f"active_request_indices: expected values below batch={batch}, got {request}")
        if request in active:
            raise ValueError(f"active_request_indices: expected distinct requests, got {request} more than once")
        if not 0 <= starts[request] < ring_len:
            raise ValueError(
                f"ring_start: expected 0 <= ring_start < ring_buffer_len={ring_len}, got {starts[request]} {where}"
            )
        if not 0 <= counts[request] <= max_window:
            raise ValueError(
                f"replay_prefix_len: expected 0 <= replay_prefix_len <= max_window={max_window}, "
                f"got {counts[request]} {where}"
            )
        active.append(request)
    copies: list[Copy] = []
    for layer, (sources, targets) in enumerate(zip(src_slots.tolist(), dst_slots.tolist(), strict=True)):
        pairs = [(sources[request], targets[request], request) for request in active]
        live = [pair for pair in pairs if min(pair[:2]) >= 0 and pad_slot_id not in pair[:2]]
        _check_disjoint(layer, live)
        copies += [Copy(layer, src, dst, starts[request], counts[request]) for src, dst, request in live]
    return copies


def _check_disjoint(layer: int, pairs: list[tuple[int, int, int]]) -> None:
    writers: dict[int, int] = {}
    for _, dst, request in pairs:
        if dst in writers:
            raise ValueError(
                f"dst_slots: expected distinct slots in layer {layer}, got {dst} for requests {writers[dst]} and "
                f"{request}"
            )
        writers[dst] = request
    for src, _, request in pairs:
        if writers.get(src, request) != request:
            raise ValueError(
                f"dst_slots: expected slots that no other request reads in layer {layer}, got {src}, written for "
                f"request {writers[src]} and read for {request}"
            )
