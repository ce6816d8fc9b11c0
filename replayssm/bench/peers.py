"""What the families share about other libraries: whether they are here, how they are timed, where numbers are from."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from importlib.util import find_spec

import torch

from replayssm.bench.timing import Timer

__all__ = ["ELSEWHERE", "THIS_RUN", "installed", "on_an_h200", "timed"]

THIS_RUN, ELSEWHERE = "this run", "another run on an H200"


def installed(package: str, module: str) -> str | None:
    """The installed version of a package with that module, else None; nothing is imported.

    Example:
        >>> installed("no-such-package", "no_such_module")
    """
    try:
        return metadata.version(package) if find_spec(module.partition(".")[0]) else None
    except metadata.PackageNotFoundError:
        return None


def on_an_h200() -> bool:
    """Whether numbers that were taken on an H200 may stand beside those of this device."""
    return "H200" in torch.cuda.get_device_name()


def timed(
    timer: Timer, library: str, makers: Sequence[Callable[[], Callable[[], object]]], repeats: int = 1
) -> float | None:
    """Time another library.

    Args:
        timer: on the GPU.
        library: its name, for the warning.
        makers: make one call each, on buffers that rotate.
        repeats: how often they do so within what is timed.

    Returns:
        Microseconds of a call; None, with a warning, if it refuses these shapes or does not compile here.
    """
    try:
        calls = [make() for make in makers]
        for call in calls:
            call()
        return timer.micros({"us": calls * repeats})["us"]
    except (ImportError, AttributeError, RuntimeError, TypeError, ValueError, AssertionError, OSError) as error:
        warnings.warn(f"{library} was not timed: {str(error)[:200]}", stacklevel=2)
        return None
