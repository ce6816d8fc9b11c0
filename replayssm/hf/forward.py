"""One forward of an attached model over the selected rows of a ReplayCache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from replayssm.hf.attachment import attachment_of
from replayssm.hf.cache import ReplayCache
from replayssm.hf.linear import RowProduct, may_pack

# Tokens of prompts that go through the model together. On a CPU that gains nothing.
_PREFILL_TOKENS = 16384


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

    def check_exact(self) -> None:
        """Raise ValueError unless every token's logits depend on the text before it alone, bit for bit."""
        if not self.exact:
            raise ValueError(
                "exact: expected matrix products whose rows do not depend on how many are multiplied together, which "
                f"those of this model on '{self._model.device}' do not; on a CPU torch.set_num_threads(1) usually helps"
            )

    def score(self, ids: Tensor) -> Tensor:
        """Score token ids ``[rows, tokens]`` of the selected rows; returns fp32 logits ``[rows, tokens, vocab]``."""
        return self._head(self._hidden(ids))

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Tensor]]:
        """Run the prompts of all rows; yields rows and the logits of their last tokens ``[rows, 1, vocab]``."""
        for rows in self._groups(prompts):
            self._cache.select(rows)
            ids = torch.tensor([prompts[row] for row in rows], device=self._model.device)
            yield rows, self._head(self._hidden(ids)[:, -1:])

    def _groups(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Rows that run together: of one length, because prompts must not be padded."""
        alike: dict[int, list[int]] = {}
        for row, prompt in enumerate(prompts):
            alike.setdefault(len(prompt), []).append(row)
        groups = []
        for length, rows in alike.items():
            most = 1 if self._model.device.type == "cpu" else max(1, _PREFILL_TOKENS // length)
            groups += [rows[start : start + most] for start in range(0, len(rows), most)]
        return groups

    def _hidden(self, ids: Tensor) -> Tensor:
        return self._model(input_ids=ids, **self._arguments).last_hidden_state
