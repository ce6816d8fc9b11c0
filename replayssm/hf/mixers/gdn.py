"""transformers' Gated DeltaNet mixers: their own projections and gated norm around our convolution and delta rule.

The families differ in how their input projections are cut; what follows is the same (``prepare``, ``replay_forward``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from replayssm.cache import GDNBuffers, GDNLayer
from replayssm.cursors import Cursors
from replayssm.gdn_decode import gated_delta_rule_checkpointing, gated_delta_rule_mtp
from replayssm.gdn_decode.arguments import MAX_TOKENS
from replayssm.hf.linear import JoinedProduct, RowProduct
from replayssm.hf.mixers.convolution import activation_of, conv_parameters, convolve, convolve_prompt
from replayssm.hf.norm import in_one_launch


def layer_shape(mixer: Any) -> GDNLayer:
    """Sizes of the mixer's recurrent layer."""
    return GDNLayer(
        value_heads=mixer.num_v_heads,
        value_dim=mixer.head_v_dim,
        key_dim=mixer.head_k_dim,
        key_heads=mixer.num_k_heads,
        conv_width=mixer.conv_kernel_size,
    )


@dataclass(frozen=True)
class Weights:
    """The mixer's parameters in the shapes that the ops take, made once per cache.

    Attributes:
        in_proj: the input projections; columns q, k, v, z, b, a, each with consecutive heads.
        out_proj: the output projection.
        norm: the gated norm.
        conv_weight: ``[channels, width]``, stored tap by tap.
        conv_bias: ``[channels]`` or None.
        A_log: fp32 ``[value_heads]``.
        dt_bias: fp32 ``[value_heads]``.
        activation: what the convolution applies itself, None when the mixer's own function has to.
    """

    in_proj: JoinedProduct
    out_proj: RowProduct
    norm: nn.Module
    conv_weight: Tensor
    conv_bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    activation: str | None

    @property
    def rows_alike(self) -> bool:
        """Whether the projections were measured to treat every row alike."""
        return self.in_proj.rows_alike and self.out_proj.rows_alike

    @property
    def A(self) -> None:
        """No rates for ``ReplayPool.materialize``: the ring holds decays."""
        return None


def prepare(mixer: Any, projections: Sequence[nn.Linear], order: Sequence[int] | None, pack: bool) -> Weights:
    """Compute a mixer's ``Weights`` from the parameters it has now.

    Args:
        mixer: the module.
        projections: its input projections.
        order: which of their columns, one behind the other, come first, second, ... in ``Weights.in_proj``; None: all
            as they are.
        pack: as of ``RowProduct``.
    """
    return Weights(
        in_proj=JoinedProduct(projections, order, pack),
        out_proj=RowProduct(mixer.out_proj, pack),
        norm=in_one_launch(mixer.norm),
        activation=activation_of(mixer),
        **derive(mixer),
    )


def derive(mixer: Any) -> dict[str, Any]:
    """The fields of ``Weights`` that are computed from parameters, or are parameters themselves."""
    return {
        **conv_parameters(mixer),
        "A_log": mixer.A_log.detach().float(),
        "dt_bias": mixer.dt_bias.detach().float(),
    }


def replay_forward(
    mixer: Any,
    weights: Weights,
    hidden_states: Tensor,
    buffers: GDNBuffers,
    cursors: Cursors,
    slots: Tensor,
    window: int,
) -> Tensor:
    """Score new tokens from a pool's checkpoint and ring.

    Args:
        mixer: the attached module.
        weights: what ``prepare`` gave for the mixer.
        hidden_states: ``[batch, tokens, hidden]`` fp32.
        buffers: this layer's buffers, written in place (rings always, the state at a flush).
        cursors: read only; a commit moves them.
        slots: int64 ``[batch]``.
        window: the pool's window.

    Returns:
        ``[batch, tokens, hidden]``.
    """
    conv_in, gate, b, a = _project(mixer, weights, hidden_states)
    conv_out = convolve(weights, buffers.conv_rows, cursors, slots, conv_in)
    y = gated_delta_rule_checkpointing(
        buffers.state,
        buffers.v_cache,
        buffers.k_cache,
        buffers.g_cache,
        buffers.beta_cache,
        cursors.ring_start,
        cursors.num_live,
        *_heads(mixer, weights, conv_out),
        a,
        b,
        weights.A_log,
        weights.dt_bias,
        state_batch_indices=slots,
        max_window=window,
    )
    return _finish(weights, y, gate)


def run_prompt(mixer: Any, weights: Weights, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Score prompts from an empty state: only the delta rule goes in blocks, each of which writes the state once.

    Args:
        mixer: the attached module.
        weights: what ``prepare`` gave for the mixer.
        hidden_states: ``[batch, tokens, hidden]`` fp32.

    Returns:
        The layer's output ``[batch, tokens, hidden]``, its final state and the inputs of its convolution at the last
        tokens, both as ``ReplayPool.write_state`` takes them.
    """
    batch = hidden_states.shape[0]
    layer, device = layer_shape(mixer), hidden_states.device
    slots = torch.arange(batch, device=device)
    conv_in, gate, b, a = _project(mixer, weights, hidden_states)
    conv_out, conv_window = convolve_prompt(weights, conv_in)
    q, k, v = _heads(mixer, weights, conv_out)
    state = torch.zeros(batch, *layer.state_sizes.values(), dtype=torch.float32, device=device)
    y = torch.empty_like(v)
    for parts in zip(*(each.split(MAX_TOKENS, 1) for each in (q, k, v, a, b, y)), strict=True):
        q_part, k_part, v_part, a_part, b_part, y_part = parts
        gated_delta_rule_mtp(
            q_part,
            k_part,
            v_part,
            state,
            slots,
            weights.A_log,
            a_part,
            weights.dt_bias,
            b_part,
            output=y_part,
            disable_state_update=False,
            backend="tensor_core",
        )
    return _finish(weights, y, gate), state, conv_window


def _project(mixer: Any, weights: Weights, hidden_states: Tensor) -> tuple[Tensor, ...]:
    """Inputs of the convolution, gate of the norm, b and a."""
    values = mixer.num_v_heads * mixer.head_v_dim
    channels = 2 * mixer.num_k_heads * mixer.head_k_dim + values
    widths = (channels, values, mixer.num_v_heads, mixer.num_v_heads)
    return torch.split_with_sizes(weights.in_proj(hidden_states), widths, -1)


def _heads(mixer: Any, weights: Weights, conv_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of the convolution as q, k ``[batch, tokens, key_heads, key_dim]`` and v, likewise."""
    if weights.activation is None:
        conv_out = ACT2FN[mixer.activation](conv_out)
    key_heads, key_dim, value_heads, value_dim = (
        mixer.num_k_heads, mixer.head_k_dim, mixer.num_v_heads, mixer.head_v_dim,
    )  # fmt: skip
    keys = key_heads * key_dim
    q, k, v = torch.split_with_sizes(conv_out, (keys, keys, value_heads * value_dim), -1)
    return (
        q.unflatten(-1, (key_heads, key_dim)),
        k.unflatten(-1, (key_heads, key_dim)),
        v.unflatten(-1, (value_heads, value_dim)),
    )


def _finish(weights: Weights, y: Tensor, gate: Tensor) -> Tensor:
    """Norm and output projection; the norm runs over the channels of one head."""
    batch, tokens, value_heads, value_dim = y.shape
    normed = weights.norm(y.reshape(-1, value_dim), gate.reshape(-1, value_dim))
    return weights.out_proj(normed.view(batch, tokens, value_heads * value_dim))
