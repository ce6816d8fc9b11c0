"""Drafts of your own: any function from the tokens so far to a guess. Wrong guesses cost time, never correctness."""

from itertools import pairwise

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import replayssm.hf
import replayssm.models


def common_successor(tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Guess that each token is followed by what most often followed it so far."""
    text = tokens.tolist()
    followers: dict[int, list[int]] = {}
    for before, after in pairwise(text):
        followers.setdefault(before, []).append(after)
    guess: list[int] = []
    while len(guess) < count and (guess or text)[-1] in followers:
        candidates = followers[(guess or text)[-1]]
        guess.append(max(candidates, key=candidates.count))
    return torch.tensor(guess, dtype=torch.int64)


def main(new_tokens: int = 96) -> dict[str, list[int]]:
    torch.set_num_threads(1)
    folder = replayssm.models.path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = tokenizer(replayssm.models.demo_prompt(), return_tensors="pt").input_ids
    texts = {}
    for name, draft in {"no drafts": None, "look-up": "lookup", "successor": common_successor}.items():
        ids, stats = replayssm.hf.generate(model, prompt, draft=draft, max_new_tokens=new_tokens, return_stats=True)
        texts[name] = ids[0].tolist()
        print(f"{name:10} {stats.tokens_per_second:6.0f} tokens/s, {stats.accept_rate:4.0%} of the drafts accepted")
    assert texts["no drafts"] == texts["look-up"] == texts["successor"]
    return texts


if __name__ == "__main__":
    main()
