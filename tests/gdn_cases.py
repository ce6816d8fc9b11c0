"""Calls of the GDN ops for the tests: memory that nobody may read holds NaN, sizes differ from each other.

Tensors are made on torch's default device, with the same random numbers everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from replayssm.gdn_decode import gated_delta_rule_checkpointing, gated_delta_rule_mtp
from replayssm.testing import as_bytes, poisoned

WINDOWS = ("replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta")


@dataclass(frozen=True)
class MtpCall:
    """One call of ``gated_delta_rule_mtp``. A field named as an argument is passed as that argument."""

    q: Tensor
    k: Tensor
    v: Tensor
    initial_state: Tensor
    initial_state_indices: Tensor
    A_log: Tensor
    a: Tensor
    dt_bias: Tensor
    b: Tensor
    output: Tensor | None
    scale: float | None = 0.37
    disable_state_update: bool = False
    use_qk_l2norm: bool = True
    backend: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "options"}
        return {**named, **self.options}

    def clone(self) -> MtpCall:
        options = {name: t.clone() if isinstance(t, Tensor) else t for name, t in self.options.items()}
        return replace(
            self, initial_state=self.initial_state.clone(), output=None if self.output is None else self.output.clone(),
            options=options,
        )  # fmt: skip

    def run(self, **changes: Any) -> MtpCall:
        """The call on memory of its own, with the given fields or options changed; the output is filled in."""
        names = {f.name for f in fields(self)}
        call = replace(self, **{n: x for n, x in changes.items() if n in names}).clone()
        options = {n: x for n, x in changes.items() if n not in names}
        call.options.update({n: x.clone() if isinstance(x, Tensor) else x for n, x in options.items()})
        output, state = gated_delta_rule_mtp(**call.arguments())
        assert state is call.initial_state and (call.output is None or output is call.output)
        return replace(call, output=output)

    def tokens(self, first: int, end: int) -> MtpCall:
        """The call for some of the tokens."""
        parts = {name: getattr(self, name)[:, first:end] for name in ("q", "k", "v", "a", "b", "output")}
        return replace(self, **parts)

    def rows(self, rows: list[int]) -> MtpCall:
        """The call for some of the requests, in the given order."""
        names = ("q", "k", "v", "a", "b", "output", "initial_state_indices")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def with_windows(self, dtype: torch.dtype | None = None) -> MtpCall:
        """The same call, frozen, with windows full of sevens."""
        T, H, K = self.k.shape[1:]
        HV, V = self.v.shape[2:]
        slots, dtype = self.initial_state.shape[0], dtype or self.k.dtype
        shapes = ((HV, T, V, dtype), (H, T, K, dtype), (HV, T, torch.float32), (HV, T, torch.float32))
        full = [torch.full((slots, *shape), 7.0, dtype=dtype) for *shape, dtype in shapes]
        windows = dict(zip(WINDOWS, full, strict=True))
        return replace(self, disable_state_update=True, options={"cache_replayssm": True, **windows})

    def windows(self) -> list[Tensor]:
        return [self.options[name] for name in WINDOWS]

    def live(self) -> list[tuple[int, int]]:
        return [(row, slot) for row, slot in enumerate(self.initial_state_indices.tolist()) if slot >= 0]

    def memory(self) -> dict[str, Tensor]:
        """Everything that a call may write, as bytes."""
        tensors = {"initial_state": self.initial_state, "output": self.output, **self.options}
        return {name: as_bytes(t) for name, t in tensors.items() if isinstance(t, Tensor)}


def mtp_call(
    batch: int = 3,
    T: int = 4,
    H: int = 2,
    HV: int = 6,
    K: int = 16,
    V: int = 11,
    *,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    size: float = 1.0,
    seed: int = 42,
) -> MtpCall:
    """A call with descending slots, the last request padding (if there are more than one), NaN in slots not used."""
    g = torch.Generator("cpu").manual_seed(seed)
    randn = lambda *shape: size * drawn(torch.randn, *shape, generator=g)  # noqa: E731
    indices = torch.arange(batch, 0, -1)
    if batch > 1:
        indices[-1] = -1
    state = poisoned((batch + 3, HV, V, K), state_dtype)
    for slot in indices.tolist():
        if slot >= 0:
            state[slot] = randn(HV, V, K)
    return MtpCall(
        q=randn(batch, T, H, K).to(dtype), k=randn(batch, T, H, K).to(dtype), v=randn(batch, T, HV, V).to(dtype),
        initial_state=state, initial_state_indices=indices, A_log=randn(HV), a=randn(batch, T, HV).to(dtype),
        dt_bias=randn(HV), b=randn(batch, T, HV).to(dtype), output=torch.full((batch, T, HV, V), 3.0, dtype=dtype),
    )  # fmt: skip


def windows_of_layers(
    layers: int, slots: int, T: int, H: int = 2, HV: int = 6, K: int = 16, V: int = 11, *,
    dtype: torch.dtype = torch.float32, state_dtype: torch.dtype = torch.float32, size: float = 1.0, seed: int = 7,
) -> dict[str, Tensor]:  # fmt: skip
    """Checkpoint and windows of several layers, full of numbers, by argument name."""
    g = torch.Generator("cpu").manual_seed(seed)
    randn = lambda *shape: size * drawn(torch.randn, layers, slots, *shape, generator=g)  # noqa: E731
    return {
        "checkpoint_state": randn(HV, V, K).to(state_dtype), "rawv_cache": randn(HV, T, V).to(dtype),
        "rawk_cache": randn(H, T, K).to(dtype), "g_cache": -randn(HV, T).abs(),
        "beta_cache": torch.sigmoid(randn(HV, T)),
    }  # fmt: skip


RINGS = ("v_cache", "k_cache", "g_cache", "beta_cache")
WRITTEN = ("state", *RINGS, "output")


@dataclass(frozen=True)
class LazyCall:
    """One call of ``gated_delta_rule_checkpointing``; every field is passed as the argument of its name."""

    state: Tensor
    v_cache: Tensor
    k_cache: Tensor
    g_cache: Tensor
    beta_cache: Tensor
    ring_start: Tensor
    num_live: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    output: Tensor
    state_batch_indices: Tensor
    max_window: int
    backend: str = "auto"
    pad_slot_id: int = -1

    def arguments(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def run(self, **changes: Any) -> LazyCall:
        """The call on memory of its own, with the given fields changed."""
        call = replace(self, **changes)
        call = replace(call, **{name: getattr(call, name).clone() for name in WRITTEN})
        assert gated_delta_rule_checkpointing(**call.arguments()) is call.output
        return call


def lazy_call(
    live, T, window, *, starts=None, H=2, HV=6, K=16, V=11, spare=0, dtype=torch.float32, ring_dtype=None,
    state_dtype=torch.float32, seed=0,
):  # fmt: skip
    """Requests in random slots; a negative number of live rows makes one padding; nobody's memory holds NaN."""
    g = torch.Generator("cpu").manual_seed(seed)
    randn = lambda *shape: drawn(torch.randn, *shape, generator=g)  # noqa: E731
    batch, slots, ring_len = len(live), len(live) + 3, window + T + spare
    ring_dtype = ring_dtype or dtype
    tensors = {
        "state": poisoned((slots, HV, V, K), state_dtype), "v_cache": poisoned((slots, HV, ring_len, V), ring_dtype),
        "k_cache": poisoned((slots, H, ring_len, K), ring_dtype),
        "g_cache": poisoned((slots, HV, ring_len), torch.float32),
        "beta_cache": poisoned((slots, HV, ring_len), torch.float32),
    }  # fmt: skip
    start, num_live = torch.full((2, slots), -(1 << 30), dtype=torch.int32)
    indices = drawn(torch.randperm, slots, generator=g)[:batch]
    for row, (slot, count) in enumerate(zip(indices.tolist(), live, strict=True)):
        if count < 0:
            indices[row] = -1
            continue
        start[slot] = int(drawn(torch.randint, ring_len, (1,), generator=g)) if starts is None else starts[row]
        num_live[slot] = count
        rows = (start[slot] + torch.arange(count)) % ring_len
        tensors["state"][slot] = randn(HV, V, K)
        tensors["v_cache"][slot][:, rows] = randn(HV, count, V).to(ring_dtype)
        tensors["k_cache"][slot][:, rows] = randn(H, count, K).to(ring_dtype)
        tensors["g_cache"][slot][:, rows] = -randn(HV, count).abs()
        tensors["beta_cache"][slot][:, rows] = torch.sigmoid(randn(HV, count))
    return LazyCall(
        **tensors, ring_start=start, num_live=num_live, q=randn(batch, T, H, K).to(dtype),
        k=randn(batch, T, H, K).to(dtype), v=randn(batch, T, HV, V).to(dtype), a=randn(batch, T, HV), A_log=randn(HV),
        b=randn(batch, T, HV), dt_bias=randn(HV), output=torch.full((batch, T, HV, V), 3.0).to(dtype),
        state_batch_indices=indices, max_window=window,
    )  # fmt: skip


def drawn(draw: Callable[..., Tensor], *args: Any, generator: torch.Generator) -> Tensor:
    """Random numbers of a generator on the CPU, on the default device."""
    return draw(*args, generator=generator, device="cpu").to(torch.get_default_device())


def normal(tensor: Tensor) -> Tensor:
    """Zeros for NaN, and for numbers so small that their type has lost digits."""
    return torch.where(tensor.abs() > 1e-30, tensor.double(), 0.0)


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
