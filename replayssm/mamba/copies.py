"""``replayssm_materialize`` over host addresses, but for its arithmetic, which the CPU path and the reference bring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from replayssm.mamba.requests import Copy, plan_copies
from replayssm.mamba.slots import Layout, Noise, PointerTables, Slot, store
from replayssm.rounding import layer_seed

# (source, A, start, num_rows) -> the source's state after so many ring rows from there on, fp32, new.
Folded = Callable[[Slot, Tensor, int, int], Tensor]


def materialize_with(folded: Folded, *arguments: Any) -> None:
    """``replayssm.mamba.replayssm_materialize``, with ``folded`` as its arithmetic; arguments as of ``planned``."""
    tables, copies = planned(*arguments)
    *_, rand_seed, philox_rounds, _, _ = arguments
    seed = int(rand_seed.item()) if rand_seed is not None and philox_rounds > 0 else None
    for copy in copies:
        source, target = tables.slot(copy.layer, copy.src), tables.slot(copy.layer, copy.dst)
        if copy.num_rows == 0:
            target.state.copy_(source.state)
            if target.scale is not None and source.scale is not None:
                target.scale.copy_(source.scale)
            continue
        noise = None if seed is None else Noise(layer_seed(seed, copy.layer), philox_rounds)
        store(target, copy.dst, folded(source, tables.A(copy.layer), copy.start, copy.num_rows), noise)


def planned(
    state_ptrs: Tensor,
    state_slot_strides: Tensor,
    x_cache_ptrs: Tensor,
    x_cache_slot_strides: Tensor,
    B_cache_ptrs: Tensor,
    B_cache_slot_strides: Tensor,
    dt_cache_ptrs: Tensor,
    dt_cache_slot_strides: Tensor,
    A_ptrs: Tensor,
    state_scale_ptrs: Tensor,
    state_scale_slot_strides: Tensor,
    src_slots: Tensor,
    dst_slots: Tensor,
    ring_start: Tensor,
    replay_prefix_len: Tensor,
    active_request_indices: Tensor,
    state_dtype: torch.dtype,
    input_dtype: torch.dtype,
    matrixA_dtype: torch.dtype,
    dim: int,
    dstate: int,
    num_heads: int,
    heads_per_group: int,
    max_window: int,
    ring_buffer_len: int,
    pad_slot_id: int,
    rand_seed: Tensor | None,
    philox_rounds: int,
    dependency_inputs: list[Tensor],
    dependency_outputs: list[Tensor],
) -> tuple[PointerTables, list[Copy]]:
    """The tables of a ``replayssm_materialize`` call and the copies that it asks for, read back and checked."""
    tables = PointerTables(
        Layout(state_dtype, input_dtype, matrixA_dtype, dim, dstate, num_heads, heads_per_group, ring_buffer_len),
        {"state": state_ptrs, "x_cache": x_cache_ptrs, "B_cache": B_cache_ptrs, "dt_cache": dt_cache_ptrs,
         "A": A_ptrs, "state_scale": state_scale_ptrs},
        {"state": state_slot_strides, "x_cache": x_cache_slot_strides, "B_cache": B_cache_slot_strides,
         "dt_cache": dt_cache_slot_strides, "state_scale": state_scale_slot_strides},
    )  # fmt: skip
    copies = plan_copies(
        src_slots, dst_slots, ring_start, replay_prefix_len, active_request_indices, pad_slot_id, max_window,
        ring_buffer_len,
    )  # fmt: skip
    tables.check(copies, dependency_inputs, dependency_outputs)
    return tables, copies
