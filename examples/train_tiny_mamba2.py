"""Train tiny-mamba2, a Mamba-2 of 3 million parameters in transformers' format.

    python examples/train_tiny_mamba2.py --tokens build/tiny_corpus.npz --out build/tiny-mamba2 --epochs 40

reads the token streams that `tiny_corpus.py` wrote and writes config.json, generation_config.json, model.safetensors
(bfloat16), loss.csv and loss.png. It runs on a GPU when there is one. The weights with the lowest held-out loss are
kept.

The model is transformers' own; only its forward is written anew, because the torch fallback there multiplies and sums
over [chunk, chunk, heads, state] tensors. Here the scan is a handful of matrix products (bfloat16 operands on a GPU)
with the decays in FP32, and the script compares the two before it trains.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from tiny_training import CHUNK, Recipe, causal_conv, main
from torch import Tensor
from transformers import Mamba2Config, Mamba2ForCausalLM


def build(vocab_size: int, hidden_size: int, layers: int) -> Mamba2ForCausalLM:
    config = Mamba2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        expand=2,
        head_dim=32,
        num_heads=2 * hidden_size // 32,
        state_size=64,
        n_groups=1,
        conv_kernel=4,
        chunk_size=32,  # transformers' CPU prefill costs memory in proportion to it
        tie_word_embeddings=True,
        initializer_range=0.05,
        rescale_prenorm_residual=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    return Mamba2ForCausalLM(config)


def chunk_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """y_i = Σ_{j ≤ i} exp(A Σ_{j < k ≤ i} dt_k) dt_j (C_i · B_j) x_j, by chunks (Dao and Gu 2024, section 6).

    Args:
        x: [batch, length, heads, headdim].
        dt: [batch, length, heads], FP32, after bias and softplus.
        A: [heads], FP32, negative.
        B: [batch, length, dstate]; one group.
        C: [batch, length, dstate].

    Returns:
        [batch, length, heads, headdim]. ``length`` is a multiple of `CHUNK`.
    """
    batch, length, heads, headdim = x.shape
    chunks = length // CHUNK
    x = x.view(batch, chunks, CHUNK, heads, headdim).transpose(2, 3)  # [b, c, h, q, p]
    dt = dt.view(batch, chunks, CHUNK, heads).transpose(2, 3)  # [b, c, h, q]
    B, C = (t.view(batch, chunks, CHUNK, -1) for t in (B, C))  # [b, c, q, n]

    decay = torch.cumsum(dt * A[:, None], dim=-1)  # log of the decay from the chunk's start, FP32
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(later, -math.inf).exp()
    scores = (C @ B.transpose(-1, -2))[:, :, None] * between * dt[..., None, :]  # [b, c, h, i, j]
    inside = scores.to(x.dtype) @ x

    to_end = (decay[..., -1:] - decay).exp() * dt
    added = (x * to_end[..., None].to(x.dtype)).transpose(-1, -2) @ B[:, :, None]  # [b, c, h, p, n]
    states, state = [], torch.zeros_like(added[:, 0], dtype=torch.float32)
    for chunk in range(chunks):
        states.append(state)
        state = state * decay[:, chunk, :, -1, None, None].exp() + added[:, chunk].float()
    before = torch.stack(states, dim=1).to(x.dtype)
    carried = (C[:, :, None] @ before.transpose(-1, -2)) * decay.exp()[..., None]
    return (inside + carried).transpose(2, 3).reshape(batch, length, heads, headdim)


def mixer_forward(mixer: torch.nn.Module, hidden: Tensor) -> Tensor:
    """The mixer of transformers' `Mamba2Mixer` (one group), with `chunk_scan` and the convolution as four products."""
    batch, length, _ = hidden.shape
    inner, state = mixer.intermediate_size, mixer.ssm_state_size
    gate, conv_in, dt = mixer.in_proj(hidden).split([inner, inner + 2 * state, mixer.num_heads], dim=-1)
    conv = causal_conv(conv_in, mixer.conv1d.weight, mixer.conv1d.bias).to(hidden.dtype)
    x, B, C = conv.split([inner, state, state], dim=-1)
    x = x.reshape(batch, length, mixer.num_heads, mixer.head_dim)
    dt = F.softplus(dt.float() + mixer.dt_bias)
    y = chunk_scan(x, dt, -mixer.A_log.float().exp(), B, C) + mixer.D[:, None] * x
    y = y.reshape(batch, length, inner).float() * F.silu(gate.float())
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + mixer.norm.variance_epsilon) * mixer.norm.weight
    return mixer.out_proj(y.to(hidden.dtype))


def block(layer: torch.nn.Module, hidden: Tensor, dropout: float, dtype: torch.dtype) -> Tensor:
    return hidden + F.dropout(mixer_forward(layer.mixer, layer.norm(hidden).to(dtype)), dropout)


RECIPE = Recipe(build, block, final_norm=lambda model: model.backbone.norm_f, layers=6, smallest=2)

if __name__ == "__main__":
    main(RECIPE, __doc__)
