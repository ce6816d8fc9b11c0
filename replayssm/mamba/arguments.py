"""Checks of what metadata tells about the arguments: shapes, dtypes, devices, strides, numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm.checks import (
    FLOATS,
    INDICES,
    check_device,
    check_dt_options,
    check_dtype,
    check_packed,
    check_range,
    check_separate,
    check_shape,
    check_tensor,
    once_per_layout,
)
from replayssm.rounding import SCALED_DTYPES

STATE_DTYPES = (*FLOATS, *SCALED_DTYPES)
MAX_WINDOW = 64
MAX_PHILOX_ROUNDS = 32

_SHAPES = {
    "state": "slots nheads headdim dstate",
    "x_cache": "slots nheads ring_len headdim",
    "B_cache": "slots ngroups ring_len dstate",
    "dt_cache": "slots nheads ring_len",
    "ring_start": "slots",
    "prev_num_accepted_tokens": "slots",
    "x": "batch seq_len nheads headdim",
    "dt": "batch seq_len nheads headdim",
    "A": "nheads headdim dstate",
    "B": "batch seq_len ngroups dstate",
    "C": "batch seq_len ngroups dstate",
    "out": "batch seq_len nheads headdim",
    "D": "nheads headdim",
    "z": "batch seq_len nheads headdim",
    "dt_bias": "nheads headdim",
    "state_scale": "slots nheads headdim",
}
_REQUIRED = frozenset(_SHAPES) - {"out", "D", "z", "dt_bias", "state_scale"}
# The first axis from which a tensor must be packed; strides before it are free.
_OF_SLOTS = ("state", "x_cache", "B_cache", "dt_cache", "state_scale")
_PACKED_FROM = dict.fromkeys(_OF_SLOTS, 1) | dict.fromkeys(("x", "B", "C", "z", "out"), 2)
_WRITTEN = frozenset((*_OF_SLOTS, "out"))
# Axes along which a tensor must repeat one value (stride 0).
_BROADCAST = {"dt": (3,), "A": (1, 2), "D": (1,), "dt_bias": (1,)}
_INPUT_TYPED = ("x_cache", "B_cache", "B", "C", "z", "out")


class Sizes(NamedTuple):
    """What the checks find out.

    Attributes:
        seq_len: T, new tokens a request has at most.
        window: most rows that may be replayed.
    """

    seq_len: int
    window: int


@once_per_layout
def check_checkpointing_ssu(*arguments: Any) -> Sizes:
    """Check everything about a call that metadata tells.

    Args:
        arguments: the call's tensors in the order of ``_SHAPES``, then its dt_softplus, state_batch_indices,
            pad_slot_id, rand_seed, philox_rounds, cu_seqlens, max_seqlen, max_window and dt_limit.

    Returns:
        T and the window in force.

    Raises:
        TypeError: a tensor is missing or no tensor, an option has the wrong type.
        ValueError: a shape, dtype, device, stride or number does not fit.
    """
    tensors: dict[str, Tensor | None] = dict(zip(_SHAPES, arguments, strict=False))
    softplus, indices, pad, seed, rounds, cu_seqlens, max_seqlen, max_window, dt_limit = arguments[len(_SHAPES) :]
    sizes = _check_tensors(tensors)
    state = tensors["state"]
    assert state is not None
    for name, tensor in {**tensors, "state_batch_indices": indices, "cu_seqlens": cu_seqlens}.items():
        if tensor is not None:
            check_tensor(name, tensor)
            check_device(name, tensor, state.device)
    batch, seq_len = sizes["batch"], sizes["seq_len"]
    if cu_seqlens is None:
        if max_seqlen is not None and max_seqlen != seq_len:
            raise ValueError(f"max_seqlen: expected None or x's seq_len={seq_len} without cu_seqlens, got {max_seqlen}")
    else:
        batch, seq_len = _check_varlen(cu_seqlens, max_seqlen, batch)
    _check_indices(indices, batch, sizes["slots"])
    window = _check_window(max_window, seq_len, sizes["ring_len"])
    _check_seed(seed, state.device)
    _check_options(softplus, pad, rounds, dt_limit)
    return Sizes(seq_len, window)


def _check_tensors(tensors: dict[str, Tensor | None]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, spec in _SHAPES.items():
        tensor = tensors[name]
        if tensor is None and name not in _REQUIRED:
            continue
        check_tensor(name, tensor)
        assert tensor is not None
        check_shape(name, tensor, spec, sizes)
        _check_layout(name, tensor)
    state, x = tensors["state"], tensors["x"]
    assert state is not None and x is not None
    _check_dtypes(tensors, state, x)
    if sizes["nheads"] % max(sizes["ngroups"], 1):
        raise ValueError(
            f"B: expected ngroups to divide nheads={sizes['nheads']}, got ngroups={sizes['ngroups']} from B's axis 2"
        )
    return sizes


def _check_options(dt_softplus: object, pad_slot_id: int, philox_rounds: int, dt_limit: Any) -> None:
    check_dt_options(dt_softplus, dt_limit)
    check_range("pad_slot_id", pad_slot_id, -(1 << 63), (1 << 63) - 1)
    check_range("philox_rounds", philox_rounds, 0, MAX_PHILOX_ROUNDS, "0 rounds to nearest")


def _check_layout(name: str, tensor: Tensor) -> None:
    if name in _PACKED_FROM:
        check_packed(name, tensor, _PACKED_FROM[name])
    if name in _WRITTEN:
        check_separate(name, tensor, _PACKED_FROM[name])
    for axis in _BROADCAST.get(name, ()):
        if tensor.shape[axis] != 1 and tensor.stride(axis) != 0:
            raise ValueError(
                f"{name}: expected axis {axis} of shape {list(tensor.shape)} to be expanded (stride 0), one value per "
                f"head, got strides {list(tensor.stride())}"
            )


def _check_dtypes(tensors: dict[str, Tensor | None], state: Tensor, x: Tensor) -> None:
    check_dtype("state", state, *STATE_DTYPES)
    check_dtype("x", x, *FLOATS)
    expected: dict[str, tuple[torch.dtype, ...]] = dict.fromkeys(_INPUT_TYPED, (x.dtype,))
    expected.update(dict.fromkeys(("dt", "A", "D"), FLOATS))
    D = tensors["D"]
    expected["dt_bias"] = FLOATS if D is None else (D.dtype,)
    expected.update(dict.fromkeys(("dt_cache", "state_scale"), (torch.float32,)))
    expected.update(dict.fromkeys(("ring_start", "prev_num_accepted_tokens"), (torch.int32,)))
    for name, dtypes in expected.items():
        tensor = tensors[name]
        if tensor is not None:
            check_dtype(name, tensor, *dtypes)
    scaled, scale = state.dtype in SCALED_DTYPES, tensors["state_scale"]
    if scaled != (scale is not None):
        expectation = "fp32 [slots, nheads, headdim]" if scaled else "None"
        fact = "None" if scale is None else f"a tensor of shape {list(scale.shape)}"
        raise ValueError(f"state_scale: expected {expectation} with a state of {state.dtype}, got {fact}")


def _check_varlen(cu_seqlens: Tensor, max_seqlen: int | None, batch: int) -> tuple[int, int]:
    sizes: dict[str, int] = {}
    check_shape("cu_seqlens", cu_seqlens, "batch+1", sizes)
    check_dtype("cu_seqlens", cu_seqlens, torch.int32)
    if batch != 1:
        raise ValueError(f"x: expected batch=1, all tokens in one row, with cu_seqlens, got batch={batch}")
    if cu_seqlens.shape[0] < 1:
        raise ValueError("cu_seqlens: expected batch + 1 >= 1 elements, got 0")
    if max_seqlen is None:
        raise ValueError("max_seqlen: expected the most tokens that a request has, with cu_seqlens, got None")
    check_range("max_seqlen", max_seqlen, 1, MAX_WINDOW)
    return cu_seqlens.shape[0] - 1, max_seqlen


def _check_indices(state_batch_indices: Tensor | None, batch: int, slots: int) -> None:
    if state_batch_indices is not None:
        check_shape("state_batch_indices", state_batch_indices, "batch", {"batch": batch})
        check_dtype("state_batch_indices", state_batch_indices, *INDICES)
    elif batch > slots:
        raise ValueError(f"state_batch_indices: expected indices for batch={batch} > slots={slots}, got None")


def _check_window(max_window: int | None, seq_len: int, ring_len: int) -> int:
    check_range("seq_len", seq_len, 1, MAX_WINDOW, "x's axis 1, or max_seqlen")
    window = ring_len - seq_len if max_window is None else max_window
    name = "ring_len - seq_len" if max_window is None else "max_window"
    check_range(name, window, 1, MAX_WINDOW)
    if seq_len > window:
        raise ValueError(f"x: expected seq_len <= window={window} ({name}), got seq_len={seq_len}")
    if window + seq_len > ring_len:
        raise ValueError(
            f"x_cache: expected ring_len >= window + seq_len = {window} + {seq_len} rows, got ring_len={ring_len}"
        )
    return window


def check_replayssm_materialize(
    pointers: dict[str, Tensor],
    strides: dict[str, Tensor],
    slots: dict[str, Tensor],
    requests: dict[str, Tensor],
    dtypes: dict[str, torch.dtype],
    numbers: dict[str, int],
    rand_seed: Tensor | None,
    dependencies: dict[str, list[Tensor] | None],
) -> None:
    """Check everything about a call that metadata tells; the keys are argument names.

    Args:
        pointers: the tables of addresses.
        strides: the tables of slot strides.
        slots: src_slots and dst_slots.
        requests: ring_start, replay_prefix_len, active_request_indices.
        dtypes: state_dtype, input_dtype, matrixA_dtype.
        numbers: the sizes, philox_rounds and pad_slot_id.
        rand_seed: see ``replayssm_materialize``.
        dependencies: dependency_inputs and dependency_outputs.

    Raises:
        TypeError: a tensor is missing or no tensor.
        ValueError: a shape, dtype, device or number does not fit.
    """
    sizes: dict[str, int] = {}
    groups = (
        ({**pointers, **strides}, "layers", torch.int64),
        (slots, "layers batch", torch.int32),
        (requests, "batch", torch.int32),
    )
    device = None
    for tensors, spec, dtype in groups:
        for name, tensor in tensors.items():
            check_shape(name, tensor, spec, sizes)
            check_dtype(name, tensor, dtype)
            device = device or tensor.device
            check_device(name, tensor, device)
    check_range("state_ptrs", sizes["layers"], 1, 1 << 31, "its length, the number of layers")
    for name, allowed in (
        ("state_dtype", STATE_DTYPES), ("input_dtype", FLOATS), ("matrixA_dtype", FLOATS),
    ):  # fmt: skip
        if dtypes[name] not in allowed:
            raise ValueError(f"{name}: expected {' or '.join(str(dtype) for dtype in allowed)}, got {dtypes[name]}")
    for name in ("dim", "dstate", "num_heads", "heads_per_group", "ring_buffer_len"):
        check_range(name, numbers[name], 1, (1 << 31) - 1)
    check_range("max_window", numbers["max_window"], 1, MAX_WINDOW)
    if numbers["num_heads"] % numbers["heads_per_group"]:
        raise ValueError(
            f"heads_per_group: expected a divisor of num_heads={numbers['num_heads']}, got {numbers['heads_per_group']}"
        )
    check_range("philox_rounds", numbers["philox_rounds"], 0, MAX_PHILOX_ROUNDS, "0 rounds to nearest")
    check_range("pad_slot_id", numbers["pad_slot_id"], -(1 << 63), (1 << 63) - 1)
    if numbers["philox_rounds"] > 0 and rand_seed is None:
        raise ValueError(f"rand_seed: expected a tensor with philox_rounds={numbers['philox_rounds']}, got None")
    assert device is not None
    _check_seed(rand_seed, device)
    for name, anchors in dependencies.items():
        if anchors is not None and not isinstance(anchors, (list, tuple)):
            raise TypeError(f"{name}: expected a list of tensors or None, got {type(anchors).__name__}")
        for index, tensor in enumerate(anchors or ()):
            check_tensor(f"{name}[{index}]", tensor)
            check_device(f"{name}[{index}]", tensor, device)


def _check_seed(rand_seed: Tensor | None, device: torch.device) -> None:
    if rand_seed is None:
        return
    check_tensor("rand_seed", rand_seed)
    check_dtype("rand_seed", rand_seed, torch.int64)
    check_device("rand_seed", rand_seed, device)
    if rand_seed.numel() != 1:
        raise ValueError(f"rand_seed: expected one element, got shape {list(rand_seed.shape)}")
