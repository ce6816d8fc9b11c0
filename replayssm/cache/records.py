"""What the records of all kinds of recurrent layers have in common: checks of their sizes and dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from replayssm.checks import check_flag, check_range

ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
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
        ("activation_dtype", activation_dtype, ACTIVATION_DTYPES),
    ):
        if dtype not in allowed:
            names = " or ".join(str(each) for each in allowed)
            raise ValueError(f"{name}: expected {names} for {kind} layers, got {dtype}")


def tensors_of(buffers: Any, part: str = "") -> Iterator[tuple[str, str, Tensor]]:
    """Name, part of ``SlotBytes`` and tensor of every field of a layer's buffers, those of records inside included."""
    for each in fields(buffers):
        value = getattr(buffers, each.name)
        belongs = each.metadata.get("part", part)
        if isinstance(value, Tensor):
            yield each.name, belongs, value
        elif is_dataclass(value):
            yield from tensors_of(value, belongs)


def as_plain(tensor: Tensor) -> Tensor:
    """The same bytes in a type that can be indexed: 8-bit floats are seen as integers."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
