"""What the records of all kinds of recurrent layers have in common: checks of their sizes and dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm.batch_invariant_decode import BatchInvariantDecodeBuffers
from replayssm.checks import FLOATS, check_flag, check_range

# Slots and places inside of one are int32 in kernels.
MAX_SIZE = (1 << 31) - 1


def check_sizes(layer: Any, heads: str, groups: str) -> None:
    """Check a layer's fields, int or bool, and that one number of heads divides another.

    Args:
        layer: dataclass with a ``conv_width``.
        heads: field that must be a multiple of another one.
        groups: that other one.

    Raises:
        TypeError: a field of another type.
        ValueError: a size out of range.
    """
    for each in fields(layer):
        value = getattr(layer, each.name)
        if each.type == "bool":
            check_flag(each.name, value)
        else:
            check_range(each.name, value, 1, MAX_SIZE)
    if getattr(layer, heads) % getattr(layer, groups):
        expected = f"a multiple of {groups}={getattr(layer, groups)}"
        raise ValueError(f"{heads}: expected {expected}, got {getattr(layer, heads)}")
    if not 2 <= layer.conv_width <= 5:
        raise ValueError(f"conv_width: expected 2 <= conv_width <= 5, got {layer.conv_width}")


def check_dtypes(
    kind: str, state_dtype: torch.dtype, activation_dtype: torch.dtype, state_dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raise ValueError unless both dtypes of a pool can be stored for this kind of layer."""
    for name, dtype, allowed in (
        ("state_dtype", state_dtype, state_dtypes),
        ("activation_dtype", activation_dtype, FLOATS),
    ):
        if dtype not in allowed:
            names = " or ".join(str(each) for each in allowed)
            raise ValueError(f"{name}: expected {names} for {kind} layers, got {dtype}")


class Held(NamedTuple):
    """A tensor of a layer's buffers.

    Attributes:
        name: of its field, that of records inside behind theirs: ``records.x``.
        part: of ``SlotBytes`` it counts for.
        tensor: first axis slots.
        of_slot: whether its entries belong to slots. Others are memory of a call, one entry for each of its lanes.
    """

    name: str
    part: str
    tensor: Tensor
    of_slot: bool


def tensors_of(buffers: Any) -> Iterator[Held]:
    """Every tensor of a layer's buffers, those of records inside included."""
    for each in fields(buffers):
        value, part = getattr(buffers, each.name), each.metadata["part"]
        if isinstance(value, Tensor):
            yield Held(each.name, part, value, True)
        elif isinstance(value, BatchInvariantDecodeBuffers):
            kept = value.per_slot()
            for inner in fields(value):
                tensor = getattr(value, inner.name)
                if isinstance(tensor, Tensor):
                    yield Held(f"{each.name}.{inner.name}", part, tensor, inner.name in kept)


def as_plain(tensor: Tensor) -> Tensor:
    """The same bytes in a type that can be indexed: 8-bit floats are seen as integers."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
