"""FlashInfer's Mamba-2 ops beside ours: called with the same buffers, or what they took in another run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from replayssm.bench.peers import ELSEWHERE, installed

PUBLISHED = f"FlashInfer 0.7.4, {ELSEWHERE}"
# What follows: torch 2.11, window 16, 128 heads, 8 groups, 64 x 128, bf16.
_BATCHES = (1, 8, 32, 128, 256)
# Microseconds by batch: hold, mix, flush (the best of its kernels), and the update that keeps no ring: in place at one
# token, with one stored state per token at four.
_STEP = {
    ("bf16", 1): {
        "hold": (5.4, 13.0, 35.3, 114.6, 221.8), "mix": (5.2, 12.9, 36.4, 119.6, 233.1),
        "flush": (6.6, 18.9, 55.3, 190.6, 375.8), "plain": (5.1, 12.8, 40.2, 143.5, 282.6),
    },
    ("bf16", 4): {
        "hold": (5.2, 12.6, 34.2, 114.8, 225.3), "mix": (5.1, 12.6, 38.0, 131.9, 261.4),
        "flush": (6.7, 18.9, 55.3, 193.4, 381.4), "plain": (7.3, 33.6, 120.1, 457.7, 905.9),
    },
    ("fp32", 1): {
        "hold": (5.7, 17.5, 51.9, 170.1, 328.4), "mix": (5.7, 17.2, 53.9, 180.5, 348.6),
        "flush": (7.3, 28.4, 91.4, 332.4, 654.1), "plain": (5.6, 21.2, 75.7, 290.1, 572.0),
    },
    ("fp32", 4): {
        "hold": (5.8, 18.4, 48.3, 170.9, 327.0), "mix": (5.7, 18.0, 53.9, 194.8, 383.7),
        "flush": (7.4, 28.9, 90.6, 338.5, 657.6), "plain": (9.7, 63.6, 261.3, 1037.0, 2081.0),
    },
}  # fmt: skip
# 24 layers, prefix 8.
_MATERIALIZE = {
    "bf16": {1: 39.5, 16: 492.6, 64: 1961.6},
    "fp32": {1: 71.0, 16: 934.9, 64: 3707.0},
}


def version() -> str | None:
    """The installed version that has the ops with a ring, else None; nothing is imported."""
    found = installed("flashinfer-python", "flashinfer")
    return found if found is not None and tuple(map(int, found.split(".")[:2])) >= (0, 7) else None


def published_step(state: str, tokens: int, mode: str, batch: int, heads: int, groups: int) -> float | None:
    """Microseconds of ``checkpointing_ssu`` in a mode, or with mode ``"plain"`` of ``selective_state_update``."""
    known = _STEP.get((state, tokens))
    if known is None or (heads, groups) != (128, 8) or batch not in _BATCHES:
        return None
    return known[mode][_BATCHES.index(batch)]


def published_materialize(state: str, prefix: int, batch: int, heads: int, layers: int) -> float | None:
    """Microseconds of ``replayssm_materialize``."""
    return _MATERIALIZE.get(state, {}).get(batch) if (prefix, heads, layers) == (8, 128, 24) else None


def checkpointing_ssu(buffers: Mapping[str, Any], algorithm: str) -> Callable[[], Tensor]:
    """Return its call on the buffers of ours, by ``"monolith"`` or ``"two-kernel"``."""
    from flashinfer.mamba import checkpointing_ssu as run

    batch, _, heads, _ = buffers["x"].shape
    place = {"device": buffers["x"].device}
    scratch = {}
    if algorithm == "two-kernel":
        scratch = {
            "cb_scaled": torch.empty(batch, heads, 32, 8, dtype=torch.bfloat16, **place),
            "cumAdt_vec": torch.empty(batch, heads, 16, **place),
            "cb_old": torch.empty(batch, heads, 32, 8, dtype=torch.bfloat16, **place),
        }
    return lambda: run(**buffers, algorithm=algorithm, **scratch)


def selective_state_update(buffers: Mapping[str, Any]) -> Callable[[], Tensor]:
    """Return its call: one token updates the state in place, several tokens store a state each."""
    from flashinfer.mamba import selective_state_update as run

    state, x, indices = buffers["state"], buffers["x"], buffers["state_batch_indices"]
    batch, tokens = x.shape[:2]
    options = {
        "D": buffers["D"], "dt_bias": buffers["dt_bias"], "dt_softplus": True, "state_batch_indices": indices,
    }  # fmt: skip
    inputs = [x, buffers["dt"], buffers["A"], buffers["B"], buffers["C"]]
    if tokens == 1:
        inputs = [tensor if tensor is buffers["A"] else tensor[:, 0] for tensor in inputs]
        return lambda: run(state, *inputs, out=buffers["out"][:, 0], **options)
    snapshots = torch.empty(batch, tokens, *state.shape[1:], dtype=state.dtype, device=state.device)
    places = torch.arange(batch, device=state.device, dtype=torch.int32)
    return lambda: run(
        state, *inputs, out=buffers["out"], disable_state_update=True, cache_steps=tokens,
        intermediate_states_buffer=snapshots, intermediate_state_indices=places, **options,
    )  # fmt: skip


def replayssm_materialize(tables: list[Tensor], options: Mapping[str, Any]) -> Callable[[], None]:
    """Return its call with the tables and options of ours."""
    from flashinfer.mamba import replayssm_materialize as run

    return lambda: run(*tables, **options)
