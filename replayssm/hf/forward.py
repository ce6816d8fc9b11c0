"""One forward of an attached model over the selected rows of a ReplayCache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from replayssm.hf.attachment import attachment_of
from replayssm.hf.cache import ReplayCache
from replayssm.hf.linear import RowProduct, may_pack


class Forward:
    """Calls the model with a cache under the name that its transformers version has for it.

    The language-model head is applied here, so that its rows do not depend on their number.

    Attributes:
        exact: whether the matrix products were measured to treat every row alike (``RowProduct``).
    """

    def __init__(self, model: PreTrainedModel, cache: ReplayCache) -> None:
        attachment = attachment_of(model)
        assert attachment is not None
        self._model: Any = model.base_model
        self._cache = cache
        self._head = RowProduct(attachment.head, may_pack(attachment.linears))
        self._arguments = {cache.name: cache, "use_cache": True}
        self.exact = self._head.exact and cache.exact

    def __call__(self, windows: Sequence[Sequence[int]]) -> Tensor:
        """Score token ids, equally many per selected row; returns fp32 logits ``[rows, tokens, vocab]``."""
        return self._head(self._hidden(windows))

    def prefill(self, row: int, prompt: Sequence[int]) -> Tensor:
        """Run a prompt; returns the logits of its last token ``[1, 1, vocab]``.

        One row at a time, because prompts differ in length and must not be padded.
        """
        self._cache.select([row])
        return self._head(self._hidden([prompt])[:, -1:])

    def _hidden(self, windows: Sequence[Sequence[int]]) -> Tensor:
        ids = torch.tensor(windows, device=self._model.device)
        return self._model(input_ids=ids, **self._arguments).last_hidden_state
