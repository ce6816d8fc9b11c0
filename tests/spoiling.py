"""Spoiling a call: one argument wrong, and what is to be said about how the call ends."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm.cache import CapacityError
from replayssm.testing import as_bytes

# "A[1]: expected ...", "state_ptrs of layer 1: ...", "x and z: ...".
NAMES = re.compile(r"^[a-zA-Z_]\w*((, | and |\[\w+\]| of )[\w\[\]]*)*: ")


def spoiled(value):
    """Values in place of a right one; some of them may be right too."""
    yield from ("no", 1.5, [1.5], object())
    if isinstance(value, Tensor):
        yield from (None, 1, value.to("meta"), value.unsqueeze(0), value.to(torch.complex64), value.to_sparse())
        if value.dim():
            yield torch.cat([value, value], -1)
        if value.dim() > 1:
            yield torch.cat([value, value], 0)
            yield value.mT.contiguous().mT
        if not value.is_floating_point() and value.numel():
            yield value - 100
            yield value + 100
            yield value.double()
        else:
            yield value.int()
    elif isinstance(value, bool):
        yield from (1, None)
    elif isinstance(value, int):
        yield from (True, None, value - 100, value + (1 << 40), torch.tensor(value))
    elif isinstance(value, float):
        yield from (None, -1.0, float("nan"), True)
    elif isinstance(value, torch.dtype):
        yield from (None, torch.complex64, torch.int64, "float32")
    elif isinstance(value, (list, tuple)):
        yield from (None, value[:-1], [*value, None], [None] * len(value), 3)
    else:
        yield from (None, 3, True)


class Call(NamedTuple):
    """A function, its arguments by name, and the memory that it may write when nothing is wrong."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    memory: list[Tensor]

    def every(self):
        """All arguments, those that have their default too."""
        defaults = {name: each.default for name, each in inspect.signature(self.function).parameters.items()}
        return {**defaults, **self.arguments}


def described(value):
    return f"{value.dtype} {list(value.shape)} {value.device}" if isinstance(value, Tensor) else repr(value)


def complaint(call, argument, value):
    """What is wrong with how a call with a spoiled argument ends, None if nothing; "" if the value was right."""
    before = [as_bytes(tensor) for tensor in call.memory]
    try:
        call.function(**{**call.every(), argument: value})
    except Exception as error:
        if isinstance(error, CapacityError):
            return None
        # Megatron's types, of the seed.
        if not isinstance(error, (TypeError, ValueError, AssertionError, NotImplementedError)):
            return f"{type(error).__name__}: {error}"
        named = NAMES.match(str(error))
        words = re.findall(r"[a-zA-Z_]\w*", named[0]) if named else []
        if not {*words} & {*inspect.signature(call.function).parameters}:
            return f"{type(error).__name__}: {error}"
        if not all(torch.equal(as_bytes(t), old) for t, old in zip(call.memory, before, strict=True)):
            return f"something was written before {error}"
        return None
    return ""


def complaints(make: Callable[[], Call], argument: str) -> list[tuple[str, str | None]]:
    """``complaint`` about every wrong value of one argument, each in a call of its own."""
    found = []
    for number in range(len(list(spoiled(make().every()[argument])))):
        call = make()
        value = list(spoiled(call.every()[argument]))[number]
        found.append((described(value), complaint(call, argument, value)))
    return found
