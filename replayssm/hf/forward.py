"""One forward of an attached model over the selected rows of a ReplayCache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from replayssm.hf.cache import ReplayCache


def group_by_length(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Numbers of the rows, those of one length together, shortest first."""
    groups: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(len(row), []).append(number)
    return [groups[length] for length in sorted(groups)]


class Forward:
    """Calls the model with a cache under the name that its transformers version has for it."""

    def __init__(self, model: PreTrainedModel, cache: ReplayCache) -> None:
        self._model = model
        self._arguments = {cache.name: cache, "use_cache": True}

    def __call__(self, windows: Sequence[Sequence[int]], last_only: bool = False) -> Tensor:
        """Score token ids, equally many per row; returns fp32 logits ``[rows, tokens or 1, vocab]``."""
        ids = torch.tensor(windows, device=self._model.device)
        if last_only:
            return self._model(input_ids=ids, logits_to_keep=1, **self._arguments).logits
        return self._model(input_ids=ids, **self._arguments).logits
