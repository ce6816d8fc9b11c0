"""Which implementation of an op family runs on which device."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import torch

from replayssm.checks import checked_mode

# Device type -> module inside the family's folder. A device that is not listed is refused: nothing falls back silently.
IMPLEMENTATIONS = {"cpu": "cpu", "cuda": "kernels"}
_NOTHING = nullcontext()


@cache
def _load(family: str, module: str) -> ModuleType:
    return importlib.import_module(f"replayssm.{family}.{module}")


@cache
def supported_devices(family: str) -> tuple[str, ...]:
    """Device types for which the family's folder holds an implementation, sorted; none of them is loaded.

    Args:
        family: folder name of the op family.

    Example:
        >>> "cpu" in supported_devices("mamba")
        True
    """
    present = {d for d, module in IMPLEMENTATIONS.items() if importlib.util.find_spec(f"replayssm.{family}.{module}")}
    return tuple(sorted(present))


def implementation(family: str, device: torch.device) -> ModuleType:
    """Return the module of ``family`` that computes on ``device``.

    Args:
        family: folder name of the op family, for example ``"mamba"``.
        device: device of the tensors of the call.

    Raises:
        NotImplementedError: no implementation of the family exists for this kind of device.
    """
    if device.type not in supported_devices(family):
        supported = ", ".join(supported_devices(family))
        raise NotImplementedError(
            f"replayssm.{family}: tensors on device '{device}' are not supported yet; supported: {supported}"
        )
    return _load(family, IMPLEMENTATIONS[device.type])


def by_device(family: str, name: str, check: Callable[..., None] | None = None) -> Callable[..., None]:
    """A function that runs a family's implementation for the device of its first argument, a tensor.

    Args:
        family: folder name of the op family.
        name: of the function in the family's modules.
        check: reads values, with the same arguments, in the checked mode.
    """

    def run(*args: Any) -> None:
        device = args[0].device
        function = getattr(implementation(family, device), name)
        if check is not None and checked_mode():
            check(*args)
        with on_device(device):
            function(*args)

    return run


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a CUDA device the current one, to which kernels go, where it is not; do nothing elsewhere."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


@cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel may start before the one that it follows has ended: on NVIDIA GPUs from SM90 on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    from triton import knobs  # which only devices need

    return not knobs.runtime.interpret and torch.cuda.get_device_capability(device) >= (9, 0)
