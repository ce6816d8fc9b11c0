"""What tests of the ops need: random calls with poisoned memory, the tolerance table, a lifecycle of random steps.

Nothing here imports a test framework. The truth is ``reference.py`` of each op family, run by ``using("reference")``.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm import dispatch
from replayssm.mamba.arguments import STATE_DTYPES as STATE_DTYPES
from replayssm.rounding import SCALED_DTYPES, encode

# Half a unit in the last place, relative to the value: the error of one rounding to nearest.
_HALF_ULP = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float8_e4m3fn: 2.0**-4}
# fp32 sums of n products differ from fp64 by at most n half-units of the sum of magnitudes, in practice by sqrt(n);
# Measured: 8 with 20 rows and a state dim of 128.
_FP32_SUM = 32 * 2.0**-24


class Tolerance(NamedTuple):
    """Largest accepted ``|actual - expected|`` is ``relative * |expected| + of_largest * max |expected|``."""

    relative: float
    of_largest: float


def output_tolerance(output: torch.dtype, state: torch.dtype) -> Tolerance:
    """Tolerance of an output against the fp64 reference.

    Args:
        output: type of ``out``: its own rounding, once in the result and once in the reference.
        state: type of the state. Both sides round the same flushed state, and where an fp64 and an fp32 sum fall on
            both sides of a tie, a few elements differ by one step; an eighth of a step of the output allows for them.

    Returns:
        The tolerance.
    """
    step = 2.0**-7 if state == torch.int8 else 2 * _HALF_ULP[state]
    return Tolerance(2 * _HALF_ULP[output], _FP32_SUM + (0.0 if state == torch.float32 else step / 8))


def state_tolerance(state: torch.dtype) -> Tolerance:
    """Tolerance of a decoded state against the fp64 reference: one step of its type, at most.

    Args:
        state: type of the state; the steps of the 8-bit types are taken relative to the largest element.

    Returns:
        The tolerance.
    """
    if state == torch.float32:
        return Tolerance(0.0, _FP32_SUM)
    if state == torch.int8:
        return Tolerance(0.0, 1.01 / 127)
    return Tolerance(2 * _HALF_ULP[state], 2.0**-9 / 448 * 1.01 if state == torch.float8_e4m3fn else _FP32_SUM)


def assert_close(name: str, actual: Tensor, expected: Tensor, tolerance: Tolerance) -> None:
    """Compare two tensors in fp64 and report the worst element.

    Args:
        name: what is compared, for the message.
        actual: any floating-point dtype.
        expected: same shape.
        tolerance: see ``Tolerance``.

    Raises:
        AssertionError: shapes differ, a value is not finite, or an element is too far off.
    """
    assert actual.shape == expected.shape, f"{name}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    if not actual.numel():
        return
    actual, expected = actual.double(), expected.double()
    assert bool(expected.isfinite().all()), f"{name}: the expectation is not finite"
    allowed = tolerance.relative * expected.abs() + tolerance.of_largest * expected.abs().max()
    excess = ((actual - expected).abs() - allowed).nan_to_num(torch.inf)
    worst = int(excess.argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), actual.shape))
    assert excess.flatten()[worst] <= 0, (
        f"{name}{list(where)}: {actual[where].item():.9g}, expected {expected[where].item():.9g} within "
        f"{allowed[where].item():.3g}; {int((excess > 0).sum())} of {actual.numel()} elements are off"
    )


@contextlib.contextmanager
def using(module: str) -> Iterator[None]:
    """Let the public functions run another implementation, ``"reference"`` say, on every device for the block.

    Example:
        >>> with using("reference"):
        ...     pass
    """
    before = dict(dispatch.IMPLEMENTATIONS)
    dispatch.IMPLEMENTATIONS.update(dict.fromkeys(before, module))
    try:
        yield
    finally:
        dispatch.IMPLEMENTATIONS.update(before)


@dataclass(frozen=True)
class SsuCall:
    """One call of ``checkpointing_ssu``. A field named as an argument is passed as that argument."""

    state: Tensor
    x_cache: Tensor
    B_cache: Tensor
    dt_cache: Tensor
    ring_start: Tensor
    prev_num_accepted_tokens: Tensor
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    out: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    state_batch_indices: Tensor
    state_scale: Tensor | None
    dt_softplus: bool
    max_window: int
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """The call's keyword arguments."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "options"}
        return {**named, **self.options}

    def clone(self) -> SsuCall:
        """The same call on memory of its own. Expanded tensors, which are never written, stay as they are."""
        copies: dict[str, Any] = {name: t.clone() for name, t in self._written().items()}
        return replace(self, **copies)

    def rows(self, rows: list[int]) -> SsuCall:
        """The call for some of its requests, in the given order, on memory of its own."""
        copy, pick = self.clone(), torch.tensor(rows)
        dt = self.dt[..., 0][pick].unsqueeze(3).expand(len(rows), *self.dt.shape[1:])
        z = None if self.z is None else self.z[pick]
        return replace(
            copy, x=self.x[pick], dt=dt, B=self.B[pick], C=self.C[pick], z=z, out=copy.out[pick],
            state_batch_indices=self.state_batch_indices[pick],
        )  # fmt: skip

    def memory(self) -> dict[str, Tensor]:
        """Everything that a call may write, as bytes."""
        return {name: as_bytes(t) for name, t in self._written().items()}

    def _written(self) -> dict[str, Tensor]:
        names = ("state", "x_cache", "B_cache", "dt_cache", "out", "state_scale")
        tensors = {name: getattr(self, name) for name in names}
        return {name: t for name, t in tensors.items() if t is not None}


def as_bytes(tensor: Tensor) -> Tensor:
    """A copy of the tensor's bytes: equal bytes are equal, NaN included."""
    return tensor.contiguous().view(torch.uint8).clone()


def random_state(
    generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Codes and scale of a normally distributed state ``[..., nheads, headdim, dstate]``."""
    return encode(torch.randn(shape, generator=generator), dtype)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory that nobody may read: NaN, in int8 the one code that is never stored."""
    if dtype == torch.int8:
        return torch.full(shape, -128, dtype=dtype)
    return torch.full(shape, torch.nan).to(dtype)


def random_ssu_call(
    *,
    live: tuple[int, ...],
    seq_len: int,
    window: int,
    nheads: int = 6,
    headdim: int = 5,
    dstate: int = 11,
    ngroups: int = 2,
    spare_rows: int = 0,
    ring_start: tuple[int, ...] | None = None,
    state_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    with_z: bool = True,
    seed: int = 0,
) -> SsuCall:
    """A call on a pool of which only the live memory holds numbers; everything else holds NaN.

    Args:
        live: live rows of each request; a negative number makes the request padding.
        seq_len: T.
        window: the window that is passed.
        nheads: heads.
        headdim: head dim.
        dstate: state dim.
        ngroups: groups.
        spare_rows: ring rows beyond ``window + seq_len``.
        ring_start: oldest live row of each request; random when None.
        state_dtype: type of the state.
        dtype: type of the activations.
        with_z: gate the output.
        seed: of everything random.

    Returns:
        The call. Slots are in a random order within a pool of ``len(live) + 3``.
    """
    g = torch.Generator().manual_seed(seed)
    batch, slots, ring_len = len(live), len(live) + 3, window + seq_len + spare_rows
    state = poisoned((slots, nheads, headdim, dstate), state_dtype)
    scale = poisoned((slots, nheads, headdim), torch.float32) if state_dtype in SCALED_DTYPES else None
    x_cache = poisoned((slots, nheads, ring_len, headdim), dtype)
    B_cache = poisoned((slots, ngroups, ring_len, dstate), dtype)
    dt_cache = poisoned((slots, nheads, ring_len), torch.float32)
    starts = torch.full((slots,), -(1 << 30), dtype=torch.int32)
    counts = starts.clone()
    indices = torch.randperm(slots, generator=g)[:batch]
    for row, (slot, count) in enumerate(zip(indices.tolist(), live, strict=True)):
        if count < 0:
            indices[row] = -1
            continue
        start = int(torch.randint(ring_len, (1,), generator=g)) if ring_start is None else ring_start[row]
        starts[slot], counts[slot] = start, count
        state[slot], slot_scale = random_state(g, (nheads, headdim, dstate), state_dtype)
        if scale is not None and slot_scale is not None:
            scale[slot] = slot_scale
        rows = (start + torch.arange(count)) % ring_len
        x_cache[slot, :, rows] = torch.randn(nheads, count, headdim, generator=g).to(dtype)
        B_cache[slot, :, rows] = torch.randn(ngroups, count, dstate, generator=g).to(dtype)
        dt_cache[slot, :, rows] = torch.rand(nheads, count, generator=g)
    head, token = (nheads, headdim), (batch, seq_len)
    randn = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    return SsuCall(
        state=state, x_cache=x_cache, B_cache=B_cache, dt_cache=dt_cache, ring_start=starts,
        prev_num_accepted_tokens=counts, x=randn(*token, *head).to(dtype),
        dt=randn(*token, nheads, 1).to(dtype).expand(*token, *head),
        A=(-0.2 - torch.rand(nheads, 1, 1, generator=g)).expand(*head, dstate),
        B=randn(*token, ngroups, dstate).to(dtype), C=randn(*token, ngroups, dstate).to(dtype),
        out=poisoned((*token, *head), dtype), D=randn(nheads, 1).expand(head),
        z=randn(*token, *head).to(dtype) if with_z else None, dt_bias=randn(nheads, 1).expand(head),
        state_batch_indices=indices, state_scale=scale, dt_softplus=True, max_window=window,
    )  # fmt: skip


def lifecycle(seed: int, rounds: int, max_tokens: int) -> Iterator[tuple[int, int]]:
    """Random steps of one request: how many tokens it verifies, and how many of them it keeps.

    Args:
        seed: of the random choices.
        rounds: steps.
        max_tokens: most tokens of a step.

    Yields:
        (seq_len, num_accepted), ``1 <= seq_len <= max_tokens``, ``0 <= num_accepted <= seq_len``. None and all of the
        tokens are kept more often than chance would.

    Example:
        >>> all(0 <= kept <= tokens <= 4 for tokens, kept in lifecycle(seed=0, rounds=9, max_tokens=4))
        True
    """
    choose = random.Random(seed)
    for _ in range(rounds):
        seq_len = choose.randint(1, max_tokens)
        yield seq_len, choose.choice((0, seq_len, choose.randint(0, seq_len)))
