"""Making a transformers model able to run from a replay pool, and undoing it without a trace."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from replayssm.checks import FLOATS
from replayssm.dispatch import supported_devices
from replayssm.hf.attachment import ATTRIBUTE, Attachment, attachment_of
from replayssm.hf.cache import ReplayCache
from replayssm.hf.mixers import FAMILIES

_SUPPORTED = "supported are decoder-only models of the families " + ", ".join(sorted(FAMILIES))
# Several threads may start and end generations on one model.
_LOCK = threading.RLock()


class BaseForward:
    """The forward of an attached base model: replay with a ``ReplayCache``, the model's own forward without one."""

    def __init__(self, base: nn.Module, cache_name: str) -> None:
        self.base, self.original, self.cache_name = base, base.forward, cache_name

    def __call__(self, input_ids: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Forward of the base model, with the arguments that its transformers version passes."""
        cache = kwargs.get(self.cache_name)
        if not isinstance(cache, ReplayCache):
            return self.original(input_ids, *args, **kwargs)
        for name in ("attention_mask", "position_ids"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name}: a ReplayCache takes rows of equal length without padding and counts them itself; "
                    "replayssm.hf.generate strips padding itself"
                )
        given = kwargs.get("inputs_embeds") if input_ids is None else input_ids
        if given is None:
            raise ValueError("input_ids: expected token ids, got none")
        batch, tokens = given.shape[:2]
        cache.begin_forward(self.base, batch, tokens)
        # Replay writes in place, through which no gradient flows; a graph of the rest would only hold memory.
        with torch.no_grad(), torch.autocast(given.device.type, enabled=False):
            return cache.run(tokens, {**kwargs, "input_ids": input_ids})


class WholeForward:
    """The forward of an attached model: with a ``ReplayCache`` its head is that of the cache, as in ``generate``."""

    def __init__(self, model: nn.Module, base: nn.Module, cache_name: str) -> None:
        self.base, self.original, self.cache_name = base, model.forward, cache_name
        # A forward of its own is called without a ReplayCache, and is there again behind detach.
        self.own = "forward" in model.__dict__
        self._place = list(inspect.signature(type(model).forward).parameters).index(cache_name) - 1  # behind self

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of the model, with the arguments that its transformers version takes."""
        cache = args[self._place] if len(args) > self._place else kwargs.get(self.cache_name)
        if not isinstance(cache, ReplayCache):
            return self.original(*args, **kwargs)
        if self.own:
            raise ValueError("model: it has a forward of its own, which a ReplayCache would not call; remove it")
        cache.check_model(self.base)
        with torch.no_grad(), torch.autocast(cache.slots.device.type, enabled=False):
            return cache.whole.forward(*args, **kwargs)


def check_model(model: object) -> ModuleType:
    """Return the adapter of the model's family.

    Raises:
        TypeError: not a transformers model.
        ValueError: a model that replay cannot run, with the reason.
        NotImplementedError: a device without our ops.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a transformers PreTrainedModel, got {type(model).__name__}; {_SUPPORTED}")
    name = f"{type(model).__name__} (model_type '{model.config.model_type}')"
    if model.config.is_encoder_decoder:
        raise ValueError(f"model: {name} is an encoder-decoder; {_SUPPORTED}")
    family = FAMILIES.get(model.config.model_type)
    if family is None:
        inside = model.config.get_text_config().model_type
        if inside in FAMILIES:
            raise ValueError(
                f"model: {name} is more than its text model, whose family '{inside}' is supported; load that alone "
                "with AutoModelForCausalLM"
            )
        if getattr(model, "_is_stateful", False):
            raise ValueError(f"model: the recurrent layers of {name} are of an unsupported family; {_SUPPORTED}")
        raise ValueError(f"model: {name} has no recurrent layers that can be replayed; {_SUPPORTED}")
    if model.get_output_embeddings() is None:
        raise ValueError(f"model: {name} has no language-model head; load it with AutoModelForCausalLM")
    if model.device.type not in supported_devices(family.OPS):
        expected = " or ".join(supported_devices(family.OPS))
        raise NotImplementedError(f"model: expected device {expected}, got {model.device}")
    return family


def attach(model: PreTrainedModel) -> PreTrainedModel:
    """Prepare a model for replay decoding, in place.

    The forwards of the model and of its base model are replaced: called with a ``ReplayCache`` they run from the
    cache's pool and record no gradients, otherwise they do what they did before. Everything is computed in fp32,
    because bf16 logits tie and equal texts could not be promised. On a GPU weights stay as they are stored, unless the
    model has modules that we do not run ourselves (experts, say); otherwise those stored in bf16 or fp16 are converted
    to fp32, and ``detach`` converts them back exactly. Attaching an attached model changes nothing.

    Args:
        model: a causal LM of a supported family, on a supported device.

    Returns:
        ``model``.

    Raises:
        TypeError: not a transformers model.
        ValueError: unsupported family, weight dtype or kind of layer (adapters, quantised weights, hooks), weights on
            several devices; the message says what is supported.
        NotImplementedError: unsupported device.

    Example:
        >>> from transformers import Mamba2Config, Mamba2ForCausalLM
        >>> config = Mamba2Config(vocab_size=61, hidden_size=24, num_heads=6, head_dim=8, state_size=10, n_groups=2,
        ...                       num_hidden_layers=2, chunk_size=16)
        >>> model = attach(Mamba2ForCausalLM(config))
        >>> detach(model)
    """
    family = check_model(model)
    with _LOCK:
        attachment = attachment_of(model) or _attach(model, family)
        attachment.kept = True
    return model


@contextmanager
def attached(model: PreTrainedModel) -> Iterator[None]:
    """Have a model attached inside a ``with`` block, whoever else uses it at the same time.

    The last of the blocks that overlap leaves the model as the first one found it; a model that was attached before
    stays attached.
    """
    family = check_model(model)
    with _LOCK:
        attachment = attachment_of(model) or _attach(model, family)
        attachment.users += 1
    try:
        yield
    finally:
        with _LOCK:
            attachment.users -= 1
            if not attachment.users and not attachment.kept:
                _undo(model, attachment)


def _attach(model: PreTrainedModel, family: ModuleType) -> Attachment:
    base, names = model.base_model, family.MIXERS
    mixers = [module for module in base.modules() if type(module).__name__ in names]
    if not mixers:
        raise ValueError(f"model: expected layers of transformers' class {' or '.join(names)}, found none")
    if "forward" in base.__dict__:
        raise ValueError(
            f"model: its {type(base).__name__} has a forward of its own, which replay would not call; remove it"
        )
    places = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(places) > 1:
        raise ValueError(f"model: expected all weights on one device, got some on {' and '.join(places)}")
    parameters = inspect.signature(type(model).forward).parameters
    cache_name = next(name for name in ("cache", "cache_params", "past_key_values") if name in parameters)
    attachment = Attachment(model.config.model_type, base, mixers, model.get_output_embeddings(), cache_name)
    narrow = _narrow_tensors(model)
    attachment.stored_dtypes = [] if attachment.keeps_types else narrow
    try:
        for tensor, _ in attachment.stored_dtypes:
            tensor.data = tensor.data.float()
        attachment.check_bypassed(model)
        base.__dict__["forward"] = BaseForward(base, cache_name)
        model.__dict__["forward"] = WholeForward(model, base, cache_name)
        setattr(model, ATTRIBUTE, attachment)
    except BaseException:  # memory ran out half-way, an interrupt, a layer that cannot be used
        _undo(model, attachment)
        raise
    return attachment


def _narrow_tensors(model: PreTrainedModel) -> list[tuple[Tensor, torch.dtype]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        is_weight = tensor.is_floating_point() or isinstance(tensor, nn.Parameter)
        if is_weight and tensor.dtype not in FLOATS:
            supported = ", ".join(str(dtype) for dtype in FLOATS)
            raise ValueError(f"model: weight '{name}' is {tensor.dtype}; supported weight types are {supported}")
    return [(t, t.dtype) for _, t in tensors if t.is_floating_point() and t.dtype != torch.float32]


def detach(model: PreTrainedModel) -> None:
    """Undo ``attach``: forwards and weight dtypes are what they were, and nothing of ours is left on the model.

    Args:
        model: an attached model.

    Raises:
        ValueError: the model is not attached, or a generation runs on it.
    """
    with _LOCK:
        attachment = attachment_of(model) if isinstance(model, PreTrainedModel) else None
        if attachment is None or not attachment.kept:
            raise ValueError(
                "model: expected a model that replayssm.hf.attach has prepared, got one that is not attached"
            )
        if attachment.users:
            raise ValueError("model: expected no generation running on it, got one; detach when it is done")
        _undo(model, attachment)


def _undo(model: PreTrainedModel, attachment: Attachment) -> None:
    if isinstance(attachment.base.__dict__.get("forward"), BaseForward):
        del attachment.base.__dict__["forward"]
    if isinstance(whole := model.__dict__.get("forward"), WholeForward):
        del model.__dict__["forward"]
        if whole.own:
            model.__dict__["forward"] = whole.original
    for tensor, dtype in attachment.stored_dtypes:
        tensor.data = tensor.data.to(dtype)
    model.__dict__.pop(ATTRIBUTE, None)
