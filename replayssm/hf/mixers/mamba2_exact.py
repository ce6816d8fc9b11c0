"""transformers' ``Mamba2Mixer`` on exact decode: a token has the bits that one scan over its whole text gives it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from replayssm.batch_invariant_decode import batch_invariant_decode_buffered_scan
from replayssm.cache import ExactMamba2Buffers, ExactMamba2Layer
from replayssm.cursors import Cursors
from replayssm.hf.mixers.convolution import convolve, convolve_prompt
from replayssm.hf.mixers.mamba2 import Weights, prepare, project, split_inputs
from replayssm.ssd import chunk_scan

__all__ = ["layer_shape", "prepare", "replay_forward", "run_prompt"]


def layer_shape(mixer: Any) -> ExactMamba2Layer:
    """Sizes of the mixer's recurrent layer, its chunks those of the model."""
    return ExactMamba2Layer(
        nheads=mixer.num_heads,
        headdim=mixer.head_dim,
        dstate=mixer.ssm_state_size,
        ngroups=mixer.n_groups,
        conv_width=mixer.conv_kernel_size,
        chunk_size=min(max(mixer.chunk_size, 16), 256),
    )


def replay_forward(
    mixer: Any,
    weights: Weights,
    hidden_states: Tensor,
    buffers: ExactMamba2Buffers,
    cursors: Cursors,
    slots: Tensor,
    window: int,
) -> Tensor:
    """Score new tokens behind the rows of the unfinished chunk.

    Args:
        mixer: the attached module.
        weights: what ``prepare`` gave for the mixer.
        hidden_states: ``[batch, tokens, hidden]`` fp32.
        buffers: this layer's buffers, written in place (rows always, the state when a chunk is folded).
        cursors: read only, for the convolution.
        slots: int64 ``[batch]``.
        window: not used; chunks are folded.

    Returns:
        ``[batch, tokens, hidden]``.
    """
    conv_in, gate, dt = project(mixer, weights, hidden_states)
    out = torch.empty_like(conv_in, memory_format=torch.contiguous_format)  # padding may hold anything
    conv_out = convolve(weights, buffers.conv_rows, cursors, slots, conv_in, out)
    x, _, B, C = split_inputs(mixer, weights, conv_out, dt, one_by_one=True)
    y = batch_invariant_decode_buffered_scan(
        buffers.records,
        x,
        None,
        dt,
        B,
        C,
        weights.A[:, 0, 0],
        weights.D[:, 0],
        weights.dt_bias[:, 0],
        slots,
        buffers.state,
        dt_limit=weights.dt_limit,
    )
    return weights.out_proj(weights.norm(y.flatten(2), gate))


def run_prompt(
    mixer: Any, weights: Weights, hidden_states: Tensor
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Score prompts from an empty state in one scan.

    Args:
        mixer: the attached module.
        weights: what ``prepare`` gave for the mixer.
        hidden_states: ``[batch, tokens, hidden]`` fp32.

    Returns:
        The layer's output ``[batch, tokens, hidden]``, and what ``ReplayPool.write_state`` takes: the state at the last
        chunk boundary, the inputs of the convolution at the last tokens, and x, dt and B since that boundary.
    """
    batch, tokens, _ = hidden_states.shape
    layer, device = layer_shape(mixer), hidden_states.device
    conv_in, gate, dt = project(mixer, weights, hidden_states)
    conv_out, conv_window = convolve_prompt(weights, conv_in)
    x, _, B, C = split_inputs(mixer, weights, conv_out, dt, one_by_one=True)
    state = torch.empty(batch, *layer.state_sizes.values(), dtype=torch.float32, device=device)
    y = chunk_scan(
        x.flatten(0, 1),
        dt.flatten(0, 1),
        weights.A[:, 0, 0],
        B.flatten(0, 1),
        C.flatten(0, 1),
        layer.chunk_size,
        torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens,
        D=weights.D[:, 0],
        dt_bias=weights.dt_bias[:, 0],
        dt_softplus=True,
        dt_limit=weights.dt_limit,
        boundary_states=state,
    )
    boundary = tokens - tokens % layer.chunk_size
    out = weights.out_proj(weights.norm(y.view(batch, tokens, -1), gate))
    return out, state, conv_window, (x[:, boundary:], dt[:, boundary:], B[:, boundary:])
