"""How often a shipped model accepts look-up drafts on text that it has not seen.

    python examples/accept_rate.py tiny-mamba2

counts on the twenty held-out passages, in two ways:

greedy   the model continues each prompt greedily. A drafted token is accepted if it is what the model would write.
         Decoding is lossless, so this can be counted on the finished text.
forced   the real continuation is fed, whatever the model would write. A drafted token is accepted if it is both the
         real token and the model's first choice. Harder than any use, and free of the loops that a model falls into.

Small models repeat themselves, and repetitions are easy to draft. So the greedy text is also counted up to the point
where it starts to loop: a cycle of at most `period` tokens stands three times in a row; what follows its first round is
dropped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import replayssm.hf
import replayssm.models
from replayssm.hf.drafts import NgramIndex


def before_loop(tokens: Sequence[int], period: int, rounds: int = 3) -> int:
    """How many tokens stand before a cycle of at most ``period`` tokens, seen ``rounds`` times, begins to repeat.

    Example:
        >>> before_loop([9, 1, 2, 1, 2, 1, 2, 5], period=4)
        3
        >>> before_loop([9, 1, 2, 1, 2, 5], period=4)
        6
    """
    run = [0] * (period + 1)  # run[p]: for how many tokens up to here each token equals the one p earlier
    for end, token in enumerate(tokens, start=1):
        for p in range(1, period + 1):
            run[p] = run[p] + 1 if end > p and tokens[end - 1 - p] == token else 0
            if run[p] == (rounds - 1) * p:
                return end - (rounds - 1) * p
    return len(tokens)


def count(prompt: Sequence[int], text: Sequence[int], wanted: Sequence[bool], num_drafts: int) -> tuple[int, int, int]:
    """Decode ``text`` with look-up drafts.

    Args:
        prompt: token ids.
        text: the token ids that are written after it.
        wanted: whether the model would write text[i] too; a draft of another token is not accepted.
        num_drafts: drafts of a round.

    Returns:
        Tokens drafted, tokens accepted, rounds.
    """
    index, place = NgramIndex(), 0
    index.extend(prompt)
    drafted = accepted = rounds = 0
    while place < len(text):
        draft = index.propose(min(num_drafts, len(text) - place))
        right = 0
        while right < len(draft) and draft[right] == text[place + right] and wanted[place + right]:
            right += 1
        drafted, accepted, rounds = drafted + len(draft), accepted + right, rounds + 1
        new = text[place : place + right + 1]  # the accepted drafts and the token that the round itself gives
        index.extend(new)
        place += len(new)
    return drafted, accepted, rounds


def continuations(name: str, new_tokens: int) -> list[tuple[list[int], list[int], list[int], list[bool]]]:
    """For each passage: prompt, greedy text, real text, and whether the model's first choice is the real token."""
    folder = replayssm.models.path(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for passage in json.loads((folder / "heldout.json").read_text(encoding="utf-8"))["passages"]:
        prompt, real = tokenizer(passage["prompt"]).input_ids, tokenizer(passage["continuation"]).input_ids
        ids = torch.tensor([prompt])
        greedy = replayssm.hf.generate(model, ids, draft="lookup", max_new_tokens=new_tokens)[0, len(prompt) :].tolist()
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + real]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        rows.append((prompt, greedy, real, [a == b for a, b in zip(logits.argmax(-1).tolist(), real, strict=True)]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=replayssm.models.NAMES)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[2, 4, 6])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = continuations(args.model, args.new_tokens)
    always = [True] * args.new_tokens
    texts = {"greedy, all of it": [(prompt, greedy, always) for prompt, greedy, _, _ in rows]}
    for period in (16, 64):
        cut = [(prompt, greedy[: before_loop(greedy, period)], always) for prompt, greedy, _, _ in rows]
        texts[f"greedy, before loops of period <= {period}"] = cut
    texts["forced"] = [(prompt, real, choice) for prompt, _, real, choice in rows]
    print("| text | tokens | drafts a round | accept rate | tokens a round |\n|---|---|---|---|---|")
    for name, parts in texts.items():
        size = sum(len(text) for _, text, _ in parts)
        for num_drafts in args.num_draft_tokens:
            drafted, accepted, rounds = (sum(c) for c in zip(*(count(*p, num_drafts) for p in parts), strict=True))
            print(f"| {name} | {size} | {num_drafts} | {accepted / drafted:.2f} | {size / rounds:.2f} |")


if __name__ == "__main__":
    main()
