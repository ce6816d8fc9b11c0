"""Generations: on any device, and compared with plain transformers, fed one token at a time, row by row."""

import torch
from tiny import greedy_text, make_prompts, oracle, pad, shared_model

import replayssm.hf as hf

LENGTHS = (9, 2, 14, 5, 1)
COUNT = 21
HITS = {
    "right": lambda place: True,
    "wrong": lambda place: False,
    "alternating": lambda place: place % 2 == 0,
    "mixed": lambda place: place % 5 != 0,
}


def padded_batch(name, lengths, seed=1):
    return pad(make_prompts(name, lengths, seed))


def run(model, ids, mask, device, **options):
    """The new tokens and the statistics of 24 tokens' generation on a device, to which the model is moved."""
    options = {"max_new_tokens": 24, "eos_token_id": (), "num_draft_tokens": 3, "return_stats": True, **options}
    out, stats = hf.generate(model.to(device), ids.to(device), attention_mask=mask.to(device), **options)
    return out[:, ids.shape[1] :].cpu(), stats


def texts(model, ids, mask, device, **options):
    return run(model, ids, mask, device, **options)[0]


def new_tokens(ids, width):
    return [row[width:].tolist() for row in ids]


def check(name, draft, num_draft_tokens, batch, side="left", window=16, seed=1, count=COUNT):
    prompts = make_prompts(name, LENGTHS[:batch], seed)
    expected = [greedy_text(name, prompt, count) for prompt in prompts]
    if draft in HITS:
        draft = oracle([p + e for p, e in zip(prompts, expected, strict=True)], HITS[draft])
    ids, mask = pad(prompts, side)
    out, stats = hf.generate(
        shared_model(name),
        ids,
        attention_mask=mask,
        draft=draft,
        num_draft_tokens=num_draft_tokens,
        max_new_tokens=count,
        window=window,
        return_stats=True,
    )
    assert torch.equal(out[:, : ids.shape[1]], ids)
    assert new_tokens(out, ids.shape[1]) == expected
    assert stats.rows_alike
    return stats
