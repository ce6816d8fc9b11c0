"""Random inputs of ``chunk_scan`` and of the exact decode."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from replayssm.ssd import chunk_scan


@dataclass(frozen=True)
class Case:
    """Inputs of packed sequences, token axis first."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    chunk_size: int
    dt_softplus: bool = True

    @property
    def sizes(self):
        """H, P, G, N."""
        return *self.x.shape[1:], *self.B.shape[1:]

    @property
    def state_shape(self):
        return *self.x.shape[1:], self.B.shape[2]

    def tokens(self, first, end):
        """The same case with some of its tokens."""
        part = {name: getattr(self, name)[first:end] for name in ("x", "dt", "B", "C")}
        return replace(self, **part, z=None if self.z is None else self.z[first:end])

    def arguments(self):
        named = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "chunk_size", "dt_softplus")
        return {name: getattr(self, name) for name in named}

    def scan(self, **options):
        return chunk_scan(**{**self.arguments(), **options})

    def states(self, sequences=1):
        """Memory for states, full of NaN."""
        return torch.full((sequences, *self.state_shape), torch.nan)

    def whole(self, initial=None):
        """Outputs, final state and boundary state of one sequence in one call."""
        final, boundary = self.states(), self.states()
        initial = None if initial is None else initial[None]
        out = self.scan(initial_states=initial, final_states=final, boundary_states=boundary)
        return out, final[0], boundary[0]


def random_case(
    tokens, chunk_size=16, *, nheads=6, headdim=5, ngroups=2, dstate=11, dtype=torch.float32, D="head", with_z=True,
    with_bias=True, seed=0,
):  # fmt: skip
    g = torch.Generator(torch.get_default_device()).manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    skip = {"head": lambda: randn(nheads), "element": lambda: randn(nheads, headdim), None: lambda: None}[D]()
    return Case(
        x=randn(tokens, nheads, headdim).to(dtype), dt=randn(tokens, nheads).to(dtype),
        A=-0.05 - torch.rand(nheads, generator=g), B=randn(tokens, ngroups, dstate).to(dtype),
        C=randn(tokens, ngroups, dstate).to(dtype), D=skip,
        z=randn(tokens, nheads, headdim).to(dtype) if with_z else None,
        dt_bias=randn(nheads) - 1 if with_bias else None, chunk_size=chunk_size,
    )  # fmt: skip


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


WRITTEN = ("out", "final_states", "boundary_states", "chunk_states")


def full_arguments():
    """A call with every argument: two sequences, of 25 and 15 tokens, that go on in slots 2 and 0 of 4."""
    case, slots = random_case(40), 4
    (H, P, G, N), Q, T = case.sizes, case.chunk_size, len(case.x)
    states = {name: torch.full((2, H, P, N), 7.0) for name in ("final_states", "boundary_states")}
    return {
        **case.arguments(), "cu_seqlens": int32(0, 25, T), "initial_states": torch.randn(2, H, P, N),
        "x_buffer": torch.randn(slots, Q, H, P), "dt_buffer": torch.randn(slots, Q, H),
        "B_buffer": torch.randn(slots, Q, G, N), "num_buffered": int32(3, 0, 15, 7), "ring_start": int32(0, 15, 1, 2),
        "batch_indices": torch.tensor([2, 0]), "out": torch.full((T, H, P), 7.0), **states,
        "chunk_states": torch.full((T // Q + 2, H, P, N), 7.0),
    }  # fmt: skip
