"""Holding an installed mamba_ssm to the one order of sums that decode can reproduce."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

_MODULE = "mamba_ssm.ops.triton.ssd_chunk_state"
_KERNEL, _BLOCK = "_chunk_cumsum_fwd_kernel", "BLOCK_SIZE_H"
_HEADS, _WARPS = 8, 4
_CHECKED_CHUNKS = (16, 32, 64, 128, 256)


def pin_mamba_ssm() -> None:
    """Restrict mamba_ssm's chunk scan in this process to sums of dt in the order that ``replayssm.ssd`` keeps.

    mamba_ssm measures at run time which tile its kernels take. Of its five forward kernels only the cumulative sum
    gives other bits with another tile (``docs/numerics.md`` §5): with fewer than 8 heads, and for chunks below 64 with
    more. So a trainer that wants its forward pass, and decode with replayssm, to have the same bits in every process
    calls this once, before the first scan. With a CUDA device present, sums of chunks of all sizes are then computed by
    both and compared.

    Raises:
        ImportError: mamba_ssm, or its Triton kernels, cannot be imported.
        RuntimeError: this version of mamba_ssm is built differently, or its sums differ all the same.

    Example:
        >>> try:
        ...     pin_mamba_ssm()
        ... except ImportError as error:
        ...     print(str(error)[:49])
        pin_mamba_ssm: mamba_ssm.ops.triton.ssd_chunk_sta
    """
    try:
        module = importlib.import_module(_MODULE)
    except ImportError as error:
        raise ImportError(f"pin_mamba_ssm: {_MODULE} cannot be imported ({error}); install mamba_ssm first") from error
    kernel: Any = getattr(module, _KERNEL, None)
    configs = getattr(kernel, "configs", None)
    if not configs or not all(_BLOCK in getattr(config, "kwargs", {}) for config in configs):
        raise RuntimeError(
            f"pin_mamba_ssm: expected {_MODULE}.{_KERNEL} with autotuned configs of {_BLOCK}, got {kernel!r}; this "
            "version of mamba_ssm is not known"
        )
    kept = [config for config in configs if config.kwargs[_BLOCK] == _HEADS and config.num_warps == _WARPS]
    if not kept:
        found = [(config.kwargs[_BLOCK], config.num_warps) for config in configs]
        raise RuntimeError(
            f"pin_mamba_ssm: expected a config of {_KERNEL} with {_BLOCK} = {_HEADS} and {_WARPS} warps, got {found}"
        )
    kernel.configs = kept
    getattr(kernel, "cache", {}).clear()  # choices of earlier calls
    if torch.cuda.is_available():
        _verify(module)


def _verify(module: ModuleType) -> None:
    """Raise RuntimeError unless both compute the same sums on this device."""
    for chunk_size in _CHECKED_CHUNKS:
        generator = torch.Generator("cuda").manual_seed(chunk_size)
        dt = torch.randn(1, 3 * chunk_size - 5, 11, generator=generator, device="cuda")
        A = -torch.rand(11, generator=generator, device="cuda")
        theirs = module._chunk_cumsum_fwd(dt, A, chunk_size, dt_bias=A, dt_softplus=True)
        for name, ours, other in zip(("dt", "sums"), _ours(dt[0], A, chunk_size), reversed(theirs), strict=True):
            if not torch.equal(ours, other[0].transpose(0, 1)):
                raise RuntimeError(
                    f"pin_mamba_ssm: mamba_ssm's {name} of chunks of {chunk_size} differ from replayssm's on "
                    f"{torch.cuda.get_device_name()}"
                )


def _ours(dt: torch.Tensor, A: torch.Tensor, chunk_size: int) -> Any:
    from replayssm.ssd.kernels.launch import launch_sums

    numbers = launch_sums(dt, A, A, chunk_size, True, 0.0, float("inf"), (None, None, None, None), None, 1)
    return numbers[..., 1], numbers[..., 0]
