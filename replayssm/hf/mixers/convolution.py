"""The short convolution of every family's mixers: over the tokens of a step, and over a whole prompt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from replayssm.conv import causal_conv1d_replay
from replayssm.cursors import Cursors


def scratch_rows(rows: int) -> int:
    """Rows for the convolution of a prompt: at least ``rows``, in steps of 16.

    Triton compiles for numbers that are multiples of 16 and for others; so every prompt meets the same kernel.

    Example:
        >>> scratch_rows(3), scratch_rows(16), scratch_rows(17)
        (16, 16, 32)
    """
    return -(-rows // 16) * 16


def conv_parameters(mixer: Any) -> dict[str, Tensor | None]:
    """The fields ``conv_weight`` and ``conv_bias`` of a family's ``Weights``, computed from a mixer's parameters."""
    bias = mixer.conv1d.bias
    return {
        "conv_weight": mixer.conv1d.weight.detach().float().squeeze(1).t().contiguous().t(),
        "conv_bias": None if bias is None else bias.detach().float(),
    }


def activation_of(mixer: Any) -> str | None:
    """The field ``activation``: what the convolution applies itself, None when the mixer's own function has to."""
    return "silu" if mixer.activation in ("silu", "swish") else None


def convolve(
    weights: Any, rows: Tensor, cursors: Cursors, slots: Tensor, conv_in: Tensor, out: Tensor | None = None
) -> Tensor:
    """Convolve the tokens of a step.

    Args:
        weights: a family's ``Weights``: their conv_weight, conv_bias and activation.
        rows: ring of a layer's inputs, written.
        cursors: read only.
        slots: int64 ``[batch]``.
        conv_in: ``[batch, tokens, channels]``.
        out: where to, else new memory with zeros at padding.
    """
    return causal_conv1d_replay(
        rows,
        cursors.conv_start,
        conv_in,
        weights.conv_weight,
        weights.conv_bias,
        activation=weights.activation,
        state_batch_indices=slots,
        out=out,
    )


def convolve_prompt(weights: Any, conv_in: Tensor) -> tuple[Tensor, Tensor]:
    """Convolve prompts from their first tokens on; ``weights`` and ``conv_in`` as of ``convolve``.

    Returns:
        The outputs, and the inputs at the last tokens as ``ReplayPool.write_state`` takes them.
    """
    batch, tokens, channels = conv_in.shape
    history = weights.conv_weight.shape[1] - 1
    rows = conv_in.new_zeros(batch, scratch_rows(history + tokens), channels)
    start = torch.zeros(batch, dtype=torch.int32, device=conv_in.device)
    out = causal_conv1d_replay(
        rows, start, conv_in, weights.conv_weight, weights.conv_bias, activation=weights.activation
    )
    return out, rows[:, tokens : tokens + history].transpose(1, 2)
