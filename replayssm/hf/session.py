"""What generations of one shape share on the device: a cache, the model's forward over it, and its captured steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from replayssm.hf.attachment import attachment_of
from replayssm.hf.cache import ReplayCache
from replayssm.hf.forward import Forward
from replayssm.hf.graph import why_not
from replayssm.hf.linear import JoinedProduct, RowProduct
from replayssm.hf.sampling import Greedy, Gumbel
from replayssm.hf.step import Step

_LOCK = threading.Lock()


@dataclass(frozen=True)
class Shape:
    """What a session is made for.

    Attributes:
        batch_size: rows.
        max_tokens: most tokens of a window.
        window: of the pool.
        sampler: how tokens are chosen.
        exact: whether recurrent layers run on exact decode.
    """

    batch_size: int
    max_tokens: int
    window: int
    sampler: Greedy | Gumbel
    exact: bool = False


class Session:
    """A cache with everything that is made once for it.

    Args:
        model: attached.
        shape: sizes and sampler.

    Attributes:
        cache: the rows' cache.
        forward: the model's forward over it, for prompts.
        step: and for windows.
    """

    def __init__(self, model: PreTrainedModel, shape: Shape) -> None:
        self._shape, self._addresses = shape, _addresses(model)
        self.cache = ReplayCache(
            model, shape.batch_size, max_tokens=shape.max_tokens, window=shape.window, exact=shape.exact
        )
        self.forward = Forward(model, self.cache)
        refused = why_not(model.base_model, self.cache.pool.device)
        self.step = Step(self.forward, self.cache, shape.sampler, refused)

    def renew(self, model: PreTrainedModel, shape: Shape) -> bool:
        """Make ready for another generation with the weights that the model has now.

        Returns:
            False when that takes a new session: another shape, or a graph would not find the weights.
        """
        refused = why_not(model.base_model, self.cache.pool.device)
        if shape != self._shape or refused or self.step.graphs.refused or _addresses(model) != self._addresses:
            return False
        attachment = attachment_of(model)
        assert attachment is not None
        attachment.check_bypassed(model)
        self.cache.reset()
        fresh = [attachment.family.prepare(mixer, False) for mixer in attachment.mixers]
        return all(_take_over(old, new) for old, new in zip(self.cache.weights, fresh, strict=True))

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of an attached model makes its own.
        return type(None), ()


def _take_over(old: Any, new: Any) -> bool:
    """Bring what was computed from weights up to date where it lies; False where more than that has changed."""
    for field in fields(old):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if isinstance(before, Tensor):
            if before.data_ptr() != after.data_ptr():  # else the weight itself
                before.untyped_storage().copy_(after.untyped_storage(), non_blocking=False)
        elif isinstance(before, (RowProduct, JoinedProduct, nn.Module)):  # these hold the weights themselves
            if type(before) is not type(after):
                return False
        elif before != after:
            return False
    return True


def _addresses(model: PreTrainedModel) -> list[tuple[object, ...]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) for name, tensor in tensors]


@contextmanager
def session(model: PreTrainedModel, shape: Shape) -> Iterator[Session]:
    """Have a session inside a ``with`` block, alone.

    A model that was attached by ``attach`` keeps its newest session until it is detached, so that graphs need not be
    captured again, as long as there are graphs to keep.
    """
    attachment = attachment_of(model)
    assert attachment is not None
    with _LOCK:
        found, attachment.session = attachment.session, None
    if found is None or not found.renew(model, shape):
        found = None  # its memory is free before more is taken
        found = Session(model, shape)
    finished = False
    try:
        yield found
        finished = True
    finally:
        if finished and attachment.kept and not found.step.graphs.refused:
            attachment.session = found
        else:
            found.cache.close()
