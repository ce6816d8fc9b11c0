"""The cursors of a pool: where each slot's live ring rows lie. No other module moves a cursor.

The rule, once per step and for all layers together, with the ``seq_len`` that the step's verify saw::

    folded     = num_live if num_live + seq_len > window else 0     (what the verify flushed into the checkpoint)
    ring_start = (ring_start + folded) % ring_len
    num_live   = num_live + num_accepted - folded

A rejected token costs nothing else: its row is overwritten by the next step. The window does not depend on
``seq_len``, which may change every step.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from replayssm.checks import INDICES, check_device, check_dtype, check_range, check_shape, check_values, checked_mode
from replayssm.dispatch import on_device

_MOST_ROWS = (1 << 31) - 1  # cursors are int32


@dataclass(frozen=True)
class Cursors:
    """Cursors of every slot, int32 ``[slots]`` on the pool's device.

    Attributes:
        ring_start: ring row of the oldest live token.
        num_live: live rows from there on, all of them accepted.
        conv_start: row of the short convolution's ring where the history of the next token begins.
        last_accepted: rows that the newest commit kept; the convolution can be rewound by that many tokens.
    """

    ring_start: Tensor
    num_live: Tensor
    conv_start: Tensor
    last_accepted: Tensor

    @classmethod
    def allocate(cls, num_slots: int, device: torch.device) -> Cursors:
        """Make the cursors of ``num_slots`` slots, all zero."""
        return cls(*(torch.zeros(num_slots, dtype=torch.int32, device=device) for _ in fields(cls)))


def folded_rows(num_live: Tensor, seq_len: Tensor | int, window: int) -> Tensor:
    """Rows that a verify of ``seq_len`` tokens folds into the checkpoint before it scores them: all or none.

    Args:
        num_live: live rows per request, integer tensor.
        seq_len: new tokens per request, broadcastable to ``num_live``.
        window: most rows that may be replayed and not folded.

    Returns:
        A tensor like ``num_live``.
    """
    return torch.where(num_live + seq_len > window, num_live, torch.zeros_like(num_live))


def reset(cursors: Cursors, slots: Tensor) -> None:
    """Set every cursor of the slots to zero, in place.

    Args:
        cursors: written, for the given slots only.
        slots: int32 or int64 ``[n]``, no padding.

    Raises:
        TypeError: no ``Cursors``, or ``slots`` is no tensor.
        ValueError: wrong shape, dtype or device; on the CPU and in the checked mode also a slot out of range. Nothing
            has been written then.
    """
    _check_cursors(cursors)
    check_shape("slots", slots, "n", {})
    check_dtype("slots", slots, *INDICES)
    check_device("slots", slots, cursors.num_live.device)
    if slots.device.type == "cpu" or checked_mode():
        check_values("slots", slots, 0, cursors.num_live.shape[0] - 1)
    for field in fields(cursors):
        getattr(cursors, field.name)[slots] = 0


def commit(
    cursors: Cursors,
    slots: Tensor,
    seq_len: Tensor | int,
    num_accepted: Tensor,
    *,
    window: int,
    ring_len: int,
    conv_len: int,
) -> None:
    """Keep the first ``num_accepted`` of the ``seq_len`` rows that a verify just wrote.

    Args:
        cursors: written in place, for the given slots only.
        slots: int32 or int64 ``[batch]``, distinct; a negative slot is padding and nothing of it is read or written.
        seq_len: tokens that the verify scored, one number or integer ``[batch]``, at most ``window`` and at most
            ``ring_len - window``; 0 changes nothing.
        num_accepted: int32 or int64 ``[batch]``, in ``0..seq_len``.
        window: the pool's window, at least 1.
        ring_len: rows of the replay ring, more than ``window``.
        conv_len: rows of the convolution's ring.

    Raises:
        TypeError: no ``Cursors``, or an argument is no tensor or no number.
        ValueError: wrong shape, dtype or device, or a number out of range; on the CPU and in the checked mode also an
            element out of range or a slot named twice. Nothing has been written then.

    Example:
        >>> import torch
        >>> cursors = Cursors.allocate(2, torch.device("cpu"))
        >>> commit(cursors, torch.tensor([1]), 4, torch.tensor([3]), window=16, ring_len=20, conv_len=7)
        >>> cursors.num_live.tolist(), cursors.conv_start.tolist()
        ([0, 3], [0, 3])
    """
    _check_cursors(cursors)
    check_range("window", window, 1, _MOST_ROWS)
    check_range("ring_len", ring_len, window + 1, _MOST_ROWS, f"window={window} and a token")
    check_range("conv_len", conv_len, 1, _MOST_ROWS)
    most = min(window, ring_len - window)
    _check(cursors, slots, seq_len, num_accepted, most)
    if slots.device.type == "cpu" or checked_mode():
        _check_contents(cursors, slots, seq_len, num_accepted, most)
    if not isinstance(seq_len, Tensor) and seq_len == 0:
        return
    every = tuple(getattr(cursors, field.name) for field in fields(cursors))
    arguments = every, slots, seq_len, num_accepted, window, ring_len, conv_len
    if slots.is_cuda and all(each.is_contiguous() for each in every) and not torch.compiler.is_compiling():
        with on_device(slots.device):
            importlib.import_module("replayssm.cursors.kernels").commit(*arguments)  # loads Triton
    else:
        _commit(*arguments)


def _commit(
    cursors: tuple[Tensor, ...],
    slots: Tensor,
    seq_len: Tensor | int,
    num_accepted: Tensor,
    window: int,
    ring_len: int,
    conv_len: int,
) -> None:
    live = slots >= 0
    slots = slots.clamp(min=0).long()
    accepted = num_accepted.to(torch.int32)
    if isinstance(seq_len, Tensor):
        live = live & (seq_len > 0)
    before = ring_start, num_live, conv_start, _ = tuple(each[slots] for each in cursors)
    folded = folded_rows(num_live, seq_len, window)
    after = (
        (ring_start + folded) % ring_len,
        num_live + accepted - folded,
        (conv_start + accepted) % conv_len,
        accepted,
    )
    # Adding differences keeps padding exact without a host sync: a padded row adds zero to slot 0.
    for each, old, new in zip(cursors, before, after, strict=True):
        each.index_add_(0, slots, torch.where(live, new - old, 0).to(torch.int32))


def _check_cursors(cursors: object) -> None:
    if not isinstance(cursors, Cursors):
        raise TypeError(f"cursors: expected Cursors, got {type(cursors).__name__}")


def _check(cursors: Cursors, slots: Tensor, seq_len: Tensor | int, num_accepted: Tensor, most: int) -> None:
    sizes: dict[str, int] = {}
    check_shape("slots", slots, "batch", sizes)
    check_shape("num_accepted", num_accepted, "batch", sizes)
    named = {"slots": slots, "num_accepted": num_accepted}
    if isinstance(seq_len, Tensor):
        check_shape("seq_len", seq_len, "batch", sizes)
        named["seq_len"] = seq_len
    else:
        check_range("seq_len", seq_len, 0, most, "the window, and what the ring holds beside it")
    for name, tensor in named.items():
        check_dtype(name, tensor, *INDICES)
        check_device(name, tensor, cursors.num_live.device)


def _check_contents(cursors: Cursors, slots: Tensor, seq_len: Tensor | int, num_accepted: Tensor, most: int) -> None:
    num_slots, seen = cursors.num_live.shape[0], set()
    lengths = seq_len.tolist() if isinstance(seq_len, Tensor) else [seq_len] * len(slots)
    for row, (slot, length, accepted) in enumerate(zip(slots.tolist(), lengths, num_accepted.tolist(), strict=True)):
        if slot < 0:
            continue
        if slot >= num_slots:
            raise ValueError(f"slots: expected values below slots={num_slots}, got {slot} at [{row}]")
        if slot in seen:
            raise ValueError(f"slots: expected distinct slots, got {slot} more than once")
        if not 0 <= length <= most:
            raise ValueError(f"seq_len: expected values in 0..{most}, got {length} at [{row}]")
        if not 0 <= accepted <= length:
            raise ValueError(f"num_accepted: expected values in 0..seq_len={length}, got {accepted} at [{row}]")
        seen.add(slot)
