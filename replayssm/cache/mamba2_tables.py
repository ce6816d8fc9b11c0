"""The tables of addresses with which ``replayssm_materialize`` reaches every Mamba-2 layer of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm import mamba
from replayssm.cache.mamba2 import Mamba2Buffers, Mamba2Layer


class _Tables(NamedTuple):
    """Addresses and slot strides of a group's layers, in the order of the op's arguments; 0 where there is none."""

    state_ptrs: Tensor
    state_slot_strides: Tensor
    x_cache_ptrs: Tensor
    x_cache_slot_strides: Tensor
    B_cache_ptrs: Tensor
    B_cache_slot_strides: Tensor
    dt_cache_ptrs: Tensor
    dt_cache_slot_strides: Tensor
    A_ptrs: Tensor
    state_scale_ptrs: Tensor
    state_scale_slot_strides: Tensor


class Mamba2Tables:
    """Calls ``replayssm_materialize`` for all Mamba-2 layers of a pool, once per group of layers of equal sizes.

    Args:
        layers: sizes of every layer.
        buffers: their tensors, which must stay where they are.
        window: the pool's window.
        ring_len: rows of the replay ring.
    """

    def __init__(
        self, layers: Sequence[Mamba2Layer], buffers: Sequence[Mamba2Buffers], window: int, ring_len: int
    ) -> None:
        self._layers, self._buffers = layers, buffers
        self._window, self._ring_len = window, ring_len
        groups: dict[tuple[int, int, int, int], list[int]] = {}
        for index, layer in enumerate(layers):
            groups.setdefault((layer.nheads, layer.headdim, layer.dstate, layer.ngroups), []).append(index)
        self._groups = list(groups.values())
        self._tables = [self._table(group) for group in self._groups]

    def _table(self, group: list[int]) -> _Tables:
        tables = {"A_ptrs": self._int64([])}  # filled in by every call
        for name in ("state", "x_cache", "B_cache", "dt_cache", "state_scale"):
            tensors = [getattr(self._buffers[index], name) for index in group]
            addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
            strides = [0 if tensor is None else tensor.stride(0) for tensor in tensors]
            tables[f"{name}_ptrs"] = self._int64(addresses)
            tables[f"{name}_slot_strides"] = self._int64(strides)
        return _Tables(**tables)

    def _int64(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._buffers[0].state.device)

    def write_states(
        self, src: Tensor, dst: Tensor, ring_start: Tensor, prefix_len: Tensor, A: Sequence[Tensor]
    ) -> None:
        """Replay ``prefix_len`` ring rows onto the checkpoints of ``src`` and store the results in ``dst``.

        Args:
            src: int64 ``[n]``.
            dst: int64 ``[n]``.
            ring_start: row of the oldest live token, ``[n]``.
            prefix_len: live rows to apply, ``[n]``.
            A: decay rates of every layer, as the op takes them.
        """
        every = torch.arange(src.numel(), dtype=torch.int32, device=self._buffers[0].state.device)
        for group, table in zip(self._groups, self._tables, strict=True):
            layer, buffers = self._layers[group[0]], self._buffers[group[0]]
            decays = [A[index] for index in group]
            mamba.replayssm_materialize(
                *table._replace(A_ptrs=self._int64([decay.data_ptr() for decay in decays])),
                src.to(torch.int32).expand(len(group), -1).contiguous(),
                dst.to(torch.int32).expand(len(group), -1).contiguous(),
                ring_start.to(torch.int32),
                prefix_len.to(torch.int32),
                every,
                state_dtype=buffers.state.dtype,
                input_dtype=buffers.x_cache.dtype,
                matrixA_dtype=decays[0].dtype,
                dim=layer.headdim,
                dstate=layer.dstate,
                num_heads=layer.nheads,
                heads_per_group=layer.nheads // layer.ngroups,
                max_window=self._window,
                ring_buffer_len=self._ring_len,
                dependency_inputs=[*self._inputs(group), *decays],
                dependency_outputs=self._outputs(group),
            )

    def _inputs(self, group: list[int]) -> list[Tensor]:
        names = ("x_cache", "B_cache", "dt_cache")
        return [getattr(self._buffers[index], name) for index in group for name in names]

    def _outputs(self, group: list[int]) -> list[Tensor]:
        tensors = [getattr(self._buffers[index], name) for index in group for name in ("state", "state_scale")]
        return [tensor for tensor in tensors if tensor is not None]
