"""Drafts from a smaller model of a supported family, rolled back by replay like the model it helps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from transformers import PreTrainedModel

from replayssm.hf.attach import attached
from replayssm.hf.cache import ReplayCache
from replayssm.hf.forward import Forward
from replayssm.hf.sampling import Greedy, Gumbel


class ModelDrafter:
    """Drafts that the draft model would choose itself, with the same noise when sampling.

    The k tokens of a draft take k forwards, each of which scores the whole open window again: nothing is committed
    before the verdict, so there is nothing to roll back.

    Args:
        model: attached for the time of the generation if it is not.
        sampler: how tokens are chosen.
        request_ids: identity of each row's text for the noise.
        num_draft_tokens: longest draft.
        window: of the draft model's pool; raised to ``num_draft_tokens + 1`` if it is smaller.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sampler: Greedy | Gumbel,
        request_ids: Sequence[int],
        num_draft_tokens: int,
        window: int,
    ) -> None:
        self._sampler, self._requests = sampler, torch.tensor(request_ids, device=model.device)
        # A fully accepted draft leaves its last token unseen, next to the token chosen after it.
        max_tokens = num_draft_tokens + 1
        with ExitStack() as stack:
            stack.enter_context(attached(model))
            self._cache = stack.enter_context(
                ReplayCache(model, len(request_ids), max_tokens=max_tokens, window=max(window, max_tokens))
            )
            self._forward = Forward(model, self._cache)
            self._held = stack.pop_all()
        # Row -> draft of the newest round and how many of the window's tokens came before it.
        self._open: dict[int, tuple[list[int], int]] = {}

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """See Drafter: the draft model's prefill."""
        self._rows = [list(prompt) for prompt in prompts]
        self._seen = [len(prompt) for prompt in prompts]
        for row, prompt in enumerate(prompts):
            self._forward.prefill(row, prompt)

    def propose(self, rows: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
        """See Drafter."""
        self._settle()
        steps = max(limits)
        if not steps:
            return [[] for _ in rows]
        self._cache.select(rows)
        unseen = [self._rows[row][self._seen[row] :] for row in rows]
        drafts: list[list[int]] = [[] for _ in rows]
        device = self._requests.device
        requests, here = self._requests[list(rows)], torch.arange(len(rows), device=device)
        for step in range(steps):
            if step:
                self._cache.accept([0] * len(rows))
            width = max(map(len, unseen)) + step
            windows = [(old + draft + [0] * width)[:width] for old, draft in zip(unseen, drafts, strict=True)]
            ends = torch.tensor([len(old) + step - 1 for old in unseen], device=device)
            places = torch.tensor([len(self._rows[row]) + step for row in rows], device=device)
            logits = self._forward(windows)[here, ends][:, None]
            chosen = self._sampler.choose(logits, requests, places[:, None])
            for draft, token in zip(drafts, chosen[:, 0].tolist(), strict=True):
                draft.append(token)
        self._open = {row: (draft, len(old)) for row, draft, old in zip(rows, drafts, unseen, strict=True)}
        return [draft[:limit] for draft, limit in zip(drafts, limits, strict=True)]

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """See Drafter."""
        self._rows[row].extend(tokens)

    def _settle(self) -> None:
        """Keep of the newest window what became text."""
        if not self._open:
            return
        kept = []
        for row, (draft, old) in self._open.items():
            text = self._rows[row][self._seen[row] + old :]
            fed = draft[:-1]
            right = next((i for i, token in enumerate(fed) if i >= len(text) or token != text[i]), len(fed))
            kept.append(old + right)
            self._seen[row] += old + right
        self._cache.accept(kept)
        self._open = {}

    def close(self) -> None:
        """See Drafter."""
        self._held.close()
