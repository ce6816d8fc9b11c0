"""What generations of one shape share on the device: a cache, the model's forward over it, and its captured steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from replayssm.hf.attachment import Attachment, attachment_of, most_tokens
from replayssm.hf.cache import ReplayCache
from replayssm.hf.forward import Forward
from replayssm.hf.graph import why_not
from replayssm.hf.sampling import Greedy, Gumbel
from replayssm.hf.step import Step

# Tokens of a piece of a prompt, which runs like a step, and most pieces: a longer prompt is one forward, many launches.
_PIECE, _PIECES = 16, 64
# Sessions that a model keeps: with and without drafts, say.
_KEPT = 2
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
        shape: as given.
        cache: the rows' cache.
        step: the model's forward over windows of it.
        most_in_pieces: longest prompt that runs like steps; 0 where nothing can be captured anyway.
    """

    def __init__(self, model: PreTrainedModel, shape: Shape) -> None:
        attachment = attachment_of(model)
        assert attachment is not None
        self.shape, self._identity = shape, _identity(model)
        refused = why_not(model.base_model, model.device)
        # Experts' weights are read once for a whole prompt.
        by_graph = not refused and not attachment.routed
        self._piece = min(_PIECE, shape.window, most_tokens(model, shape.exact)) if by_graph else 0
        self.most_in_pieces = _PIECES * self._piece
        self.cache = ReplayCache(
            model,
            shape.batch_size,
            max_tokens=max(shape.max_tokens, self._piece),
            window=shape.window,
            exact=shape.exact,
        )
        self._forward = Forward(model, self.cache)
        self.step = Step(self._forward, self.cache, shape.sampler, refused, shape.max_tokens)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Tensor]]:
        """Run the prompts of all rows; which way a prompt takes depends on its length alone.

        Yields:
            Rows and the logits of their last tokens ``[rows, 1, vocab]``, which what comes next may overwrite.
        """
        numbered = dict(enumerate(prompts))
        short = {row: prompt for row, prompt in numbered.items() if len(prompt) <= self.most_in_pieces}
        yield from self._forward.prefill({row: prompt for row, prompt in numbered.items() if row not in short})
        yield from self.step.prompt(short, self._piece)
        self.cache.traffic.count()

    def renew(self, model: PreTrainedModel) -> bool:
        """Make ready for another generation with the weights that the model has now.

        Returns:
            False when that takes a new session, because a graph would not find the weights, say.
        """
        attachment, graphs = attachment_of(model), self.step.graphs
        assert attachment is not None
        if why_not(model.base_model, model.device) or _identity(model) != self._identity:
            return False
        self.cache.reset()
        follow = partial(self._follow_weights, attachment)
        graph = graphs.find("weights", follow, nullcontext)
        if graph is None:
            follow()
        else:
            graph.replay()
        return not graphs.refused

    def _follow_weights(self, attachment: Attachment) -> Tensor:
        """Compute again what is computed from weights, where it lies."""
        for weights, mixer in zip(self.cache.weights, attachment.mixers, strict=True):
            for name, new in attachment.family.derive(mixer).items():
                old = getattr(weights, name)
                if old is not None and old.data_ptr() != new.data_ptr():  # else the weight itself
                    old.untyped_storage().copy_(new.untyped_storage(), non_blocking=False)
        return self.cache.slots


def _identity(model: PreTrainedModel) -> list[tuple[object, ...]]:
    """What its modules are and where their tensors lie; equal as long as graphs of the model are right.

    All that ``Attachment.check_bypassed`` looks at is in it, but for hooks inside of the base model, which ``why_not``
    finds.
    """
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    hooked = bool(head._forward_hooks or head._forward_pre_hooks)
    whole = (id(head), hooked, config._attn_implementation, str(getattr(config, "layer_types", None)))
    modules = [(type(module), *_settings(module), *_places(module)) for module in model.modules()]
    return [whole, *modules]


def _settings(module: nn.Module) -> Iterator[tuple[object, ...]]:
    """Numbers and names that a module was made with, and a forward of its own."""
    for name, value in module.__dict__.items():
        if name[0] == "_" or name == "training":
            continue
        each = value if isinstance(value, tuple) else (value,)
        if name == "forward" or all(isinstance(part, (int, float, str)) for part in each):
            yield (name, *each)


def _places(module: nn.Module) -> Iterator[tuple[object, ...]]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield name, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


@contextmanager
def session(model: PreTrainedModel, shape: Shape) -> Iterator[Session]:
    """Have a session inside a ``with`` block, alone.

    A model that was attached by ``attach`` keeps its newest sessions until it is detached, so that graphs need not be
    captured again, as long as there are graphs to keep.
    """
    attachment = attachment_of(model)
    assert attachment is not None
    kept: list[Session] = attachment.sessions
    with _LOCK:
        found = next((each for each in kept if each.shape == shape), None)
        if found is not None:
            kept.remove(found)
    if found is None or not found.renew(model):
        found = None  # its memory is free before more is taken
        with _LOCK:
            del kept[: len(kept) - _KEPT + 1]
        found = _make(model, shape, kept)
    finished = False
    try:
        yield found
        finished = True
    finally:
        if finished and attachment.kept and not found.step.graphs.refused:
            with _LOCK:
                kept.append(found)
                del kept[:-_KEPT]
        else:
            found.cache.close()


def _make(model: PreTrainedModel, shape: Shape, kept: list[Session]) -> Session:
    try:
        return Session(model, shape)
    except torch.OutOfMemoryError:
        if not kept:
            raise
    with _LOCK:  # behind the other block, because the error holds what the failed one had
        kept.clear()
    return Session(model, shape)
