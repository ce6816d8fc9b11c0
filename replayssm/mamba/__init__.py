"""Mamba-2 decoding from a checkpoint and a ring of recent inputs (``docs/maths.md``)."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor

from replayssm.custom_op import define
from replayssm.dispatch import implementation
from replayssm.mamba.arguments import Sizes, check_checkpointing_ssu

__all__ = ["checkpointing_ssu"]

# Layouts that passed the checks: a decoding loop repeats a few, and checking one costs more than a small step.
_CHECKED: dict[tuple, Sizes] = {}
_CHECKED_LIMIT = 1024


def _run_checkpointing_ssu(*args: Any) -> None:
    implementation("mamba", args[0].device).checkpointing_ssu(*args)


_checkpointing_ssu = define(
    "checkpointing_ssu(Tensor(a!) state, Tensor(b!)? state_scale, Tensor(c!) x_cache, Tensor(d!) B_cache, "
    "Tensor(e!) dt_cache, Tensor(f!) out, Tensor ring_start, Tensor prev_num_accepted_tokens, Tensor x, Tensor dt, "
    "Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, bool dt_softplus, "
    "Tensor? state_batch_indices, int pad_slot_id, Tensor? rand_seed, int philox_rounds, Tensor? cu_seqlens, "
    "int seq_len, int window, float dt_min, float dt_max) -> ()",
    _run_checkpointing_ssu,
)


def checkpointing_ssu(
    state: Tensor,
    x_cache: Tensor,
    B_cache: Tensor,
    dt_cache: Tensor,
    ring_start: Tensor,
    prev_num_accepted_tokens: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    out: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: Tensor | None = None,
    rand_seed: Tensor | None = None,
    philox_rounds: int = 10,
    *,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    max_window: int | None = None,
    dt_limit: tuple[float, float] = (0.0, inf),
) -> Tensor:
    """Score new tokens of Mamba-2 from a checkpoint and the ring of its recent inputs."""
    tensors = {
        "state": state,
        "x_cache": x_cache,
        "B_cache": B_cache,
        "dt_cache": dt_cache,
        "ring_start": ring_start,
        "prev_num_accepted_tokens": prev_num_accepted_tokens,
        "x": x,
        "dt": dt,
        "A": A,
        "B": B,
        "C": C,
        "out": out,
        "D": D,
        "z": z,
        "dt_bias": dt_bias,
        "state_scale": state_scale,
    }
    numbers = (philox_rounds, max_seqlen, max_window, dt_limit)
    key = None
    if not torch.compiler.is_compiling():
        every = (*tensors.values(), state_batch_indices, rand_seed, cu_seqlens)
        key = (*numbers, *((t.shape, t.stride(), t.dtype, t.device) if isinstance(t, Tensor) else t for t in every))
    sizes = None if key is None else _CHECKED.get(key)
    if sizes is None:
        sizes = check_checkpointing_ssu(
            tensors, state_batch_indices, rand_seed, philox_rounds, cu_seqlens, max_seqlen, max_window, dt_limit
        )
        if key is not None:
            if len(_CHECKED) >= _CHECKED_LIMIT:
                _CHECKED.clear()
            _CHECKED[key] = sizes
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _checkpointing_ssu(
        state,
        state_scale,
        x_cache,
        B_cache,
        dt_cache,
        out,
        ring_start,
        prev_num_accepted_tokens,
        x,
        dt,
        A,
        B,
        C,
        D,
        z,
        dt_bias,
        dt_softplus,
        state_batch_indices,
        pad_slot_id,
        rand_seed,
        philox_rounds,
        cu_seqlens,
        sizes.seq_len,
        sizes.window,
        float(dt_limit[0]),
        float(dt_limit[1]),
    )
    return out
