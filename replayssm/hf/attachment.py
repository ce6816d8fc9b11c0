"""The record that ``attach`` leaves on a model until ``detach``."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from replayssm.hf.mixers import FAMILIES

ATTRIBUTE = "_replayssm_attachment"


@dataclass
class Attachment:
    """What attach did to one model.

    Attributes:
        model_type: key of the model's adapter in ``replayssm.hf.mixers.FAMILIES``.
        mixers: the recurrent layers, in order.
        head: the language-model head.
        cache_name: the forward's name for the cache: ``cache``, before transformers 5.24 ``cache_params``.
        replaced: modules whose ``forward`` was replaced, with what their ``__dict__`` held before (None: nothing).
        stored_dtypes: tensors that were converted to fp32, with the dtype to go back to.
    """

    model_type: str
    mixers: list[nn.Module]
    head: nn.Linear
    cache_name: str
    replaced: list[tuple[nn.Module, Any]] = field(default_factory=list)
    stored_dtypes: list[tuple[Tensor, torch.dtype]] = field(default_factory=list)

    @property
    def linears(self) -> list[nn.Linear]:
        """The linear layers that a round runs through."""
        return [linear for mixer in self.mixers for linear in self.family.linears(mixer)] + [self.head]

    @property
    def family(self) -> ModuleType:
        """The adapter module; looked up, because a module object would keep an attached model from being copied."""
        return FAMILIES[self.model_type]


def attachment_of(model: PreTrainedModel) -> Attachment | None:
    """What attach did to ``model``, None when it is not attached."""
    return model.__dict__.get(ATTRIBUTE)
