"""Drafts from a smaller model of a supported family, rolled back by replay like the model it helps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from transformers import PreTrainedModel

from replayssm.checks import check_range
from replayssm.hf.attach import attached
from replayssm.hf.attachment import most_tokens
from replayssm.hf.sampling import Greedy, Gumbel
from replayssm.hf.session import Shape, session


class ModelDrafter:
    """Drafts that the draft model would choose itself, with the same noise when sampling.

    The k tokens of a draft take k forwards, each of which scores the whole open window again: nothing is committed
    before the verdict, so there is nothing to roll back.

    Args:
        model: attached for the time of the generation if it is not.
        sampler: how tokens are chosen.
        seed: of the noise.
        request_ids: identity of each row's text for it.
        num_draft_tokens: longest draft.
        window: of the draft model's pool; raised to ``num_draft_tokens + 1`` if it is smaller.

    Raises:
        ValueError: a longer draft than the draft model's layers verify.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sampler: Greedy | Gumbel,
        seed: int,
        request_ids: Sequence[int],
        num_draft_tokens: int,
        window: int,
    ) -> None:
        # A fully accepted draft leaves its last token unseen, next to the token chosen after it.
        max_tokens = num_draft_tokens + 1
        shape = Shape(len(request_ids), max_tokens, max(window, max_tokens), sampler)
        with ExitStack() as stack:
            stack.enter_context(attached(model))
            most = most_tokens(model, exact=False) - 1
            check_range("num_draft_tokens", num_draft_tokens, 0, most, "what the draft model's layers verify")
            self._session = stack.enter_context(session(model, shape))
            self._held = stack.pop_all()
        self._session.step.start(seed, request_ids)
        # Row -> draft of the newest round and how many of the window's tokens came before it.
        self._open: dict[int, tuple[list[int], int]] = {}

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """See Drafter: the draft model's prefill."""
        self._rows = [list(prompt) for prompt in prompts]
        self._seen = [len(prompt) for prompt in prompts]
        for _ in self._session.prefill(prompts):
            pass

    def propose(self, rows: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
        """See Drafter."""
        self._settle()
        steps = max(limits)
        if not steps:
            return [[] for _ in rows]
        unseen = [self._rows[row][self._seen[row] :] for row in rows]
        drafts: list[list[int]] = [[] for _ in rows]
        for step in range(steps):
            if step:
                self._session.cache.accept([0] * len(rows))
            windows = [old + draft for old, draft in zip(unseen, drafts, strict=True)]
            chosen = self._session.step.choose(rows, windows, [self._seen[row] + 1 for row in rows])
            for draft, window, choices in zip(drafts, windows, chosen, strict=True):
                # Scores that are not numbers make a poor draft here; the model's own are refused.
                draft.append(max(choices[len(window) - 1], 0))
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
        self._session.cache.accept(kept)
        self._open = {}

    def close(self) -> None:
        """See Drafter."""
        self._held.close()
