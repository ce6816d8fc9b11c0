"""The kinds of recurrent layers that a pool can hold, and what they have to agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from replayssm.cache.exact import ExactMamba2Buffers, ExactMamba2Layer
from replayssm.cache.gdn import GDNBuffers, GDNLayer
from replayssm.cache.mamba2 import Mamba2Buffers, Mamba2Layer
from replayssm.checks import check_integer, check_range, check_sequence
from replayssm.mamba.arguments import MAX_WINDOW

Layer = Mamba2Layer | ExactMamba2Layer | GDNLayer
Buffers = Mamba2Buffers | ExactMamba2Buffers | GDNBuffers

_BUFFERS: dict[type, Any] = {
    Mamba2Layer: Mamba2Buffers,
    ExactMamba2Layer: ExactMamba2Buffers,
    GDNLayer: GDNBuffers,
}


def allocate_buffers(
    layer: Layer,
    num_slots: int,
    *,
    ring_len: int,
    conv_len: int,
    state_dtype: torch.dtype,
    activation_dtype: torch.dtype,
    device: torch.device,
) -> Buffers:
    """The zeroed tensors of ``num_slots`` slots of one layer; see the ``allocate`` of the layer's kind.

    Raises:
        ValueError: a dtype that this kind of layer cannot be stored in.
    """
    return _BUFFERS[type(layer)].allocate(
        layer,
        num_slots,
        ring_len=ring_len,
        conv_len=conv_len,
        state_dtype=state_dtype,
        activation_dtype=activation_dtype,
        device=device,
    )


def ring_lengths(layers: Sequence[Layer], window: int, max_tokens: int) -> tuple[int, int]:
    """Rows of the replay ring and of the convolution's ring of a pool.

    A step of ``max_tokens`` tokens must overwrite neither the live rows, ``window`` at most, nor the convolution's
    history. Layers of different kinds and widths share one length, since they share the cursor.

    Args:
        layers: the pool's layers.
        window: most rows that may be replayed.
        max_tokens: most tokens of one step.

    Returns:
        (ring_len, conv_len).

    Raises:
        TypeError: no list, a layer of no known kind, or a number of another type.
        ValueError: no layer, not ``1 <= max_tokens <= window <= 64``, or more tokens than a layer's op takes.
    """
    check_sequence("layers", layers, "layers")
    if not layers:
        raise ValueError("layers: expected at least one layer, got none")
    for layer in layers:
        if type(layer) not in _BUFFERS:
            kinds = " or ".join(kind.__name__ for kind in _BUFFERS)
            raise TypeError(f"layers: expected {kinds}, got {type(layer).__name__}")
    check_range("window", window, 1, MAX_WINDOW)
    check_integer("max_tokens", max_tokens)
    if not 1 <= max_tokens <= window:
        raise ValueError(
            f"max_tokens: expected 1 <= max_tokens <= window={window} (a step's tokens become live rows), "
            f"got {max_tokens}"
        )
    for layer in layers:
        if max_tokens > layer.max_tokens:
            raise ValueError(
                f"max_tokens: expected at most {layer.max_tokens} with {type(layer).__name__}, got {max_tokens}"
            )
    return window + max_tokens, max(layer.conv_width for layer in layers) - 1 + max_tokens
