"""What a call asks of each request, read from the indices and checked before anything is written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor


class Verify(NamedTuple):
    """One request of ``gated_delta_rule_mtp`` that is not padding.

    Attributes:
        row: index in the batch.
        slot: slot whose state is read and whose windows are written.
        targets: for each token the slot that the state after it is written to; negative for none.
    """

    row: int
    slot: int
    targets: list[int]


class Commit(NamedTuple):
    """One request of ``gated_delta_rule_replayssm_commit`` that changes its checkpoint.

    Attributes:
        slot: slot of the checkpoint and of the windows.
        num_tokens: accepted tokens, at least 1.
        track_slot: slot that gets the state after token ``track_step`` as well; -1 for none.
        track_step: an accepted token.
    """

    slot: int
    num_tokens: int
    track_slot: int
    track_step: int


class Copy(NamedTuple):
    """One state that ``gated_delta_rule_replayssm_materialize`` writes in every layer.

    Attributes:
        src: slot of the checkpoint and of the windows.
        dst: slot that is written; may be ``src``.
        start: row of the first token to apply.
        num_tokens: tokens to apply; 0 copies the checkpoint as it is.
    """

    src: int
    dst: int
    start: int
    num_tokens: int


class Step(NamedTuple):
    """One request of ``gated_delta_rule_checkpointing`` that is not padding.

    Attributes:
        row: index in the batch.
        slot: index in the pool.
        start: ring row of the oldest live token.
        live: live rows from there on.
        flush: whether they are folded into the checkpoint before the new tokens are scored.
    """

    row: int
    slot: int
    start: int
    live: int
    flush: bool


def plan_verify(
    indices: Tensor,
    output_indices: Tensor | None,
    scatter: Tensor | None,
    update: bool,
    caches: bool,
    num_slots: int,
    seq_len: int,
) -> list[Verify]:
    """Read the indices of ``gated_delta_rule_mtp`` back to the host and check them.

    Args:
        indices: ``initial_state_indices``.
        output_indices: ``output_state_indices`` or None.
        scatter: ``ssm_state_indices`` or None.
        update: whether states are written at all.
        caches: whether windows are written.
        num_slots: slots of the pool.
        seq_len: T.

    Returns:
        The requests that are not padding.

    Raises:
        ValueError: a slot is out of range, is written twice, or is written for one request and read for another.
    """
    read = indices.tolist()
    final = read if output_indices is None else output_indices.tolist()
    scattered = None if scatter is None else scatter.tolist()
    name = "ssm_state_indices" if scatter is not None else "output_state_indices"
    requests = []
    for row, slot in enumerate(read):
        if slot < 0:
            continue
        _check_slot("initial_state_indices", slot, num_slots, row)
        targets = [-1] * seq_len
        if scattered is not None:
            targets = scattered[row]
        elif update:
            targets[-1] = final[row]
        for target in targets:
            _check_slot(name, target, num_slots, row)
        requests.append(Verify(row, slot, targets))
    if caches:
        _check_distinct("initial_state_indices", (request.slot for request in requests))
    if output_indices is None and scatter is None:
        name = "initial_state_indices"
    written = {target: request.row for request in requests for target in request.targets if target >= 0}
    _check_distinct(name, (target for request in requests for target in request.targets if target >= 0))
    for request in requests:
        writer = written.get(request.slot, request.row)
        if writer != request.row:
            raise ValueError(
                f"{name}: expected slots that no other request reads, got {request.slot}, written for request "
                f"{writer} and read for request {request.row}"
            )
    return requests


def plan_commits(
    state_indices: Tensor,
    accept_lens: Tensor,
    track_state_indices: Tensor | None,
    track_steps: Tensor | None,
    null_block_id: int,
    num_slots: int,
    seq_len: int,
) -> list[Commit]:
    """Read the indices of ``gated_delta_rule_replayssm_commit`` back to the host and check them.

    Args:
        state_indices: slots of the requests.
        accept_lens: accepted tokens.
        track_state_indices: further destinations, or None.
        track_steps: tokens after which they are written, or None.
        null_block_id: slots up to it are ignored.
        num_slots: slots of the pool.
        seq_len: rows of the windows.

    Returns:
        The live requests, those that change their checkpoint.

    Raises:
        ValueError: a live slot or a count is out of range, or a slot is written twice.
    """
    slots, counts = state_indices.tolist(), accept_lens.tolist()
    none = [-1] * len(slots)
    track_slots = none if track_state_indices is None else track_state_indices.tolist()
    steps = none if track_steps is None else track_steps.tolist()
    commits: list[Commit] = []
    for row, (slot, count, track_slot, step) in enumerate(zip(slots, counts, track_slots, steps, strict=True)):
        if slot <= null_block_id:
            continue
        if not 0 <= count <= seq_len:
            raise ValueError(f"accept_lens: expected 0 <= accept_lens <= T={seq_len}, got {count} at [{row}]")
        if count == 0:
            continue
        _check_slot("state_indices", slot, num_slots, row)
        if track_slot <= null_block_id or not 0 <= step < count:
            track_slot, step = -1, -1
        _check_slot("track_state_indices", track_slot, num_slots, row)
        commits.append(Commit(slot, count, track_slot, step))
    live = [commit.slot for commit in commits]
    tracked = [commit.track_slot for commit in commits if commit.track_slot >= 0]
    _check_distinct("state_indices", live)
    _check_distinct("track_state_indices", tracked)
    for slot in set(tracked) & set(live):
        raise ValueError(f"track_state_indices: expected slots outside of the live state_indices, got {slot}")
    return commits


def plan_copies(
    src_slots: Tensor,
    dst_slots: Tensor,
    prefix_lens: Tensor,
    ring_start: Tensor | None,
    null_block_id: int,
    num_slots: int,
    num_rows: int,
) -> list[Copy]:
    """Read the indices of ``gated_delta_rule_replayssm_materialize`` back to the host and check them.

    Args:
        src_slots: slots that are read.
        dst_slots: slots that are written.
        prefix_lens: tokens to apply.
        ring_start: rows of the first tokens, or None for 0.
        null_block_id: slots up to it are ignored.
        num_slots: slots of the pool.
        num_rows: rows of the windows.

    Returns:
        The copies to do.

    Raises:
        ValueError: a live slot or a count is out of range, or a slot is written twice, or written for one request and
            read for another.
    """
    copies: list[Copy] = []
    starts = [0] * src_slots.shape[0] if ring_start is None else ring_start.tolist()
    rows = zip(src_slots.tolist(), dst_slots.tolist(), prefix_lens.tolist(), starts, strict=True)
    for row, (src, dst, count, start) in enumerate(rows):
        if min(src, dst) <= null_block_id:
            continue
        _check_slot("src_slots", src, num_slots, row)
        _check_slot("dst_slots", dst, num_slots, row)
        if not 0 <= count <= num_rows:
            raise ValueError(f"prefix_lens: expected 0 <= prefix_lens <= T={num_rows}, got {count} at [{row}]")
        if not 0 <= start < num_rows:
            raise ValueError(f"ring_start: expected 0 <= ring_start < T={num_rows}, got {start} at [{row}]")
        copies.append(Copy(src, dst, start, count))
    _check_distinct("dst_slots", [copy.dst for copy in copies])
    own = {copy.dst: copy.src for copy in copies}
    for copy in copies:
        if own.get(copy.src, copy.src) != copy.src:
            raise ValueError(f"dst_slots: expected slots that no other request reads, got {copy.src}")
    return copies


def plan_steps(
    slots: Tensor | None,
    pad_slot_id: int,
    ring_start: Tensor,
    num_live: Tensor,
    batch: int,
    seq_len: int,
    window: int,
    ring_len: int,
) -> list[Step]:
    """Read the cursors of ``gated_delta_rule_checkpointing`` back to the host and check them.

    Args:
        slots: ``state_batch_indices`` or None.
        pad_slot_id: a further slot number that means padding; negative ones always do.
        ring_start: int32 ``[slots]``.
        num_live: int32 ``[slots]``.
        batch: requests.
        seq_len: new tokens of every request.
        window: most rows that may be replayed.
        ring_len: rows of the rings.

    Returns:
        The requests that are not padding.

    Raises:
        ValueError: a slot or cursor is out of range, or two requests share a slot.
    """
    starts, lives = ring_start.tolist(), num_live.tolist()
    steps: list[Step] = []
    for row, slot in enumerate(range(batch) if slots is None else slots.tolist()):
        if slot < 0 or slot == pad_slot_id:
            continue
        _check_slot("state_batch_indices", slot, len(starts), row)
        start, live = starts[slot], lives[slot]
        if not 0 <= start < ring_len:
            raise ValueError(
                f"ring_start: expected 0 <= ring_start < ring_len={ring_len}, got {start} at slot {slot} of [{row}]"
            )
        if not 0 <= live <= window:
            raise ValueError(
                f"num_live: expected 0 <= num_live <= window={window}, got {live} at slot {slot} of [{row}]"
            )
        steps.append(Step(row, slot, start, live, live > 0 and live + seq_len > window))
    _check_distinct("state_batch_indices", [step.slot for step in steps])
    return steps


def _check_slot(name: str, slot: int, num_slots: int, row: int) -> None:
    if slot >= num_slots:
        raise ValueError(f"{name}: expected values below slots={num_slots}, got {slot} at [{row}]")


def _check_distinct(name: str, slots: Iterable[int]) -> None:
    seen: set[int] = set()
    for slot in slots:
        if slot in seen:
            raise ValueError(f"{name}: expected distinct slots, got {slot} more than once")
        seen.add(slot)
