"""One forward of an attached model over the selected rows of a ReplayCache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from replayssm.hf.cache import ReplayCache

# Tokens of prompts that go through the model together. On a CPU that gains nothing.
_PREFILL_TOKENS = 16384


class Forward:
    """Calls the model with a cache under the name that its transformers version has for it.

    The head is applied here, so that a prompt's is to its last token alone.
    """

    def __init__(self, model: PreTrainedModel, cache: ReplayCache) -> None:
        self._model: Any = model.base_model
        self._cache = cache
        self._arguments = {cache.name: cache, "use_cache": True}

    def score(self, ids: Tensor) -> Tensor:
        """Score token ids ``[rows, tokens]`` of the selected rows; returns fp32 logits ``[rows, tokens, vocab]``."""
        return self._cache.head(self._hidden(ids))

    def score_one(self, ids: Tensor, places: Tensor) -> Tensor:
        """Like ``score``, for one token of every row, at ``places`` int64 ``[rows]``; returns ``[rows, 1, vocab]``."""
        hidden = self._hidden(ids)
        return self._cache.head(hidden.gather(1, places[:, None, None].expand(-1, 1, hidden.shape[-1])))

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> Iterator[tuple[list[int], Tensor]]:
        """Run prompts by row, each in one forward; yields rows and the logits of their last tokens.

        Yields:
            Rows, and ``[rows, 1, vocab]``.
        """
        for rows in self._groups(prompts):
            self._cache.select(rows)
            ids = torch.tensor([prompts[row] for row in rows], device=self._model.device)
            yield rows, self._cache.head(self._hidden(ids)[:, -1:])

    def _groups(self, prompts: Mapping[int, Sequence[int]]) -> list[list[int]]:
        """Rows that run together: of one length, because prompts must not be padded."""
        alike: dict[int, list[int]] = {}
        for row, prompt in prompts.items():
            alike.setdefault(len(prompt), []).append(row)
        groups = []
        for length, rows in alike.items():
            most = 1 if self._model.device.type == "cpu" else max(1, _PREFILL_TOKENS // length)
            groups += [rows[start : start + most] for start in range(0, len(rows), most)]
        return groups

    def _hidden(self, ids: Tensor) -> Tensor:
        return self._model(input_ids=ids, **self._arguments).last_hidden_state
