"""One forward of an attached model over the selected rows of a ReplayCache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from replayssm.hf.cache import ReplayCache


class Forward:
    """Calls the model with a cache under the name that its transformers version has for it."""

    def __init__(self, model: PreTrainedModel, cache: ReplayCache) -> None:
        self._model, self._cache = model, cache
        self._arguments = {cache.name: cache, "use_cache": True}

    def __call__(self, windows: Sequence[Sequence[int]]) -> Tensor:
        """Score token ids, equally many per selected row; returns fp32 logits ``[rows, tokens, vocab]``."""
        ids = torch.tensor(windows, device=self._model.device)
        return self._model(input_ids=ids, **self._arguments).logits

    def prefill(self, row: int, prompt: Sequence[int]) -> Tensor:
        """Run a prompt; returns the logits of its last token ``[1, 1, vocab]``.

        One row at a time: in transformers' scan over whole prompts the bits of a row depend on the rows beside it
        (measured), and its memory grows with them.
        """
        self._cache.select([row])
        ids = torch.tensor([prompt], device=self._model.device)
        return self._model(input_ids=ids, logits_to_keep=1, **self._arguments).logits
