"""Choosing tokens: greedy, or sampling whose randomness belongs to a token's place in its text.

Sampling adds Gumbel noise to the log-probabilities and takes the largest sum, which draws exactly from the softmax
(Gumbel 1954; Maddison, Tarlow and Minka 2014). The noise of a token is a pure function of (seed, request, position,
token id). A draft token is accepted when it is the one that would have been drawn at its place, so the distribution is
the model's own and the text is the same with and without drafts, alone and in any batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from replayssm.checks import check_integer
from replayssm.gumbel import gumbel_noise


def signed_seed(seed: int) -> int:
    """The number in the range of int64 that has the same 64 bits.

    Example:
        >>> signed_seed(5), signed_seed(2**64 - 1)
        (5, -1)
    """
    return seed - 2**64 if seed >= 2**63 else seed


def _likeliest(scores: Tensor) -> Tensor:
    """The argmax over the last axis, the smallest of equal ones; -1 where there is a NaN or no token is possible."""
    best = scores.argmax(dim=-1, keepdim=True)  # the place of a NaN, if there is one
    return best.where(scores.gather(-1, best) > -torch.inf, -1).squeeze(-1)


@dataclass(frozen=True)
class Greedy:
    """Take the most likely token; of equal ones the smallest id."""

    def choose(self, logits: Tensor, seeds: Tensor, requests: Tensor, positions: Tensor) -> Tensor:
        """Return int64 ``[rows, tokens]``, the argmax of ``logits`` ``[rows, tokens, vocab]``; -1 as in ``Gumbel``."""
        return _likeliest(logits)


@dataclass(frozen=True)
class Gumbel:
    """Sample from ``softmax(logits / temperature)`` after the top-k and then the top-p cut.

    Attributes:
        temperature: > 0, finite.
        top_k: keep the k most likely tokens (all that tie with the k-th one), None for all.
        top_p: keep the most likely tokens while those before them hold less than this probability, None for all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("temperature", self.temperature), ("top_p", self.top_p)):
            if isinstance(value, bool) or not (isinstance(value, Real) or (value is None and name == "top_p")):
                raise TypeError(f"{name}: expected a number, got {value!r} of type {type(value).__name__}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"temperature: expected a finite number > 0 (for the most likely token set do_sample=False), "
                f"got {self.temperature}"
            )
        if self.top_k is not None:
            check_integer("top_k", self.top_k)
            if self.top_k < 1:
                raise ValueError(f"top_k: expected a number >= 1 or None, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected 0 < top_p <= 1 or None, got {self.top_p}")

    def choose(self, logits: Tensor, seeds: Tensor, requests: Tensor, positions: Tensor) -> Tensor:
        """Draw one token per place. Nothing is read back, so that it can be part of a graph.

        Args:
            logits: ``[rows, tokens, vocab]``, any float dtype.
            seeds: int64 ``[rows]``, keys of the noise.
            requests: int64 ``[rows]``.
            positions: int64 ``[rows, tokens]``.

        Returns:
            int64 ``[rows, tokens]``; -1 where a logit is NaN or none is above minus infinity.
        """
        scores = logits.to(torch.float64) / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            smallest = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < smallest, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            scores = _keep_top_p(scores, self.top_p)
        return _likeliest(scores + gumbel_noise(seeds[:, None], requests[:, None], positions, scores.shape[-1]))


def _keep_top_p(scores: Tensor, top_p: float) -> Tensor:
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    dropped = torch.zeros_like(mass_before, dtype=torch.bool).scatter(-1, order, mass_before >= top_p)
    dropped.scatter_(-1, order[..., :1], False)  # the most likely token stays whatever the rounding of the sums
    return scores.masked_fill(dropped, -torch.inf)
