"""Checks of what metadata tells about the arguments of ``chunk_scan``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from replayssm.checks import (
    FLOATS,
    INDICES,
    check_device,
    check_dt_options,
    check_dtype,
    check_integer,
    check_packed,
    check_separate,
    check_shape,
    check_tensor,
    once_per_layout,
)

SMALLEST_CHUNK, LARGEST_CHUNK = 16, 256
_STATE = "sequences nheads headdim dstate"
_SHAPES = {
    "x": "tokens nheads headdim",
    "dt": "tokens nheads",
    "A": "nheads",
    "B": "tokens ngroups dstate",
    "C": "tokens ngroups dstate",
    "z": "tokens nheads headdim",
    "dt_bias": "nheads",
    "out": "tokens nheads headdim",
    "x_buffer": "slots buffer_rows nheads headdim",
    "dt_buffer": "slots buffer_rows nheads",
    "B_buffer": "slots buffer_rows ngroups dstate",
    "num_buffered": "slots",
    "ring_start": "slots",
    "batch_indices": "sequences",
    "initial_states": _STATE,
    "final_states": _STATE,
    "boundary_states": _STATE,
}
_REQUIRED = ("x", "dt", "A", "B", "C")
_BUFFERS = ("x_buffer", "dt_buffer", "B_buffer", "num_buffered")
_STATES = ("initial_states", "final_states", "boundary_states", "chunk_states")
_WRITTEN = ("out", "final_states", "boundary_states", "chunk_states")
# Arguments in the order in which check_chunk_scan takes them.
ORDER = (*_SHAPES, "chunk_states", "cu_seqlens", "D")


def check_chunk_size(chunk_size: object) -> None:
    """Raise TypeError or ValueError unless the chunk size is a whole number in 16..256."""
    check_integer("chunk_size", chunk_size)
    if not SMALLEST_CHUNK <= chunk_size <= LARGEST_CHUNK:  # type: ignore[operator]
        raise ValueError(f"chunk_size: expected {SMALLEST_CHUNK}..{LARGEST_CHUNK}, got {chunk_size}")


def check_skip(D: Tensor, sizes: dict[str, int]) -> None:
    """Raise unless D is one number per head or per element."""
    check_tensor("D", D)
    check_shape("D", D, "nheads headdim" if D.dim() == 2 else "nheads", sizes)
    check_dtype("D", D, *FLOATS)


def check_groups(sizes: dict[str, int]) -> None:
    """Raise ValueError unless the groups divide the heads."""
    if sizes["nheads"] % max(sizes["ngroups"], 1):
        raise ValueError(
            f"B: expected ngroups to divide nheads={sizes['nheads']}, got ngroups={sizes['ngroups']} from B's axis 1"
        )


@once_per_layout
def check_chunk_scan(*arguments: Any) -> None:
    """Check everything about a call that metadata tells.

    Args:
        arguments: the call's tensors in the order of ``ORDER``, then chunk_size, dt_softplus and dt_limit.

    Raises:
        TypeError: a tensor is missing or no tensor, an option has the wrong type.
        ValueError: a shape, dtype, device, stride or number does not fit.
    """
    tensors: dict[str, Tensor | None] = dict(zip(ORDER, arguments, strict=False))
    chunk_size, dt_softplus, dt_limit = arguments[len(ORDER) :]
    check_chunk_size(chunk_size)
    check_dt_options(dt_softplus, dt_limit)
    sizes = {"chunk_size": chunk_size}
    x, cu_seqlens = tensors["x"], tensors["cu_seqlens"]
    check_tensor("x", x)
    assert x is not None
    if cu_seqlens is None:
        sizes["sequences"] = 1
    else:
        check_shape("cu_seqlens", cu_seqlens, "sequences+1", sizes)
        check_dtype("cu_seqlens", cu_seqlens, torch.int32)
        sizes["sequences"] = sizes["sequences+1"] - 1
        if sizes["sequences"] < 0:
            raise ValueError("cu_seqlens: expected sequences + 1 >= 1 elements, got 0")
    for name, spec in _SHAPES.items():
        tensor = tensors[name]
        if tensor is not None or name in _REQUIRED:
            check_tensor(name, tensor)
            assert tensor is not None
            check_shape(name, tensor, spec, sizes)
    check_groups(sizes)
    _check_rest(tensors, x, sizes)
    _check_buffers(tensors, chunk_size)


def _check_buffers(tensors: dict[str, Tensor | None], chunk_size: int) -> None:
    given = [name for name in (*_BUFFERS, "ring_start") if tensors[name] is not None]
    if not given:
        return
    for name in (*_BUFFERS, "batch_indices"):
        if tensors[name] is None:
            raise ValueError(f"{name}: expected a tensor with {given[0]}, got None")
    dt, buffer = tensors["dt"], tensors["dt_buffer"]
    assert dt is not None and buffer is not None
    if buffer.shape[1] < chunk_size:
        raise ValueError(f"x_buffer: expected at least chunk_size={chunk_size} rows a slot, got {buffer.shape[1]}")
    if dt.dtype != buffer.dtype:
        raise ValueError(f"dt: expected dt_buffer's dtype {buffer.dtype}, got {dt.dtype}")


def _check_rest(tensors: dict[str, Tensor | None], x: Tensor, sizes: dict[str, int]) -> None:
    """Dtypes, devices and layouts."""
    D, chunk_states = tensors["D"], tensors["chunk_states"]
    if D is not None:
        check_skip(D, sizes)
    if chunk_states is not None:
        rows = sizes["tokens"] // sizes["chunk_size"] + sizes["sequences"]
        check_shape("chunk_states", chunk_states, "boundaries nheads headdim dstate", {**sizes, "boundaries": rows})
    allowed = {
        **dict.fromkeys(("x", "dt", "dt_buffer", "A", "dt_bias"), FLOATS),
        **dict.fromkeys(("B", "C", "z", "out", "x_buffer", "B_buffer"), (x.dtype,)),
        **dict.fromkeys(_STATES, (torch.float32,)),
        "num_buffered": (torch.int32,),
        "ring_start": (torch.int32,),
        "batch_indices": INDICES,
    }
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        check_device(name, tensor, x.device)
        if name in allowed:
            check_dtype(name, tensor, *allowed[name])
        if name in _WRITTEN:
            check_packed(name, tensor, 1)
            check_separate(name, tensor, 1)
