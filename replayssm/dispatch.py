"""Which implementation of an op family runs on which device."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch

# Device type -> module inside the family's folder. A device that is not listed is refused: nothing falls back silently.
IMPLEMENTATIONS = {"cpu": "cpu", "cuda": "kernels"}


@cache
def _load(family: str, module: str) -> ModuleType:
    return importlib.import_module(f"replayssm.{family}.{module}")


def implementation(family: str, device: torch.device) -> ModuleType:
    """Return the module of ``family`` that computes on ``device``.

    Args:
        family: folder name of the op family, for example ``"mamba"``.
        device: device of the tensors of the call.

    Raises:
        NotImplementedError: no implementation of the family exists for this kind of device.
    """
    module = IMPLEMENTATIONS.get(device.type)
    if module is None:
        supported = ", ".join(sorted(IMPLEMENTATIONS))
        raise NotImplementedError(
            f"replayssm.{family}: tensors on device '{device}' are not supported yet; supported: {supported}"
        )
    return _load(family, module)
