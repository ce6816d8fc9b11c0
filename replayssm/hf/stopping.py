"""When a row ends, and what may change its scores: end tokens, length, stopping criteria and logits processors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList


@dataclass
class Rules:
    """Rules for every row of a batch.

    Attributes:
        max_new_tokens: a row ends at this many new tokens.
        end_tokens: a row ends behind any of these.
        processors: called with the row so far ``[1, length]`` and the fp32 scores ``[1, vocab]`` of its next token.
        criteria: called with the row so far, its newest token included, and that token's scores.
        padded_rows: whether processors and criteria see the row as transformers pads it, on the left to the longest
            prompt (their lengths count that way), or without padding.
    """

    max_new_tokens: int
    end_tokens: frozenset[int] = frozenset()
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    padded_rows: bool = False

    @property
    def per_token(self) -> bool:
        """Whether each token has to be decided on its own, in order."""
        return bool(self.processors) or bool(self.criteria)

    def cut(self, choices: Sequence[int], draft: Sequence[int], room: int) -> tuple[list[int], bool]:
        """Accept a draft without processors and criteria.

        Args:
            choices: the model's own token behind the last one and behind each draft token.
            draft: the draft tokens; the first wrong one and what follows it is dropped.
            room: new tokens that the row may still have, >= 1.

        Returns:
            The new tokens, at least one, and whether the row has ended.

        Example:
            >>> rules = Rules(max_new_tokens=9, end_tokens=frozenset({0}))
            >>> rules.cut([4, 5, 6], [4, 9], room=9), rules.cut([4, 0, 6], [4, 0], room=9)
            (([4, 5], False), ([4, 0], True))
        """
        accepted = 0
        while accepted < len(draft) and choices[accepted] == draft[accepted]:
            accepted += 1
        new = list(choices[: min(accepted + 1, room)])
        for count, token in enumerate(new, 1):
            if token in self.end_tokens:
                return new[:count], True
        return new, len(new) == room

    def process(self, tokens: Any, scores: Any) -> Tensor:
        """Run the processors: ``tokens`` int64 ``[1, length]``, ``scores`` fp32 ``[1, vocab]``."""
        return self.processors(tokens, scores) if self.processors else scores

    def ends(self, tokens: Tensor, scores: Tensor, room: int) -> bool:
        """Whether a row ends behind its newest token ``tokens[0, -1]``, with ``room`` tokens left behind it."""
        # Criteria are asked behind every token, the last one too: they may keep count.
        stopped = bool(torch.as_tensor(self.criteria(tokens, scores)).any()) if self.criteria else False
        return stopped or room == 0 or int(tokens[0, -1]) in self.end_tokens
