"""Ways to generate, and how fast each is: transformers' own loop, replay, replay with drafts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from replayssm.hf import GenerationStats, generate


@dataclass(frozen=True)
class Generated:
    """One finished generation.

    Attributes:
        ids: new token ids, int64 ``[batch, tokens]``, without the prompts.
        seconds: wall time of the whole call, prompts included.
        prompt_seconds: the part of it up to the first new token.
        stats: what ``replayssm.hf.generate`` counted; None for transformers' own generate.
    """

    ids: Tensor
    seconds: float
    prompt_seconds: float
    stats: GenerationStats | None

    @property
    def tokens_per_second(self) -> float:
        """New tokens by the wall time of the whole call."""
        return self.ids.numel() / self.seconds


@dataclass
class Way:
    """One way to generate: its name, how to run it, and what came of it."""

    name: str
    generate: Callable[[], Generated]
    results: list[Generated] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Speed of the whole call, median over the timed runs."""
        return statistics.median(result.tokens_per_second for result in self.results)

    @property
    def decode_seconds(self) -> float:
        """Time from the first new token to the last, median over the timed runs."""
        return statistics.median(result.seconds - result.prompt_seconds for result in self.results)


def measure(ways: Sequence[Way], repeats: int, patience: float = float("inf"), *, warm: bool = False) -> None:
    """Run all ways in turn and keep what came of it in each.

    Args:
        ways: their results are replaced.
        repeats: timed runs of each.
        patience: seconds for one run of all ways, above which the runs to warm up count.
        warm: they have run before.
    """
    if not warm:
        started = time.perf_counter()
        for way in ways:
            way.results = [way.generate()]
        if time.perf_counter() - started > patience:
            return
    timed = [[way.generate() for way in ways] for _ in range(repeats)]
    for way, results in zip(ways, zip(*timed, strict=True), strict=True):
        way.results = list(results)


class _FirstToken(StoppingCriteria):
    """Stops nothing; takes the time of the first new token, in a batch too."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        self.time = self.time or time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def by_transformers(
    model: Any,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    max_time: float | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Generated:
    """Run transformers' own generate.

    Args:
        model: a causal LM that is not attached.
        input_ids: prompts of one length, int64 ``[batch, length]``.
        max_new_tokens: most new tokens.
        max_time: seconds after which it stops with what it has.
        temperature: 0 is greedy.
        top_k: as for ``replayssm.hf.generate``.
        top_p: the same.
        seed: of torch's generator.
    """
    sampling = {"temperature": temperature, "top_k": top_k or 0, "top_p": top_p or 1.0} if temperature > 0 else {}
    first = _FirstToken()
    torch.manual_seed(seed)
    started = _now(input_ids)
    sequences = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        max_time=max_time,
        do_sample=temperature > 0,
        stopping_criteria=StoppingCriteriaList([first]),
        **sampling,
    )
    seconds = _now(input_ids) - started
    return Generated(sequences[:, input_ids.shape[1] :], seconds, first.time - started, None)


def by_replay(
    model: Any,
    input_ids: Tensor,
    *,
    draft: str | None,
    max_new_tokens: int,
    draft_model: Any = None,
    num_draft_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    exact: bool = False,
    streamer: Any = None,
) -> Generated:
    """Run ``replayssm.hf.generate``, whose arguments these are; a temperature of 0 is greedy."""
    started = _now(input_ids)
    sequences, stats = generate(
        model,
        input_ids,
        draft=draft,
        draft_model=draft_model,
        num_draft_tokens=num_draft_tokens,
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        temperature=temperature or 1.0,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        exact=exact,
        streamer=streamer,
        return_stats=True,
    )
    seconds = _now(input_ids) - started
    decoding = stats.seconds - stats.prefill_seconds
    return Generated(sequences[:, input_ids.shape[1] :], seconds, seconds - decoding, stats)


def _now(tensor: Tensor) -> float:
    """The time when all work on the tensor's device is done."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
