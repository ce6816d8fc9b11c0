"""Which slots of a pool are in use: host-side bookkeeping, and the checks of slot arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from replayssm.checks import INDICES, check_dtype, check_range, check_shape, checked_mode

Slots = Tensor | Sequence[int]


class CapacityError(RuntimeError):
    """A pool has too few free slots.

    Attributes:
        required: slots that were asked for.
        available: slots that are free.
    """

    def __init__(self, required: int, available: int) -> None:
        super().__init__(f"slots: {required} required, {available} available; free some or make a larger pool")
        self.required = required
        self.available = available


class SlotTable:
    """Free and used slots. A freed slot is the next one to be handed out.

    Args:
        num_slots: slots, at least 1.
        device: where slot tensors belong.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.device = device
        self._free = list(range(num_slots - 1, -1, -1))
        self._used = [False] * num_slots

    @property
    def num_free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    def take(self, count: int) -> Tensor:
        """Mark ``count`` slots as used and return them, int64 ``[count]``. CapacityError when too few are free."""
        if count > len(self._free):
            raise CapacityError(count, len(self._free))
        taken = [self._free.pop() for _ in range(count)]
        for slot in taken:
            self._used[slot] = True
        return torch.tensor(taken, dtype=torch.int64, device=self.device)

    def give_back(self, slots: Slots) -> None:
        """Mark used slots as free. Values are read on every device, since the bookkeeping needs them.

        Raises:
            ValueError: a slot is not in use or is named twice; nothing has changed then.
        """
        if isinstance(slots, Tensor):
            _check_tensor("slots", slots, self.device)
            slots = slots.tolist()
        self.resolve("slots", slots)
        for slot in slots:
            self._used[slot] = False
            self._free.append(slot)

    def resolve(self, name: str, slots: Slots, *, padding: bool = False, distinct: bool = True) -> Tensor:
        """Check a slot argument and make it an int64 tensor on the pool's device.

        Values are read on the CPU and for lists; of a tensor on another device only in the checked mode.

        Args:
            name: the argument's name.
            slots: integers, or an int32 or int64 tensor ``[n]``.
            padding: whether negative slots are allowed.
            distinct: whether a slot may be named once only.

        Raises:
            TypeError: neither a tensor nor integers.
            ValueError: wrong shape, dtype or device; a slot out of range, not in use, or named twice.
        """
        if isinstance(slots, Tensor):
            _check_tensor(name, slots, self.device)
            if slots.device.type == "cpu" or checked_mode():
                self._check(name, slots.tolist(), padding, distinct)
            return slots.long()
        check_integers(name, slots)
        self._check(name, slots, padding, distinct)
        return torch.tensor(slots, dtype=torch.int64, device=self.device)

    def _check(self, name: str, slots: Sequence[int], padding: bool, distinct: bool) -> None:
        seen = set()
        for slot in slots:
            if slot < 0 and padding:
                continue
            check_range(name, slot, 0, self.num_slots - 1, f"num_slots={self.num_slots}")
            if not self._used[slot]:
                raise ValueError(f"{name}: expected slots in use, got {slot}, which is free")
            if distinct and slot in seen:
                raise ValueError(f"{name}: expected distinct slots, got {slot} more than once")
            seen.add(slot)


def check_integers(name: str, values: object) -> None:
    """Raise TypeError unless ``values`` is a sequence of whole numbers."""
    if not isinstance(values, Sequence) or any(isinstance(v, bool) or not isinstance(v, int) for v in values):
        raise TypeError(f"{name}: expected a tensor or a list of ints, got {values!r}")


def check_same_length(src: Tensor, dst: Tensor) -> None:
    """Raise ValueError unless as many destinations are given as sources."""
    if src.numel() != dst.numel():
        raise ValueError(f"dst_slots: expected as many as src_slots, {src.numel()}, got {dst.numel()}")


def _check_tensor(name: str, slots: Tensor, device: torch.device) -> None:
    check_shape(name, slots, "n", {})
    check_dtype(name, slots, *INDICES)
    if slots.device.type != device.type:
        raise ValueError(f"{name}: expected device {device}, got {slots.device}")
