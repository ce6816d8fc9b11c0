"""transformers' ``Mamba2Mixer``: its own projections and gated norm around our convolution and scan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from replayssm.cache import Mamba2Buffers, Mamba2Layer
from replayssm.cursors import Cursors
from replayssm.hf.linear import RowProduct
from replayssm.hf.mixers.convolution import activation_of, conv_parameters, convolve, convolve_prompt
from replayssm.hf.norm import in_one_launch
from replayssm.mamba import checkpointing_ssu
from replayssm.mamba.arguments import MAX_WINDOW

OPS = "mamba"
# Tokens of a prompt's block.
_BLOCK = MAX_WINDOW
MIXERS = ("Mamba2Mixer",)
GATED: tuple[str, ...] = ()
ROUTED: tuple[str, ...] = ()


def layer_shape(mixer: Any) -> Mamba2Layer:
    """Sizes of the mixer's recurrent layer."""
    return Mamba2Layer(
        nheads=mixer.num_heads,
        headdim=mixer.head_dim,
        dstate=mixer.ssm_state_size,
        ngroups=mixer.n_groups,
        conv_width=mixer.conv_kernel_size,
    )


def linears(mixer: Any) -> list[nn.Linear]:
    """The mixer's linear layers."""
    return [mixer.in_proj, mixer.out_proj]


@dataclass(frozen=True)
class Weights:
    """The mixer's parameters in the shapes that the ops take, made once per cache.

    Attributes:
        in_proj: the input projection.
        out_proj: the output projection.
        norm: the gated norm in front of it.
        conv_weight: ``[channels, width]``, stored tap by tap.
        conv_bias: ``[channels]`` or None.
        A: ``-exp(A_log)``, ``[nheads, headdim, dstate]`` with strides (1, 0, 0).
        D: ``[nheads, headdim]`` with strides (1, 0).
        dt_bias: like ``D``.
        dt_limit: bounds of the time step after bias and softplus.
        activation: what the convolution applies itself, None when the mixer's own module has to.
    """

    in_proj: RowProduct
    out_proj: RowProduct
    norm: nn.Module
    conv_weight: Tensor
    conv_bias: Tensor | None
    A: Tensor
    D: Tensor
    dt_bias: Tensor
    dt_limit: tuple[float, float]
    activation: str | None

    @property
    def rows_alike(self) -> bool:
        """Whether the projections were measured to treat every row alike."""
        return self.in_proj.rows_alike and self.out_proj.rows_alike


def prepare(mixer: Any, pack: bool) -> Weights:
    """Compute a mixer's ``Weights`` from the parameters it has now; ``pack`` is that of ``RowProduct``."""
    low, high = mixer.time_step_limit
    return Weights(
        in_proj=RowProduct(mixer.in_proj, pack),
        out_proj=RowProduct(mixer.out_proj, pack),
        norm=in_one_launch(mixer.norm),
        dt_limit=(float(low), float(high)),
        activation=activation_of(mixer),
        **derive(mixer),
    )


def derive(mixer: Any) -> dict[str, Any]:
    """The fields of ``Weights`` that are computed from parameters, or are parameters themselves."""
    heads, headdim, dstate = mixer.num_heads, mixer.head_dim, mixer.ssm_state_size
    return {
        **conv_parameters(mixer),
        "A": (-torch.exp(mixer.A_log.detach().float()))[:, None, None].expand(heads, headdim, dstate),
        "D": mixer.D.detach().float()[:, None].expand(heads, headdim),
        "dt_bias": mixer.dt_bias.detach().float()[:, None].expand(heads, headdim),
    }


def replay_forward(
    mixer: Any,
    weights: Weights,
    hidden_states: Tensor,
    buffers: Mamba2Buffers,
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
    conv_in, gate, dt = project(mixer, weights, hidden_states)
    out = torch.empty_like(conv_in, memory_format=torch.contiguous_format)  # padding may hold anything
    conv_out = convolve(weights, buffers.conv_rows, cursors, slots, conv_in, out)
    y = _scan(
        weights, buffers, (cursors.ring_start, cursors.num_live), split_inputs(mixer, weights, conv_out, dt), window,
        slots=slots,
    )  # fmt: skip
    return weights.out_proj(weights.norm(y.flatten(2), gate))


def run_prompt(mixer: Any, weights: Weights, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Score prompts from an empty state: only the recurrence goes in blocks, each of which reads the state once.

    A block that is folded before the next one is scored is Mamba-2's chunked scan with the chunk as window.
    transformers' own scan costs ten times as much on a CPU.

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
    conv_in, gate, dt = project(mixer, weights, hidden_states)
    conv_out, conv_window = convolve_prompt(weights, conv_in)
    # Rows of the ring where a block can begin, which are the numbers of live rows at the same time. Each in memory of
    # its own, since kernels are compiled for how their arguments are aligned.
    none, full = cursors = [torch.full((batch,), row, dtype=torch.int32, device=device) for row in (0, _BLOCK)]
    inputs = split_inputs(mixer, weights, conv_out, dt)
    scratch = Mamba2Buffers.allocate(
        layer, batch, ring_len=2 * _BLOCK, conv_len=1, state_dtype=torch.float32, activation_dtype=torch.float32,
        device=device,
    )  # fmt: skip
    y = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)
    parts = list(zip(y.split(_BLOCK, 1), *(each.split(_BLOCK, 1) for each in inputs), strict=True))
    for index, (out, *block) in enumerate(parts):
        places = cursors[max(index - 1, 0) % 2], full if index else none
        _scan(weights, scratch, places, block, _BLOCK, out=out)
    # One token more, which has no room beside the last block, folds it into the state.
    rest = parts[-1][0].shape[1]
    places = cursors[(len(parts) - 1) % 2], torch.full_like(none, rest)
    _scan(weights, scratch, places, [each[:, :1] for each in inputs], rest)
    out = weights.out_proj(weights.norm(y.flatten(2), gate))
    return out, scratch.state, conv_window


def project(mixer: Any, weights: Weights, hidden_states: Tensor) -> tuple[Tensor, ...]:
    """Inputs of the convolution, gate of the norm, and time steps ``[batch, tokens, heads]``."""
    inner, shared = mixer.num_heads * mixer.head_dim, mixer.n_groups * mixer.ssm_state_size
    widths = (inner, inner + 2 * shared, mixer.num_heads)
    gate, conv_in, dt = torch.split_with_sizes(weights.in_proj(hidden_states), widths, -1)
    return conv_in, gate, dt


def split_inputs(mixer: Any, weights: Weights, conv_out: Tensor, dt: Tensor, one_by_one: bool = False) -> list[Tensor]:
    """Outputs of the convolution, with the time steps, as x, dt, B and C of the op.

    Args:
        mixer: the attached module.
        weights: what ``prepare`` gave for the mixer.
        conv_out: ``[batch, tokens, channels]``.
        dt: ``[batch, tokens, heads]``.
        one_by_one: on a CPU, call an activation of the mixer's for one token at a time: many of torch's give other bits
            near the end of a tensor.
    """
    if weights.activation is None and one_by_one and conv_out.device.type == "cpu":
        conv_out = torch.stack([mixer.act(token) for token in conv_out.flatten(0, 1)]).view(conv_out.shape)
    elif weights.activation is None:
        conv_out = mixer.act(conv_out)
    heads, headdim, groups, dstate = mixer.num_heads, mixer.head_dim, mixer.n_groups, mixer.ssm_state_size
    x, B, C = torch.split_with_sizes(conv_out, (heads * headdim, groups * dstate, groups * dstate), -1)
    return [
        x.unflatten(-1, (heads, headdim)),
        dt.unsqueeze(-1).expand(-1, -1, -1, headdim),
        B.unflatten(-1, (groups, dstate)),
        C.unflatten(-1, (groups, dstate)),
    ]


def _scan(
    weights: Weights,
    buffers: Mamba2Buffers,
    places: tuple[Tensor, Tensor],
    inputs: Sequence[Tensor],
    window: int,
    *,
    slots: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The recurrence over ``inputs`` x, dt, B, C, from the ring rows at ``places``: first live row and live rows."""
    x, dt, B, C = inputs
    return checkpointing_ssu(
        buffers.state,
        buffers.x_cache,
        buffers.B_cache,
        buffers.dt_cache,
        *places,
        x,
        dt,
        weights.A,
        B,
        C,
        out,
        weights.D,
        None,
        weights.dt_bias,
        True,
        slots,
        state_scale=buffers.state_scale,
        max_window=window,
        dt_limit=weights.dt_limit,
    )
