"""Train tiny-gdn-hybrid: Gated DeltaNet with full attention in every fourth layer, 3.8 million parameters.

    python examples/train_tiny_gdn_hybrid.py --tokens build/tiny_corpus.npz --out build/tiny-gdn-hybrid --epochs 40

reads the token streams that `tiny_corpus.py` wrote and writes config.json, generation_config.json, model.safetensors
(bfloat16), loss.csv and loss.png. It runs on a GPU when there is one. The weights with the lowest held-out loss are
kept.

The model is the text model of Qwen3.5 in transformers; only its forward is written anew. The scan there runs five
products per chunk one after the other and solves triangular systems, forward and backward. Here the inverse of the
triangle is a few batched products, its gradient two, and one product per chunk is left in the loop. The script compares
the two before it trains.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from tiny_training import CHUNK, Recipe, causal_conv, main
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

ROPE_THETA, ROTARY_SHARE = 10000.0, 0.25


def build(vocab_size: int, hidden_size: int, layers: int) -> Qwen3_5ForCausalLM:
    config = Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        linear_num_key_heads=2,
        linear_key_head_dim=hidden_size // 4,
        linear_num_value_heads=8,
        linear_value_head_dim=hidden_size // 8,
        linear_conv_kernel_dim=4,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA, "partial_rotary_factor": ROTARY_SHARE},
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight *= 2.5  # it is the head too
    return model


class UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 of strictly lower triangular L [..., n, n]; n is a power of two."""

    @staticmethod
    def forward(ctx: Any, L: Tensor) -> Tensor:  # noqa: D102
        inverse = unit_lower_inverse(L)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: D102
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grad @ transposed).tril(-1)


def unit_lower_inverse(L: Tensor) -> Tensor:
    """Halves on the diagonal first: in a series for the whole, powers would grow and cancel when keys repeat."""
    size = L.shape[-1]
    if size <= 4:  # I - L + L² - L³
        identity = torch.eye(size, device=L.device, dtype=L.dtype)
        return (identity - L) @ (identity + L @ L)
    half = size // 2
    upper, lower = unit_lower_inverse(torch.stack((L[..., :half, :half], L[..., half:, half:])))
    corner = -(lower @ L[..., half:, :half] @ upper)
    return torch.cat((F.pad(upper, (0, half)), torch.cat((corner, lower), dim=-1)), dim=-2)


def chunk_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """S_t = exp(g_t) S_{t-1} (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ, y_t = S_t q_t, by chunks (Yang et al. 2025).

    Args:
        q: [batch, length, key heads, K], FP32, with its scale.
        k: the same shape, of norm 1.
        v: [batch, length, value heads, V], FP32; consecutive value heads share a key head.
        g: [batch, length, value heads], FP32, natural log of the decay.
        beta: the same shape, in 0..1.

    Returns:
        [batch, length, value heads, V]. ``length`` is a multiple of `CHUNK`.
    """
    batch, length, key_heads, _ = q.shape
    chunks, sharing = length // CHUNK, v.shape[2] // key_heads
    # Everything is [batch, chunks, key heads, value heads of one key head, row, ...].
    q, k = (t.view(batch, chunks, CHUNK, key_heads, 1, -1).permute(0, 1, 3, 4, 2, 5) for t in (q, k))
    v = v.reshape(batch, chunks, CHUNK, key_heads, sharing, -1).permute(0, 1, 3, 4, 2, 5)
    g, beta = (t.view(batch, chunks, CHUNK, key_heads, sharing).permute(0, 1, 3, 4, 2) for t in (g, beta))

    decay = g.cumsum(-1)  # log of the decay from the chunk's start
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(later, -math.inf).exp()
    inverse = UnitLowerInverse.apply((beta[..., None] * (k @ k.transpose(-1, -2)) * between).tril(-1))
    values = inverse @ (beta[..., None] * v)  # what each row adds if the chunk starts from zero
    reads = inverse @ ((beta * decay.exp())[..., None] * k)  # and what of the state before it takes back
    kept = k * (decay[..., -1:] - decay).exp()[..., None]
    added = kept.transpose(-1, -2) @ values  # [..., K, V]
    step = torch.eye(k.shape[-1], device=k.device) * decay[..., -1, None, None].exp() - kept.transpose(-1, -2) @ reads
    states, state = [], torch.zeros_like(added[:, 0])
    for chunk in range(chunks):
        states.append(state)
        state = step[:, chunk] @ state + added[:, chunk]
    before = torch.stack(states, dim=1)
    scores = (q @ k.transpose(-1, -2)) * between
    y = (q * decay.exp()[..., None]) @ before + scores @ (values - reads @ before)
    return y.permute(0, 1, 4, 2, 3, 5).reshape(batch, length, key_heads * sharing, -1)


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def delta_net_forward(mixer: torch.nn.Module, hidden: Tensor) -> Tensor:
    """The mixer of transformers' `Qwen3_5GatedDeltaNet`, with `chunk_delta_rule` in FP32."""
    batch, length, _ = hidden.shape
    conv = causal_conv(mixer.in_proj_qkv(hidden), mixer.conv1d.weight)
    z, a, b = mixer.in_proj_z(hidden), mixer.in_proj_a(hidden), mixer.in_proj_b(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        q, k, v = conv.float().split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
        q, k = (unit(t.reshape(batch, length, mixer.num_k_heads, mixer.head_k_dim)) for t in (q, k))
        v = v.reshape(batch, length, mixer.num_v_heads, mixer.head_v_dim)
        g = -mixer.A_log.float().exp() * F.softplus(a.float() + mixer.dt_bias)
        y = chunk_delta_rule(q * mixer.head_k_dim**-0.5, k, v, g, b.float().sigmoid())
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + mixer.layer_norm_epsilon) * mixer.norm.weight
        y = y.flatten(2) * F.silu(z.float())
    return mixer.out_proj(y.to(hidden.dtype))


def rotate(x: Tensor) -> Tensor:
    """Rotary positions on the first `ROTARY_SHARE` of the channels of x [batch, heads, length, head dim]."""
    size = int(x.shape[-1] * ROTARY_SHARE)
    rates = ROPE_THETA ** (-torch.arange(0, size, 2, device=x.device) / size)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    first, second, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def attention_forward(attention: torch.nn.Module, hidden: Tensor) -> Tensor:
    """The forward of transformers' `Qwen3_5Attention` over whole sequences."""
    batch, length, _ = hidden.shape
    q, gate = attention.q_proj(hidden).view(batch, length, -1, 2 * attention.head_dim).chunk(2, dim=-1)
    k, v = (
        project(hidden).view(batch, length, -1, attention.head_dim).transpose(1, 2)
        for project in (attention.k_proj, attention.v_proj)
    )
    q, k = rotate(attention.q_norm(q).transpose(1, 2)), rotate(attention.k_norm(k))
    q, k, v = (t.to(hidden.dtype) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return attention.o_proj(y.transpose(1, 2).flatten(2) * gate.flatten(2).sigmoid())


def block(layer: torch.nn.Module, hidden: Tensor, dropout: float, dtype: torch.dtype) -> Tensor:
    x = layer.input_layernorm(hidden).to(dtype)
    linear = layer.block_type == "linear_attention"
    mixed = delta_net_forward(layer.linear_attn, x) if linear else attention_forward(layer.self_attn, x)
    hidden = hidden + F.dropout(mixed, dropout)
    return hidden + F.dropout(layer.mlp(layer.post_attention_layernorm(hidden).to(dtype)), dropout)


RECIPE = Recipe(build, block, final_norm=lambda model: model.model.norm, layers=8, smallest=4)

if __name__ == "__main__":
    main(RECIPE, __doc__)
