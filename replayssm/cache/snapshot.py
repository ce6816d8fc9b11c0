"""Slots outside of their pool: on the host while others run, on disk, in another process."""

from __future__ import annotations

from torch import Tensor

from replayssm.cache.pool import ReplayPool
from replayssm.cache.records import as_plain
from replayssm.cache.slots import Slots
from replayssm.checks import check_dtype, check_shape


def snapshot(pool: ReplayPool, slots: Slots) -> dict[str, Tensor]:
    """Copy everything that slots hold: states, scales, rings, convolution rows and cursors.

    Take it between a commit and the next verify, or before a verify that will be thrown away. The seed of stochastic
    rounding belongs to the pool and is not part of it.

    Args:
        pool: the pool, unchanged.
        slots: ``[n]``, slots in use, in the order in which :func:`restore` is to find them; as of the pool's methods.

    Returns:
        New tensors ``[n, ...]`` on the pool's device, by layer and field. ``safetensors.torch.save_file`` takes them.

    Raises:
        TypeError, ValueError: as the pool's methods.

    Example:
        A request makes room for another one and comes back later, in whatever slot is free then.

        >>> import torch
        >>> from replayssm.cache import Mamba2Layer, ReplayPool
        >>> pool = ReplayPool([Mamba2Layer(nheads=4, headdim=8, dstate=16, ngroups=2, conv_width=4)], num_slots=1)
        >>> slot = pool.allocate()
        >>> pool.commit(slot, [3], 4)
        >>> aside = {name: tensor.cpu() for name, tensor in snapshot(pool, slot).items()}
        >>> pool.free(slot)
        >>> slot = pool.allocate()  # serve the other one, then free its slot, and
        >>> restore(pool, slot, aside)
        >>> pool.cursors.num_live.tolist()
        [3]
    """
    _check_pool(pool)
    index = pool.table.resolve("slots", slots)
    return {name: as_plain(tensor)[index].view(tensor.dtype) for name, tensor in pool.per_slot().items()}


def restore(pool: ReplayPool, slots: Slots, saved: dict[str, Tensor]) -> None:
    """Put what :func:`snapshot` has copied into slots of a pool that was made with the same arguments.

    The pool may be another one, in another process and on another device. Requests go on with the bits that they would
    have had (on a device of the same kind), in any slots, but for random bits of stochastic rounding, which depend on
    the slot and the pool's seed.

    Args:
        pool: written, in these slots only.
        slots: ``[n]``, distinct slots in use.
        saved: what ``snapshot`` returned, on any device.

    Raises:
        TypeError: no dict of tensors, or slots of another type.
        ValueError: not the fields of this pool, a shape or dtype that differs, or slots as of the pool's methods.
            Nothing has been written then.
    """
    _check_pool(pool)
    index = pool.table.resolve("slots", slots)
    if not isinstance(saved, dict):
        raise TypeError(f"saved: expected what snapshot has returned, got {type(saved).__name__}")
    fields = pool.per_slot()
    if saved.keys() != fields.keys():
        other = min(saved.keys() ^ fields.keys(), key=str)
        raise ValueError(f"saved: expected the fields of this pool's layers and cursors, got others, as '{other}'")
    for name, tensor in fields.items():
        check_shape(f"saved['{name}']", saved[name], " ".join(["n", *map(str, tensor.shape[1:])]), {"n": len(index)})
        check_dtype(f"saved['{name}']", saved[name], tensor.dtype)
        if saved[name].is_meta:
            raise ValueError(f"saved['{name}']: expected data, got a tensor on device 'meta', which holds none")
    for name, tensor in fields.items():
        as_plain(tensor)[index] = as_plain(saved[name].to(pool.device))


def _check_pool(pool: object) -> None:
    if not isinstance(pool, ReplayPool):
        raise TypeError(f"pool: expected a ReplayPool, got {type(pool).__name__}")
