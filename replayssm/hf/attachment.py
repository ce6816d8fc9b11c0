"""The record that ``attach`` leaves on a model until ``detach``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from replayssm.hf.mixers import EXACT_FAMILIES, FAMILIES
from replayssm.hf.norm import is_known, pays

ATTRIBUTE = "_replayssm_attachment"
_LAYER_TYPES = {"full_attention", "linear_attention"}
_ATTENTION = ("sdpa", "eager")


class _Sessions(list[Any]):
    """A list of which a copy is empty: a copy of an attached model makes its own sessions."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


@dataclass
class Attachment:
    """What attach did to one model.

    Attributes:
        model_type: key of the model's adapter in ``replayssm.hf.mixers.FAMILIES``.
        base: the model without its head, whose forward is replaced.
        mixers: the recurrent layers, in order.
        head: the language-model head.
        cache_name: the forward's name for the cache: ``cache``, before transformers 5.24 ``cache_params`` or
            ``past_key_values``.
        stored_dtypes: tensors that were converted to fp32, with the dtype to go back to.
        kept: whether ``attach`` was called, so that only ``detach`` undoes it.
        users: generations that run on the model now.
        sessions: what the newest generations left for the next ones (``replayssm.hf.session``), the newest last.
    """

    model_type: str
    base: Any
    mixers: list[nn.Module]
    head: nn.Linear
    cache_name: str
    stored_dtypes: list[tuple[Tensor, torch.dtype]] = field(default_factory=list)
    kept: bool = False
    users: int = 0
    sessions: list[Any] = field(default_factory=_Sessions)

    @property
    def linears(self) -> list[nn.Linear]:
        """The linear layers that a round runs through, but for those of experts."""
        return [linear for mixer in self.mixers for linear in self.family.linears(mixer)] + [
            *self.body_linears,
            self.head,
        ]

    @property
    def body_linears(self) -> list[nn.Linear]:
        """Linear layers outside of recurrent mixers and experts that are nothing but a product with their weight."""
        return [
            module
            for module in self._outside()
            if type(module) is nn.Linear
            and not (module._forward_hooks or module._forward_pre_hooks)
            and "forward" not in module.__dict__
        ]

    @property
    def has_other_products(self) -> bool:
        """Whether there are other linear layers outside of recurrent mixers and experts: adapters, say."""
        return sum(isinstance(module, nn.Linear) for module in self._outside()) != len(self.body_linears)

    @property
    def routed(self) -> list[nn.Module]:
        """Blocks that send every token to experts of its own."""
        return [module for module in self.base.modules() if type(module).__name__ in self.family.ROUTED]

    @property
    def keeps_types(self) -> bool:
        """Whether weights stay in the types they are stored in, because all that reads them computes in fp32.

        So it is on a GPU, where reading a weight is what a product costs; a CPU multiplies fp32 weights faster.
        """
        parameters = list(self.base.parameters())
        if not pays(parameters[0].device):
            return False
        modules = [*self.body_linears, *(m for m in self.base.modules() if is_known(m) or type(m) is nn.Embedding)]
        known = {id(each) for module in [*self.mixers, *modules] for each in module.parameters()}
        return all(id(each) in known for each in parameters)

    def _outside(self) -> Iterator[nn.Module]:
        return _modules(self.base, {*self.family.MIXERS, *self.family.ROUTED})

    @property
    def attends(self) -> bool:
        """Whether the model has attention layers."""
        return "full_attention" in (getattr(self.base.config, "layer_types", None) or ())

    @property
    def takes_masks(self) -> bool:
        """Whether the model's forward wants positions and masks; that of a hybrid without attention layers does too."""
        return "position_ids" in inspect.signature(type(self.base).forward).parameters

    @property
    def adds_masks(self) -> bool:
        """Whether its attention adds masks to the scores."""
        return self.base.config._attn_implementation == "eager"

    @property
    def family(self) -> ModuleType:
        """The adapter module; looked up, because a module object would keep an attached model from being copied."""
        return FAMILIES[self.model_type]

    def exact_family(self) -> ModuleType:
        """The adapter module of exact decode.

        Raises:
            ValueError: the family has none.
        """
        if self.model_type not in EXACT_FAMILIES:
            supported = ", ".join(sorted(EXACT_FAMILIES))
            raise ValueError(
                f"exact: not supported for models of the family '{self.model_type}'; supported: {supported}"
            )
        return EXACT_FAMILIES[self.model_type]

    def check_bypassed(self, model: PreTrainedModel) -> None:
        """Refuse layers that compute anything else than a product with the weights they show.

        Projections, convolution and head are not called but computed from their weights, so what an adapter or a hook
        adds would be lost without a word.

        Raises:
            ValueError: such a layer, or one that has changed since attach.
        """
        if model.get_output_embeddings() is not self.head:
            raise ValueError("model: its head was replaced since attach; call detach, and attach again")
        self._check_attention()
        names = {id(module): name for name, module in model.named_modules()}
        any_type = self.keeps_types
        layers = [layer for mixer in self.mixers for layer in (*self.family.linears(mixer), mixer.conv1d)]
        for layer in [*layers, self.head]:
            name = names.get(id(layer), type(layer).__name__)
            if type(layer).forward not in (nn.Linear.forward, nn.Conv1d.forward) or "forward" in layer.__dict__:
                raise ValueError(
                    f"model: layer '{name}' is a {type(layer).__module__}.{type(layer).__name__} with a forward of its "
                    "own; supported are torch.nn.Linear and Conv1d (merge adapters, use weights that are not quantised)"
                )
            if layer._forward_hooks or layer._forward_pre_hooks:
                raise ValueError(f"model: layer '{name}' has forward hooks, which replay would not call; remove them")
            if layer.weight.dtype != torch.float32 and not any_type:
                raise ValueError(
                    f"model: the weight of '{name}' became {layer.weight.dtype} since attach; call detach, convert the "
                    "model, and attach it again"
                )

    def _check_attention(self) -> None:
        kinds = set(getattr(self.base.config, "layer_types", None) or ()) - _LAYER_TYPES
        if kinds:
            raise ValueError(
                f"model: layers of type {', '.join(sorted(kinds))} are not supported; supported are "
                f"{' and '.join(sorted(_LAYER_TYPES))}"
            )
        implementation = self.base.config._attn_implementation
        if self.attends and implementation not in _ATTENTION:
            raise ValueError(
                f"model: attention implementation '{implementation}' is not supported; supported are "
                f"{' and '.join(_ATTENTION)} (model.set_attn_implementation)"
            )


def _modules(module: nn.Module, apart: set[str]) -> Iterator[nn.Module]:
    """A module and all below it, without modules of some classes and what is below those."""
    if type(module).__name__ not in apart:
        yield module
        for child in module.children():
            yield from _modules(child, apart)


def attachment_of(model: PreTrainedModel) -> Attachment | None:
    """What attach did to ``model``, None when it is not attached."""
    return model.__dict__.get(ATTRIBUTE)


def most_tokens(model: PreTrainedModel, exact: bool) -> int:
    """Most tokens that one forward of an attached model can verify, with or without exact decode."""
    attachment = attachment_of(model)
    assert attachment is not None
    family = attachment.exact_family() if exact else attachment.family
    return min(family.layer_shape(mixer).max_tokens for mixer in attachment.mixers)
