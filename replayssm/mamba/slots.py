"""Views of one slot's memory: out of a pool's tensors, or out of tables of host addresses."""

from __future__ import annotations

import ctypes
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.mamba.requests import Copy
from replayssm.rounding import SCALED_DTYPES, encode, noise_bits


class Slot(NamedTuple):
    """One slot of one layer.

    Attributes:
        state: ``[nheads, headdim, dstate]``.
        scale: fp32 ``[nheads, headdim]`` for the 8-bit types, else None.
        x: ring of x, ``[nheads, ring_len, headdim]``.
        B: ring of B, ``[ngroups, ring_len, dstate]``.
        dt: ring of the processed dt, fp32 ``[nheads, ring_len]``.
    """

    state: Tensor
    scale: Tensor | None
    x: Tensor
    B: Tensor
    dt: Tensor


class Noise(NamedTuple):
    """Source of the random bits of stochastic rounding: a seed and the rounds of the generator."""

    seed: int
    rounds: int


def store(slot: Slot, index: int, values: Tensor, noise: Noise | None) -> tuple[Tensor, Tensor | None]:
    """Round a state and write it, with its scale, into a slot.

    Args:
        slot: ``state`` and ``scale`` are written in place.
        index: the slot's number, which picks the random bits.
        values: fp32 ``[nheads, headdim, dstate]``.
        noise: None rounds to nearest; fp32 states are never rounded.

    Returns:
        (codes, scale) of rounding to nearest, whichever way the stored state was rounded: what outputs read.
    """
    dtype = slot.state.dtype
    codes, scale = encode(values, dtype)
    stored = codes
    if noise is not None and dtype != torch.float32:
        nheads, headdim, dstate = values.shape
        stored, _ = encode(values, dtype, noise_bits(noise.seed, index, (nheads, headdim, dstate), noise.rounds))
    slot.state.copy_(stored)
    if slot.scale is not None and scale is not None:
        slot.scale.copy_(scale)
    return codes, scale


class Layout(NamedTuple):
    """Types and sizes of the memory behind the tables; a name means what it means in ``replayssm_materialize``."""

    state_dtype: torch.dtype
    input_dtype: torch.dtype
    matrixA_dtype: torch.dtype
    dim: int
    dstate: int
    num_heads: int
    heads_per_group: int
    ring_buffer_len: int

    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of one slot's part, by the prefix of the table's name."""
        H, R = self.num_heads, self.ring_buffer_len
        return {
            "state": ((H, self.dim, self.dstate), self.state_dtype),
            "x_cache": ((H, R, self.dim), self.input_dtype),
            "B_cache": ((H // self.heads_per_group, R, self.dstate), self.input_dtype),
            "dt_cache": ((H, R), torch.float32),
            "state_scale": ((H, self.dim), torch.float32),
        }


def view_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A packed tensor over memory that the caller owns and keeps alive.

    Args:
        address: host address of the first element.
        shape: sizes of the axes.
        dtype: type of the elements.

    Returns:
        The tensor; writing into it writes the memory.

    Example:
        >>> import torch
        >>> memory = torch.tensor([1.0, 2.0, 3.0])
        >>> view_at(memory.data_ptr() + 4, (2,), torch.float32).tolist()
        [2.0, 3.0]
    """
    buffer = (ctypes.c_char * (prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)


class PointerTables:
    """The tables of a ``replayssm_materialize`` call, read back."""

    def __init__(self, layout: Layout, pointers: dict[str, Tensor], strides: dict[str, Tensor]) -> None:
        self._layout = layout
        self._pointers = {name: table.tolist() for name, table in pointers.items()}
        self._strides = {name: table.tolist() for name, table in strides.items()}
        self._fields = layout.fields()
        self._scaled = layout.state_dtype in SCALED_DTYPES

    def _address(self, name: str, layer: int, slot: int) -> int:
        itemsize = self._fields[name][1].itemsize
        return self._pointers[name][layer] + slot * self._strides[name][layer] * itemsize

    def slot(self, layer: int, slot: int) -> Slot:
        """Views of one slot of one layer."""
        views = {
            name: view_at(self._address(name, layer, slot), shape, dtype)
            for name, (shape, dtype) in self._fields.items()
            if name != "state_scale" or self._scaled
        }
        return Slot(views["state"], views.get("state_scale"), views["x_cache"], views["B_cache"], views["dt_cache"])

    def A(self, layer: int) -> Tensor:
        """``[num_heads]`` of one layer."""
        return view_at(self._pointers["A"][layer], (self._layout.num_heads,), self._layout.matrixA_dtype)

    def check(self, copies: list[Copy], inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Raise ValueError unless everything that the copies touch lies in the memory of the given tensors.

        Args:
            copies: what will be done.
            inputs: tensors that may be read; empty means that reads are not checked.
            outputs: tensors that may be read and written; empty means that writes are not checked.
        """
        readable = [*_ranges(inputs), *_ranges(outputs)] if inputs else None
        writable = _ranges(outputs) if outputs else None
        rings = ("x_cache", "B_cache", "dt_cache")
        stored = ("state", "state_scale") if self._scaled else ("state",)
        either = "dependency_inputs or dependency_outputs"
        for copy in copies:
            for name in (*stored, *(rings if copy.num_rows else ())):
                self._check(name, copy.layer, copy.src, readable, either)
            for name in stored:
                self._check(name, copy.layer, copy.dst, writable, "dependency_outputs")
            if copy.num_rows:
                address, heads, dtype = (
                    self._pointers["A"][copy.layer],
                    self._layout.num_heads,
                    self._layout.matrixA_dtype,
                )
                _check_range("A", copy.layer, address, heads, dtype, readable, either)

    def _check(self, name: str, layer: int, slot: int, allowed: list[tuple[int, int]] | None, where: str) -> None:
        shape, dtype = self._fields[name]
        if not self._pointers[name][layer]:
            raise ValueError(f"{name}_ptrs: expected an address for layer {layer}, got 0")
        _check_range(name, layer, self._address(name, layer, slot), prod(shape), dtype, allowed, where)


def _ranges(tensors: list[Tensor]) -> list[tuple[int, int]]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]


def _check_range(
    name: str,
    layer: int,
    address: int,
    count: int,
    dtype: torch.dtype,
    allowed: list[tuple[int, int]] | None,
    where: str,
) -> None:
    if address <= 0:
        raise ValueError(f"{name}_ptrs: expected an address for layer {layer}, got {address}")
    if address % dtype.itemsize:
        raise ValueError(f"{name}_ptrs: expected an address where {dtype} may lie for layer {layer}, got {address:#x}")
    num_bytes = count * dtype.itemsize
    if allowed is not None and not any(low <= address and address + num_bytes <= high for low, high in allowed):
        raise ValueError(
            f"{name}_ptrs: expected memory of a tensor in {where}, got {num_bytes} bytes at {address:#x} for layer "
            f"{layer}"
        )
