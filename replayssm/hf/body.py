"""The model that runs with a ``ReplayCache``: the attached one with some of its modules exchanged.

Modules below which something was exchanged are copied without their tensors; all others, and all parameters, are those
of the attached model. So a plain forward of that model, in this thread or another, meets nothing of ours. The copies
are in evaluation mode whatever the model is in: dropout would make the text depend on what was drafted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from replayssm.hf.attachment import Attachment
from replayssm.hf.linear import JoinedProduct, RowProduct
from replayssm.hf.norm import Norm, is_known

_CACHE_NAMES = ("cache", "cache_params", "past_key_values")


class ReplayMixer(nn.Module):
    """Stands for a recurrent mixer: runs it from the pool of the cache that it is called with.

    Args:
        mixer: the module it stands for.
        position: its number among the mixers.
    """

    def __init__(self, mixer: nn.Module, position: int) -> None:
        super().__init__()
        # Not as a child: what looks at modules shall find it once.
        self._mixer, self._position = (mixer,), position

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Forward of the mixer, with the arguments that its transformers version passes."""
        cache: Any = next(kwargs[name] for name in _CACHE_NAMES if kwargs.get(name) is not None)
        return cache.replay(self._position, self._mixer[0], hidden_states)


class Product(nn.Module):
    """Stands for a linear layer: rows do not depend on their number.

    Args:
        product: of the layer.
    """

    def __init__(self, product: RowProduct) -> None:
        super().__init__()
        self.product = product
        # Models convert what goes into their head to the type of its weight: to fp32, whatever the weight is stored as.
        self.weight = torch.empty(0, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``x``."""
        return self.product(x)


class Gated(nn.Module):
    """Stands for a gated feed-forward block: one product for gate and values, where a packed copy is made anyway.

    Args:
        block: has ``gate_proj``, ``up_proj``, ``down_proj`` and ``act_fn``.
    """

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.first = JoinedProduct([block.gate_proj, block.up_proj], None, pack=True)
        self.second = RowProduct(block.down_proj, pack=True)
        self._activation = (block.act_fn,)

    @property
    def rows_alike(self) -> bool:
        """Whether both products were measured to treat every row alike."""
        return self.first.rows_alike and self.second.rows_alike

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        gate, values = self.first(x).chunk(2, -1)
        return self.second(self._activation[0](gate) * values)


class Embedded(nn.Module):
    """Stands for an embedding: gives fp32 whatever it is stored as.

    Args:
        embedding: the module.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self._embedding = (embedding,)

    def forward(self, ids: Tensor) -> Tensor:
        """Look ``ids`` up."""
        return self._embedding[0](ids).float()


class Routed(nn.Module):
    """Stands for a block of experts: a token's bits do not depend on which experts its neighbours need.

    A product with an expert's weight has as many rows as tokens chose that expert. In a window on a CPU the block is
    therefore called for one token at a time, which costs little, because the experts' weights are what has to be read.

    Args:
        block: the block.

    Attributes:
        one_by_one: whether tokens are scored alone.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._block = (block,)
        self.one_by_one = False

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Run the block on ``[batch, tokens, hidden]``."""
        block = self._block[0]
        if not self.one_by_one:
            return block(hidden_states)
        flat = hidden_states.view(-1, 1, 1, hidden_states.shape[-1])
        return torch.cat([block(token) for token in flat], 1).view(hidden_states.shape)


class Body:
    """The base model of an attached model as a cache runs it.

    Args:
        attachment: of the model.
        pack: as of ``RowProduct``.

    Attributes:
        rows_alike: whether all matrix products outside of the recurrent mixers were measured to treat every row alike.
    """

    def __init__(self, attachment: Attachment, pack: bool) -> None:
        base = attachment.base
        self._routed = [Routed(block) for block in attachment.routed]
        self._on_cpu = next(base.parameters()).device.type == "cpu"
        blocks = _gated_blocks(attachment) if pack else []
        gated = {id(block): Gated(block) for block in blocks}
        inside = {id(linear) for block in blocks for linear in block.children()}
        plain = [each for each in attachment.body_linears if id(each) not in inside]
        products = {id(each): Product(RowProduct(each, pack)) for each in plain}
        exchanged: dict[int, nn.Module] = {**products, **gated}
        exchanged |= {id(block): routed for block, routed in zip(attachment.routed, self._routed, strict=True)}
        exchanged |= {id(module): Norm(module) for module in base.modules() if is_known(module)}
        if attachment.keeps_types:
            exchanged |= {id(module): Embedded(module) for module in base.modules() if type(module) is nn.Embedding}
        exchanged |= {id(mixer): ReplayMixer(mixer, number) for number, mixer in enumerate(attachment.mixers)}
        self._model = _exchange(base, exchanged, outermost=True)
        self.rows_alike = (
            all(product.product.rows_alike for product in products.values())
            and all(block.rows_alike for block in gated.values())
            and not attachment.has_other_products
            and (self._on_cpu or not self._routed)
        )

    def run(self, arguments: dict[str, Any], one_by_one: bool) -> Any:
        """Call the model; ``one_by_one`` says whether experts have to treat every token alike."""
        for block in self._routed:
            block.one_by_one = one_by_one and self._on_cpu
        # Not called as a module: the attached model's own call has run its hooks.
        return self._model.forward(**arguments)


def with_head(model: nn.Module, attachment: Attachment, product: RowProduct) -> nn.Module:
    """The attached model, its base as it is, with ``product`` in place of its head."""
    kept = {id(attachment.base): attachment.base}
    return _exchange(model, {**kept, id(attachment.head): Product(product)}, outermost=True)


def _gated_blocks(attachment: Attachment) -> list[nn.Module]:
    """Gated feed-forward blocks outside of experts that are as they came and made of plain products."""
    plain = {id(linear) for linear in attachment.body_linears if linear.bias is None}
    return [
        block
        for block in attachment.base.modules()
        if type(block).__name__ in attachment.family.GATED
        and all(id(child) in plain for child in block.children() if isinstance(child, nn.Linear))
        and not (block._forward_hooks or block._forward_pre_hooks or "forward" in block.__dict__)
    ]


def _exchange(module: nn.Module, exchanged: dict[int, nn.Module], outermost: bool = False) -> nn.Module:
    """A model with other modules in place of those whose ``id`` is named; itself when it has none of them."""
    if id(module) in exchanged:
        return exchanged[id(module)]
    children = {name: child and _exchange(child, exchanged) for name, child in module._modules.items()}
    unchanged = all(children[name] is child for name, child in module._modules.items())
    # In training a checkpointed layer hides the cache from what is below it.
    if unchanged and not hasattr(module, "gradient_checkpointing"):
        return module
    if "forward" in module.__dict__ and not outermost:
        raise ValueError(
            f"model: a {type(module).__name__} has a forward of its own, which replay would not call; remove it"
        )
    copy = object.__new__(type(module))
    # The outermost one is that of attach.
    copy.__dict__ = {name: value for name, value in module.__dict__.items() if name != "forward"}
    copy.__dict__ |= {"_modules": children, "training": False}
    return copy
