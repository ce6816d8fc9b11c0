"""Checks of what metadata tells about the arguments: shapes, dtypes, devices, strides, numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from replayssm.checks import (
    FLOATS,
    INDICES,
    check_choice,
    check_device,
    check_dtype,
    check_flag,
    check_packed,
    check_range,
    check_separate,
    check_shape,
    check_tensor,
    once_per_layout,
)

MAX_TOKENS = 16
MAX_WINDOW = 64
MAX_DIM = 256
BACKENDS = ("auto", "simt", "tensor_core")

_VERIFY = {
    "initial_state": "slots HV V K",
    "q": "batch T H K",
    "k": "batch T H K",
    "v": "batch T HV V",
    "initial_state_indices": "batch",
    "A_log": "HV",
    "a": "batch T HV",
    "dt_bias": "HV",
    "b": "batch T HV",
    "output": "batch T HV V",
    "intermediate_states_buffer": "rows steps HV V K",
    "ssm_state_indices": "batch T",
    "output_state_indices": "batch",
    "replayssm_rawv": "slots HV T V",
    "replayssm_rawk": "slots H T K",
    "replayssm_g": "slots HV T",
    "replayssm_beta": "slots HV T",
}
_VERIFY_WINDOWS = ("replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta")
_RECORDED = {
    "checkpoint_state": "layers slots HV V K",
    "rawv_cache": "layers slots HV T V",
    "rawk_cache": "layers slots H T K",
    "g_cache": "layers slots HV T",
    "beta_cache": "layers slots HV T",
}
_LAZY = {
    "state": "slots HV V K",
    "v_cache": "slots HV ring_len V",
    "k_cache": "slots H ring_len K",
    "g_cache": "slots HV ring_len",
    "beta_cache": "slots HV ring_len",
    "ring_start": "slots",
    "num_live": "slots",
    "q": "batch T H K",
    "k": "batch T H K",
    "v": "batch T HV V",
    "a": "batch T HV",
    "b": "batch T HV",
    "A_log": "HV",
    "dt_bias": "HV",
    "output": "batch T HV V",
    "state_batch_indices": "batch",
}
_OPTIONAL = {
    "output", "intermediate_states_buffer", "ssm_state_indices", "output_state_indices", "state_batch_indices",
    *_VERIFY_WINDOWS,
}  # fmt: skip
# The first axis from which a tensor that is written must be packed; strides before it are free. Those of tensors that
# are only read are free everywhere.
_PACKED_FROM = {
    "initial_state": 1, "output": 2, "intermediate_states_buffer": 2, **dict.fromkeys(_VERIFY_WINDOWS, 1),
    "state": 1, "v_cache": 1, "k_cache": 1, "g_cache": 1, "beta_cache": 1,
}  # fmt: skip


@once_per_layout
def check_verify(*arguments: Any) -> None:
    """Check everything about a call of ``gated_delta_rule_mtp`` that metadata tells.

    Args:
        arguments: the call's tensors in the order of ``_VERIFY``, then whether states are updated, cache_replayssm,
            scale, use_qk_l2norm and backend.

    Raises:
        TypeError: a tensor is missing or no tensor, an option has the wrong type.
        ValueError: a shape, dtype, device, stride or number does not fit, or options contradict each other.
    """
    tensors = dict(zip(_VERIFY, arguments, strict=False))
    update, caches, scale, norm, backend = arguments[len(_VERIFY) :]
    buffer, scatter = tensors["intermediate_states_buffer"], tensors["ssm_state_indices"]
    for name, value in (("disable_state_update", update), ("cache_replayssm", caches), ("use_qk_l2norm", norm)):
        check_flag(name, value)
    _check_modes(tensors, update, caches)
    sizes = _check_tensors(tensors, _VERIFY)
    state, window = tensors["initial_state"], tensors["replayssm_rawv"]
    _check_dtypes(tensors, ("q",), FLOATS)
    _check_dtypes(tensors, ("k", "v"), (tensors["q"].dtype,))
    _check_dtypes(tensors, ("initial_state", "A_log", "a", "dt_bias", "b", "output", "replayssm_rawv"), FLOATS)
    _check_dtypes(tensors, ("intermediate_states_buffer",), (state.dtype,))
    _check_dtypes(tensors, ("initial_state_indices", "ssm_state_indices", "output_state_indices"), INDICES)
    if window is not None:
        _check_dtypes(tensors, ("replayssm_rawk",), (window.dtype,))
        _check_dtypes(tensors, ("replayssm_g", "replayssm_beta"), (torch.float32,))
    if buffer is not None and (sizes["rows"] < sizes["batch"] or sizes["steps"] < sizes["T"]):
        raise ValueError(
            f"intermediate_states_buffer: expected at least [batch={sizes['batch']}, T={sizes['T']}] states, got "
            f"{list(buffer.shape)}"
        )
    if scatter is not None and buffer is not None:
        raise ValueError("ssm_state_indices: expected None with intermediate_states_buffer, got a tensor")
    _check_sizes("q", sizes, MAX_TOKENS)
    _check_options(scale, backend)


def _check_modes(tensors: dict[str, Tensor | None], update: bool, caches: bool) -> None:
    for name in _VERIFY_WINDOWS:
        if (tensors[name] is not None) != caches:
            expected = "a tensor" if caches else "None"
            came = "None" if caches else "a tensor"
            raise ValueError(f"{name}: expected {expected} with cache_replayssm={caches}, got {came}")
    if caches and update:
        raise ValueError("disable_state_update: expected True with cache_replayssm=True, got False")
    for name in ("intermediate_states_buffer", "ssm_state_indices"):
        if caches and tensors[name] is not None:
            raise ValueError(f"{name}: expected None with cache_replayssm=True, got a tensor")
    if tensors["ssm_state_indices"] is not None and not update:
        raise ValueError("disable_state_update: expected False with ssm_state_indices, got True")


@once_per_layout
def check_recorded(*arguments: Any) -> None:
    """Check a call of ``gated_delta_rule_replayssm_commit`` or ``..._materialize``.

    Args:
        arguments: the names of the index tensors as a tuple, the tensors of ``_RECORDED``, use_qk_l2norm,
            null_block_id, backend, then the index tensors (None for one that is absent).

    Raises:
        TypeError: a tensor is missing or no tensor, a checkpoint or window has the wrong dtype, an option the wrong
            type.
        ValueError: anything else does not fit.
    """
    names, arguments = arguments[0], arguments[1:]
    tensors = dict(zip(_RECORDED, arguments, strict=False))
    norm, null_block_id, backend = arguments[len(_RECORDED) : len(_RECORDED) + 3]
    indices = dict(zip(names, arguments[len(_RECORDED) + 3 :], strict=True))
    sizes = _check_tensors(tensors, _RECORDED, 2)
    for name, tensor in tensors.items():
        window = (tensors["rawv_cache"].dtype,) if name == "rawk_cache" else FLOATS
        allowed = (torch.float32,) if name in ("g_cache", "beta_cache") else window
        if tensor.dtype not in allowed:
            expected = " or ".join(str(dtype) for dtype in allowed)
            raise TypeError(f"{name}: expected dtype {expected}, got {tensor.dtype}")
    for name, index in indices.items():
        if index is None and name in ("track_state_indices", "track_steps", "ring_start"):
            continue
        check_shape(name, index, "batch", sizes)
        check_dtype(name, index, *INDICES)
        check_device(name, index, tensors["checkpoint_state"].device)
    slots, steps = indices.get("track_state_indices"), indices.get("track_steps")
    if (slots is None) != (steps is None):
        absent = "track_state_indices" if slots is None else "track_steps"
        raise ValueError(f"{absent}: expected both of track_state_indices and track_steps or neither, got None")
    check_range("null_block_id", null_block_id, -1, (1 << 31) - 1)
    check_flag("use_qk_l2norm", norm)
    _check_sizes("rawv_cache", sizes, MAX_TOKENS if indices.get("ring_start") is None else MAX_WINDOW + MAX_TOKENS)
    _check_backend(backend, tensors["checkpoint_state"].device)


@once_per_layout
def check_checkpointing(*arguments: Any) -> int:
    """Check everything about a call of ``gated_delta_rule_checkpointing`` that metadata tells.

    Args:
        arguments: the call's tensors in the order of ``_LAZY``, then pad_slot_id, scale, max_window, use_qk_l2norm and
            backend.

    Returns:
        The window in force.

    Raises:
        TypeError: a tensor is missing or no tensor, an option has the wrong type.
        ValueError: a shape, dtype, device, stride or number does not fit.
    """
    tensors = dict(zip(_LAZY, arguments, strict=False))
    pad, scale, max_window, norm, backend = arguments[len(_LAZY) :]
    sizes = _check_tensors(tensors, _LAZY)
    _check_dtypes(tensors, ("state", "v_cache", "q", "A_log", "a", "dt_bias", "b", "output"), FLOATS)
    _check_dtypes(tensors, ("k", "v"), (tensors["q"].dtype,))
    _check_dtypes(tensors, ("k_cache",), (tensors["v_cache"].dtype,))
    _check_dtypes(tensors, ("g_cache", "beta_cache"), (torch.float32,))
    _check_dtypes(tensors, ("ring_start", "num_live"), (torch.int32,))
    _check_dtypes(tensors, ("state_batch_indices",), INDICES)
    if tensors["state_batch_indices"] is None and sizes["batch"] > sizes["slots"]:
        raise ValueError(
            f"state_batch_indices: expected indices for batch={sizes['batch']} > slots={sizes['slots']}, got None"
        )
    check_range("pad_slot_id", pad, -(1 << 63), (1 << 63) - 1)
    check_flag("use_qk_l2norm", norm)
    _check_sizes("q", sizes, MAX_TOKENS)
    _check_options(scale, backend)
    T, ring_len = sizes["T"], sizes["ring_len"]
    window = ring_len - T if max_window is None else max_window
    name = "ring_len - T" if max_window is None else "max_window"
    check_range(name, window, 1, MAX_WINDOW)
    if window < T:
        raise ValueError(f"q: expected T <= window={window} ({name}), got T={T}")
    if window + T > ring_len:
        raise ValueError(
            f"v_cache: expected ring_len >= window + T = {window} + {T} rows, got ring_len={ring_len}"
        )  # fmt: skip
    return window


def _check_tensors(tensors: dict[str, Any], shapes: dict[str, str], packed_from: int | None = None) -> dict[str, int]:
    """Shapes, devices and strides; the first tensor has the device that all must have. Returns the sizes."""
    sizes: dict[str, int] = {}
    device = None
    for name, spec in shapes.items():
        tensor = tensors[name]
        if tensor is None and name in _OPTIONAL:
            continue
        check_tensor(name, tensor)
        check_shape(name, tensor, spec, sizes)
        device = device or tensor.device
        check_device(name, tensor, device)
        first = _PACKED_FROM.get(name) if packed_from is None else packed_from
        if first is not None:
            check_packed(name, tensor, first)
            check_separate(name, tensor, first)
    if not sizes["H"] or sizes["HV"] % sizes["H"]:
        raise ValueError(f"H: expected a divisor of HV={sizes['HV']}, the value heads, got H={sizes['H']} key heads")
    return sizes


def _check_dtypes(tensors: dict[str, Any], names: tuple[str, ...], allowed: tuple[torch.dtype, ...]) -> None:
    for name in names:
        if tensors[name] is not None:
            check_dtype(name, tensors[name], *allowed)


def _check_sizes(name: str, sizes: dict[str, int], most_tokens: int) -> None:
    check_range("T", sizes["T"], 1, most_tokens, f"tokens in {name}")
    for axis in ("K", "V"):
        check_range(axis, sizes[axis], 1, MAX_DIM)


def _check_options(scale: object, backend: object) -> None:
    if scale is not None:
        if isinstance(scale, bool) or not isinstance(scale, (int, float)):
            raise TypeError(f"scale: expected a number or None, got {scale!r}")
        if not -math.inf < scale < math.inf:  # not isfinite: it may be symbolic
            raise ValueError(f"scale: expected a finite number, got {scale}")
    check_choice("backend", backend, BACKENDS)


def _check_backend(backend: object, device: torch.device) -> None:
    """The backends of the ops on recorded windows, which know the Blackwell one by name."""
    if backend == "tcgen05":
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        if capability is None or capability[0] != 10:
            came = f"device {device}" if capability is None else "SM{}{}".format(*capability)
            raise ValueError(f"backend: expected a GPU of SM10x for 'tcgen05', got {came}")
    else:
        check_choice("backend", backend, (*BACKENDS, "tcgen05"))
