"""Tiny random models of odd sizes, and texts made by plain transformers, one token at a time."""

import functools
import inspect

import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Mamba2Config,
    Mamba2ForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)
from transformers.utils import logging

logging.set_verbosity_error()

MAMBA2 = {
    "biases": dict(vocab_size=61, hidden_size=24, num_heads=6, head_dim=8, state_size=10, n_groups=2, conv_kernel=3,
                   use_bias=True, use_conv_bias=False, num_hidden_layers=3),
    "tied": dict(vocab_size=53, hidden_size=20, num_heads=5, head_dim=8, state_size=12, n_groups=1, conv_kernel=4,
                 tie_word_embeddings=True, num_hidden_layers=2),
    "narrow": dict(vocab_size=37, hidden_size=16, num_heads=8, head_dim=4, state_size=7, n_groups=4, conv_kernel=2,
                   use_bias=True, num_hidden_layers=2, hidden_act="gelu"),
}  # fmt: skip
# With Gated DeltaNet and attention layers.
_GDN = dict(linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=8, linear_value_head_dim=5,
            linear_conv_kernel_dim=4)  # fmt: skip
_MOE = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=20)
_ROPE = dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5)

HYBRIDS = {
    # Six value heads on two key heads, K = 8, V = 5; three query heads on one; half of a head is rotated.
    "next": (Qwen3NextConfig, dict(
        vocab_size=61, hidden_size=24, intermediate_size=36, num_hidden_layers=4, num_attention_heads=3,
        num_key_value_heads=1, head_dim=12, num_experts=0, full_attention_interval=2, **_GDN)),
    "next_moe": (Qwen3NextConfig, dict(
        vocab_size=53, hidden_size=32, intermediate_size=28, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, mlp_only_layers=[1], full_attention_interval=3, **_MOE, **_GDN)),
    # Separate projections, attention first, biases, tied embeddings.
    "3_5": (Qwen3_5TextConfig, dict(
        vocab_size=47, hidden_size=16, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, attention_bias=True, tie_word_embeddings=True,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        linear_num_key_heads=3, linear_num_value_heads=3, linear_key_head_dim=4, linear_value_head_dim=7,
        linear_conv_kernel_dim=3)),
    "3_5_moe": (Qwen3_5MoeTextConfig, dict(
        vocab_size=59, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        full_attention_interval=2, **_MOE, **_GDN)),
}  # fmt: skip


def fresh_model(name="biases", seed=0, attn_implementation="sdpa", **changes):
    """A new random model; its parameters are spread enough for the likeliest token to stand out."""
    torch.manual_seed(seed)
    ids = dict(eos_token_id=None, pad_token_id=0, bos_token_id=1)
    if name in MAMBA2:
        model = Mamba2ForCausalLM(Mamba2Config(**{**MAMBA2[name], **changes}, chunk_size=16, **ids)).eval()
    else:
        make, sizes = HYBRIDS[name]
        config = make(**{**sizes, **changes}, rope_parameters=_ROPE, **ids)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@functools.cache
def shared_model(name="biases"):
    """One model per name, for tests that leave it as it is."""
    return fresh_model(name)


def make_prompts(name, lengths, seed=1):
    sizes = MAMBA2[name] if name in MAMBA2 else HYBRIDS[name][1]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, sizes["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


def cache_name(model):
    parameters = inspect.signature(model.forward).parameters
    return next(name for name in ("cache", "cache_params", "past_key_values") if name in parameters)


@torch.no_grad()
def step_logits(model, tokens):
    """Logits ``[len(tokens), vocab]`` of plain transformers, fed one token at a time."""
    cache = DynamicCache(config=model.config)
    return torch.cat([model(torch.tensor([[t]]), **{cache_name(model): cache}).logits[0] for t in tokens])


@functools.cache
def _greedy_text(name, prompt, count):
    model, text, margin = shared_model(name), list(prompt), float("inf")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for token in prompt[:-1]:
            model(torch.tensor([[token]]), **{cache_name(model): cache})
        for _ in range(count):
            logits = model(torch.tensor([[text[-1]]]), **{cache_name(model): cache}).logits[0, -1]
            first, second = logits.topk(2).values.tolist()
            margin = min(margin, first - second)
            text.append(int(logits.argmax()))
    return text[len(prompt) :], margin


def greedy_text(name, prompt, count):
    """The new tokens that plain transformers takes, fed one token at a time, alone and unpadded."""
    new, margin = _greedy_text(name, tuple(prompt), count)
    assert margin > 1e-4, "the model's choices are too close for a comparison of ids; take another prompt"
    return list(new)


def pad(prompts, side="left", fill=0):
    """input_ids and attention_mask."""
    width = max(map(len, prompts))
    ids, mask = torch.full((len(prompts), width), fill), torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        place = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        ids[row, place], mask[row, place] = torch.tensor(prompt), 1
    return ids, mask


def oracle(texts, hit):
    """A draft callable that knows the texts (prompt and continuation) and is right where ``hit(position)`` holds."""

    def draft(token_ids, num_tokens):
        known = token_ids.tolist()
        text = next(text for text in texts if text[: len(known)] == known)
        return torch.tensor(
            [t if hit(len(known) + i) else abs(t - 1) for i, t in enumerate(text[len(known) :][:num_tokens])],
            dtype=torch.int64,
        )

    return draft
