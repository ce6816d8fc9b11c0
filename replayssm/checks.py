"""Argument checks with one message style: the argument's name, what was expected with the sizes bound, what came.

Every check looks at metadata only (type, shape, dtype, device, strides), so it costs no device synchronisation. Values
are looked at in the checked mode alone (``REPLAYSSM_CHECK=1``), which reads them back and is meant for debugging.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
_MOST_LAYOUTS = 1024
# What activations, parameters and states may be stored in, and slot numbers.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INDICES = (torch.int32, torch.int64)


def once_per_layout(check: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a check of metadata so that a call is looked up when one of the same layout has passed.

    A decoding loop repeats a few layouts, and checking one costs as much as a small step. A layout is the shape,
    strides, dtype and device of every tensor, and every other argument by value.

    Args:
        check: takes positional arguments, looks at no tensor's values and raises when something is wrong.
    """
    passed: dict[tuple, Result] = {}

    @wraps(check)
    def checked(*arguments: object) -> Result:
        if torch.compiler.is_compiling():
            return check(*arguments)
        # The type of what is no tensor belongs to it, because 1 == 1.0 == True.
        layout = tuple(
            [(a.shape, a.stride(), a.dtype, a.device) if isinstance(a, Tensor) else (type(a), a) for a in arguments]
        )
        try:
            if layout in passed:
                return passed[layout]
        except TypeError:  # not hashable: a list where a tensor belongs, symbolic sizes
            return check(*arguments)
        result = check(*arguments)
        if len(passed) >= _MOST_LAYOUTS:
            passed.clear()
        passed[layout] = result
        return result

    return checked


def checked_mode() -> bool:
    """Whether ``REPLAYSSM_CHECK=1`` asks for checks that read tensor values back to the host."""
    return os.environ.get("REPLAYSSM_CHECK") == "1"


@cache
def _axes(spec: str) -> tuple[str | int, ...]:
    return tuple(int(axis) if axis.isdigit() else axis for axis in spec.split())


def _describe(spec: str, sizes: dict[str, int]) -> str:
    parts = [str(a) if isinstance(a, int) else f"{a}={sizes[a]}" if a in sizes else a for a in _axes(spec)]
    return f"[{', '.join(parts)}]"


def check_tensor(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a tensor that has strides (no sparse one)."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{name}: expected a torch.Tensor with strides, got one of layout {value.layout}")


def check_shape(name: str, tensor: Tensor, spec: str, sizes: dict[str, int]) -> None:
    """Compare a shape with ``spec`` and bind the axis names that ``sizes`` does not hold yet.

    Args:
        name: the argument's name, first word of the message.
        tensor: the argument.
        spec: axis names or numbers separated by blanks, for example ``"slots nheads headdim dstate"``.
        sizes: sizes bound so far; new names are added, but only when the whole shape fits.

    Raises:
        ValueError: the rank or an axis differs.
    """
    check_tensor(name, tensor)
    axes, shape = _axes(spec), tensor.shape
    fits = len(axes) == len(shape) and all(
        size == (axis if isinstance(axis, int) else sizes.get(axis, size))
        for axis, size in zip(axes, shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name}: expected shape {_describe(spec, sizes)}, got {list(shape)}")
    for axis, size in zip(axes, shape, strict=True):
        if isinstance(axis, str):
            sizes[axis] = size


def check_dtype(name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    """Raise ValueError unless the dtype is one of ``allowed``."""
    if tensor.dtype not in allowed:
        expected = " or ".join(str(dtype) for dtype in allowed)
        raise ValueError(f"{name}: expected dtype {expected}, got {tensor.dtype}")


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """Raise ValueError unless the tensor is on ``device``."""
    if tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, got {tensor.device}")


def check_packed(name: str, tensor: Tensor, first_axis: int) -> None:
    """Raise ValueError unless the axes from ``first_axis`` on are packed; the axes before it may have any stride.

    Strides of axes of size 1 are never used and hence not looked at.
    """
    expected = 1
    for axis in range(tensor.dim() - 1, first_axis - 1, -1):
        if tensor.shape[axis] != 1 and tensor.stride(axis) != expected:
            raise ValueError(
                f"{name}: expected axes {first_axis}..{tensor.dim() - 1} of shape {list(tensor.shape)} to be packed "
                f"(stride {expected} at axis {axis}), got strides {list(tensor.stride())}"
            )
        expected *= tensor.shape[axis]


def check_separate(name: str, tensor: Tensor, num_axes: int) -> None:
    """Raise ValueError when two elements of a tensor that is written share memory.

    Args:
        name: the argument's name, first word of the message.
        tensor: packed from axis ``num_axes`` on.
        num_axes: leading axes, whose strides are free: one or two.
    """
    extent = math.prod(tensor.shape[num_axes:])
    outer = [axis for axis in range(num_axes) if tensor.shape[axis] > 1]
    if len(outer) == 2 and tensor.stride(outer[0]) > tensor.stride(outer[1]):  # not sorted: sizes may be symbolic
        outer.reverse()
    for axis in outer:
        if tensor.stride(axis) < extent:
            raise ValueError(
                f"{name}: expected elements with memory of their own, since they are written (shape "
                f"{list(tensor.shape)}), got strides {list(tensor.stride())}"
            )
        extent = tensor.stride(axis) * tensor.shape[axis]


def check_integer(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a whole number, in a compiled graph perhaps a symbolic one."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: expected an int, got {value!r} of type {type(value).__name__}")


def check_flag(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {value!r} of type {type(value).__name__}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of the strings that the option knows."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a string, got {value!r}")
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def check_number(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a number, in a compiled graph perhaps a symbolic one."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name}: expected a number, got {value!r} of type {type(value).__name__}")


def check_sequence(name: str, value: object, what: str) -> None:
    """Raise TypeError unless ``value`` is a list or tuple, or something like one, but no string."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise TypeError(f"{name}: expected a list of {what}, got {type(value).__name__}")


def check_dt_options(dt_softplus: object, dt_limit: Any) -> None:
    """Raise TypeError or ValueError unless the options of Mamba-2's time steps fit."""
    check_flag("dt_softplus", dt_softplus)
    pair = isinstance(dt_limit, tuple) and len(dt_limit) == 2
    if not pair or not all(isinstance(bound, (int, float)) for bound in dt_limit):
        raise TypeError(f"dt_limit: expected a pair of numbers, got {dt_limit!r}")
    if not 0.0 <= dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"dt_limit: expected 0 <= lower <= upper, got {dt_limit}")


def as_device(name: str, value: object) -> torch.device:
    """The device that an argument names, of several alike the current one.

    Raises:
        TypeError: neither a device nor a name.
        ValueError: a name of no device, or a device that this machine does not have.
    """
    if not isinstance(value, (torch.device, str)):
        raise TypeError(f"{name}: expected a torch.device or its name, got {value!r} of type {type(value).__name__}")
    try:
        device = torch.device(value)
    except RuntimeError as error:
        raise ValueError(f"{name}: expected a device of PyTorch, got {value!r}") from error
    if device.type != "cuda":
        return device
    if (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"{name}: expected a device of this machine, which has {torch.cuda.device_count()} for CUDA, got {value!r}"
        )
    # Another one may be current later.
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def check_range(name: str, value: int, low: int, high: int, why: str = "") -> None:
    """Raise TypeError unless ``value`` is a whole number and ValueError unless ``low <= value <= high``.

    ``sys.maxsize`` as the upper bound is none worth telling.
    """
    check_integer(name, value)
    if not low <= value <= high:
        bounds = f"{name} >= {low}" if high == sys.maxsize and value < low else f"{low} <= {name} <= {high}"
        raise ValueError(f"{name}: expected {bounds}{f' ({why})' if why else ''}, got {value}")


@contextmanager
def renamed(argument: str, to: str) -> Iterator[None]:
    """Let errors about an argument of an inner function name the caller's own."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        if str(error).startswith(f"{argument}: "):
            error.args = (f"{to}: {str(error).removeprefix(f'{argument}: ')}",)
        raise


def check_values(name: str, tensor: Tensor, low: int, high: int, why: str = "") -> None:
    """Raise ValueError unless every element lies in ``low..high``. Reads values back: for the checked mode only."""
    bad = ((tensor < low) | (tensor > high)).nonzero()
    if bad.numel():
        where = tuple(bad[0].tolist())
        value = tensor[where].item()
        raise ValueError(
            f"{name}: expected values in {low}..{high}{f' ({why})' if why else ''}, got {value} at {list(where)}"
        )


def check_finite(name: str, tensor: Tensor, where: str) -> None:
    """Raise ValueError when an element is infinite or NaN. Reads values back: for the checked mode only."""
    bad = (~tensor.isfinite()).nonzero()
    if bad.shape[0]:
        position = bad[0].tolist()
        value = tensor[tuple(position)].item()
        raise ValueError(f"{name}: expected finite values (REPLAYSSM_CHECK=1), got {value} at {position}{where}")
