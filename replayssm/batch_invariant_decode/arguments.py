"""Checks of what metadata tells about the arguments: shapes, dtypes, devices, strides, numbers."""

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
    check_packed,
    check_separate,
    check_shape,
    check_tensor,
    once_per_layout,
)
from replayssm.ssd.arguments import check_chunk_size, check_groups, check_skip

_ROWS = {
    "buffers.x": "slots rows nheads headdim",
    "buffers.z": "slots rows nheads headdim",
    "buffers.dt": "slots rows nheads",
    "buffers.B": "slots rows ngroups dstate",
    "buffers.C": "slots rows ngroups dstate",
    "buffers.num_buffered": "slots",
    "buffers.ring_start": "slots",
}
_SHADOW = "slots nheads headdim dstate"
_STEP = {
    **_ROWS,
    "buffers.shadow": _SHADOW,
    "buffers.arrivals": "slots",
    "buffers.sums": "slots nheads rows 2",
    "buffers.num_summed": "slots",
    "buffers.target_rows": "slots",
    "buffers.chunk_flags": "slots",
    "buffers.out": "slots nheads headdim",
    "x": "lanes tokens nheads headdim",
    "z": "lanes tokens nheads headdim",
    "dt": "lanes tokens nheads",
    "B": "lanes tokens ngroups dstate",
    "C": "lanes tokens ngroups dstate",
    "A": "nheads",
    "dt_bias": "nheads",
    "batch_indices": "lanes",
    "ssm_state": "slots nheads headdim dstate",
}
_STEP_OF_SEVERAL = {**_STEP, "buffers.out": "slots max_tokens nheads headdim"}
_STORE = {
    **_ROWS,
    "buffers.num_summed": "slots",
    "x": "tokens nheads headdim",
    "z": "tokens nheads headdim",
    "dt": "tokens nheads",
    "B": "tokens ngroups dstate",
    "C": "tokens ngroups dstate",
    "cu_seqlens": "sequences+1",
    "batch_indices": "entries",
}
_FLAT = {
    "x": "rows nheads headdim",
    "z": "rows nheads headdim",
    "dt": "rows nheads",
    "B": "rows ngroups dstate",
    "C": "rows ngroups dstate",
    "A": "nheads",
    "dt_bias": "nheads",
    "chunk_starts": "lanes",
    "slots": "lanes",
    "target_rows": "lanes",
    "chunk_flags": "lanes",
    "initial_states": "slots nheads headdim dstate",
    "out": "lanes nheads headdim",
}
_KEPT = ("buffers.shadow", "buffers.arrivals", "buffers.sums", "buffers.num_summed")
_OPTIONAL = frozenset(("buffers.z", "buffers.C", "buffers.ring_start", *_KEPT, "z", "dt_bias", "D"))
_STATES = ("ssm_state", "initial_states")
_CURSORS = ("buffers.num_buffered", "buffers.ring_start")
_BY_LANE = ("buffers.target_rows", "buffers.chunk_flags")
# Kernels know no strides of these: a column of a table would be written beside its own numbers.
_INT32 = (*_CURSORS, *_BY_LANE, "buffers.arrivals", "buffers.num_summed")
_WRITTEN = (*_STATES, "out", "buffers.shadow", "buffers.sums", *(name for name in _ROWS if name not in _CURSORS))


def _check(specs: dict[str, str], tensors: dict[str, Tensor | None], optional: frozenset[str]) -> dict[str, int]:
    """Shapes, dtypes, devices and layouts; the sizes that were found."""
    sizes: dict[str, int] = {}
    x = tensors["x"]
    check_tensor("x", x)
    assert x is not None
    anchor = tensors.get("buffers.x")
    anchor = x if anchor is None else anchor
    check_tensor("buffers.x", anchor)
    for name, spec in specs.items():
        tensor = tensors[name]
        if tensor is None and name in optional:
            continue
        check_tensor(name, tensor)
        assert tensor is not None
        check_shape(name, tensor, spec, sizes)
        check_dtype(name, tensor, *_dtypes(name, anchor, tensors))
        check_device(name, tensor, anchor.device)
        if name in _WRITTEN:
            check_packed(name, tensor, 1)
            check_separate(name, tensor, 1)
        elif name in _INT32 or name == "buffers.out":
            check_packed(name, tensor, 0)
    check_groups(sizes)
    D = tensors.get("D")
    if D is not None:
        check_skip(D, sizes)
        check_device("D", D, anchor.device)
    return sizes


def _dtypes(name: str, anchor: Tensor, tensors: dict[str, Tensor | None]) -> tuple[torch.dtype, ...]:
    """The dtypes that an argument may have; ``anchor`` has the activation dtype."""
    dt_rows = tensors.get("buffers.dt")
    if name in ("A", "dt_bias", "buffers.dt"):
        return FLOATS
    if name in _STATES or name == "buffers.sums":
        return (torch.float32,)
    if name in _INT32 or name == "cu_seqlens":
        return (torch.int32,)
    if name in ("batch_indices", "chunk_starts", "slots", "target_rows", "chunk_flags"):
        return INDICES
    if name == "dt":
        return FLOATS if dt_rows is None else (dt_rows.dtype,)
    if tensors[name] is anchor:
        return FLOATS
    return (anchor.dtype,)


@once_per_layout
def check_step(*arguments: Any) -> None:
    """Check a call of ``batch_invariant_decode_buffered_scan``.

    Args:
        arguments: its tensors in the order of ``_STEP``, then D, max_tokens, dt_softplus and dt_limit.

    Raises:
        AssertionError: the state is not fp32, or there are too many tokens or lanes.
        TypeError: a tensor is missing or no tensor, an option has the wrong type.
        ValueError: a shape, dtype, device, stride or number does not fit.
    """
    tensors: dict[str, Tensor | None] = dict(zip((*_STEP, "D"), arguments, strict=False))
    max_tokens, dt_softplus, dt_limit = arguments[len(_STEP) + 1 :]
    check_dt_options(dt_softplus, dt_limit)
    state = tensors["ssm_state"]
    check_tensor("ssm_state", state)
    if state is not None and state.dtype != torch.float32:
        raise AssertionError(f"ssm_state: batch-invariant decode requires an FP32 SSM state cache, got {state.dtype}")
    sizes = _check(_STEP if max_tokens == 1 else _STEP_OF_SEVERAL, tensors, _OPTIONAL)
    if sizes.get("max_tokens", 1) != max_tokens:  # no number in a spec: it may be symbolic
        raise ValueError(f"buffers.out: expected max_tokens={max_tokens} at axis 1, got {sizes['max_tokens']}")
    if (tensors["buffers.sums"] is None) != (tensors["buffers.num_summed"] is None):
        raise ValueError("buffers.num_summed: expected it where buffers.sums is, and only there")
    if not 1 <= sizes["tokens"] <= max_tokens:
        expected = "exactly 1 token" if max_tokens == 1 else f"1..max_tokens={max_tokens} tokens"
        raise AssertionError(f"x: expected {expected} a lane, got {sizes['tokens']}")
    if sizes["lanes"] > sizes["slots"]:
        raise AssertionError(f"x: expected at most max_requests={sizes['slots']} lanes, got {sizes['lanes']}")


@once_per_layout
def check_store(*arguments: Any) -> int:
    """Check a call of ``seed`` or ``extend``, tensors in the order of ``_STORE``; return the number of sequences.

    Raises:
        TypeError: a tensor is missing or no tensor.
        ValueError: a shape, dtype, device or stride does not fit.
    """
    tensors: dict[str, Tensor | None] = dict(zip(_STORE, arguments, strict=True))
    optional = _OPTIONAL if tensors["buffers.C"] is not None else _OPTIONAL | {"C"}
    sizes = _check(_STORE, tensors, optional)
    sequences = sizes["sequences+1"] - 1
    if not 0 <= sequences <= sizes["entries"]:
        raise ValueError(
            f"batch_indices: expected at least sequences={sequences} >= 0 entries (cu_seqlens has one more), got "
            f"{sizes['entries']}"
        )
    return sequences


@once_per_layout
def check_refresh(shadow: Tensor, ssm_state: Tensor, batch_indices: Tensor) -> None:
    """Check a call of ``refresh``.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: a shape, dtype, device or stride does not fit.
    """
    sizes = dict(zip(_SHADOW.split(), shadow.shape, strict=True))
    expected = (("ssm_state", ssm_state, _SHADOW, (torch.float32,)), ("batch_indices", batch_indices, "lanes", INDICES))
    for name, tensor, spec, dtypes in expected:
        check_tensor(name, tensor)
        check_shape(name, tensor, spec, sizes)
        check_dtype(name, tensor, *dtypes)
        check_device(name, tensor, shadow.device)
    check_packed("ssm_state", ssm_state, 1)


@once_per_layout
def check_decode_rows(*arguments: Any) -> None:
    """Check a call of ``_mamba_chunk_scan_decode_rows``.

    Args:
        arguments: its tensors in the order of ``_FLAT``, then D, chunk_size, dt_softplus and dt_limit.

    Raises:
        TypeError: a tensor is missing or no tensor, an option has the wrong type.
        ValueError: a shape, dtype, device, stride or number does not fit.
    """
    tensors: dict[str, Tensor | None] = dict(zip((*_FLAT, "D"), arguments, strict=False))
    chunk_size, dt_softplus, dt_limit = arguments[len(_FLAT) + 1 :]
    check_chunk_size(chunk_size)
    check_dt_options(dt_softplus, dt_limit)
    _check(_FLAT, tensors, _OPTIONAL)


@once_per_layout
def check_masked_update_rows(states: Tensor, indices: Tensor, values: Tensor) -> None:
    """Check a call of ``_masked_update_rows``.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: a shape, dtype, device or stride does not fit.
    """
    for name, tensor in (("states", states), ("indices", indices), ("values", values)):
        check_tensor(name, tensor)
        check_device(name, tensor, states.device)
    check_shape("indices", indices, "entries", {})
    check_dtype("indices", indices, *INDICES)
    expected = [indices.shape[0], *states.shape[1:]]
    if states.dim() < 1 or list(values.shape) != expected:
        raise ValueError(
            f"values: expected shape {expected}, one row of states for each index, got {list(values.shape)}"
        )
    check_dtype("values", values, states.dtype)
    check_packed("states", states, 1)
    check_separate("states", states, 1)
