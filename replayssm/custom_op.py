"""Registering an op that only writes into tensors it is given, and calling it cheaply.

Every op is known to ``torch.library``, so that ``torch.compile``, fake tensors and dispatch modes see one node with an
exact list of what it writes. In plain eager mode the call goes straight to the Python function: the dispatcher would
cost more than a small decode step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("replayssm", "FRAGMENT")


def define(schema: str, function: Callable[..., None]) -> Callable[..., None]:
    """Register ``function`` as ``torch.ops.replayssm.<name>`` and return a callable that runs it.

    Args:
        schema: ``"name(Tensor(a!) state, Tensor x, ...) -> ()"``. Every tensor that the op writes carries an alias
            mark with ``!``; the op returns nothing.
        function: the implementation for every device. It takes the schema's arguments by position.

    Returns:
        A callable with positional arguments in the schema's order. Nothing it does is recorded by autograd or cast by
        autocast.
    """
    name = schema.split("(", 1)[0]
    function = _without_autocast(function)
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"replayssm::{name}", lambda *_: None, lib=_LIBRARY)
    op = getattr(torch.ops.replayssm, name).default

    def call(*args: Any) -> None:
        if torch.compiler.is_compiling() or _is_traced(args[0]):
            op(*args)
        else:
            with torch.no_grad():
                function(*args)

    return call


def _without_autocast(function: Callable[..., None]) -> Callable[..., None]:
    """The function, whose matrix products keep their precision where the caller has autocast on."""

    def run(*args: Any) -> None:
        device = args[0].device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                function(*args)
        else:
            function(*args)

    return run


def _is_traced(tensor: torch.Tensor) -> bool:
    """Whether a dispatch mode is active or the tensor is a subclass (a fake tensor, say) that must see the op."""
    plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    return not plain or torch._C._len_torch_dispatch_stack() > 0
