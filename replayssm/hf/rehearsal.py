"""Running every shape of a generation once, so that what it compiles is there when a request comes."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from replayssm.hf.sampling import Greedy, Gumbel
from replayssm.hf.session import Session, Shape
from replayssm.hf.step import padded_size

# What prompts of one forward hold behind the tokens that fill whole blocks, so that they meet every kernel there is:
# full blocks and what remains, few rows and many.
_LENGTHS = (1, 3, 16, 17, 32, 33, 48, 64, 1000)


def rehearse(model: PreTrainedModel, rows: int, max_tokens: int, window: int, longest_prompt: int, exact: bool) -> None:
    """Run prompts up to a length and a step of every width, greedily and with noise.

    Args:
        model: attached.
        rows: of the batch.
        max_tokens: most tokens of a step.
        window: of the pool; raised to ``max_tokens`` if it is smaller.
        longest_prompt: tokens of the longest prompt that will come.
        exact: whether recurrent layers run on exact decode.
    """
    for sampler in (Greedy(), Gumbel()):
        session = Session(model, Shape(rows, max_tokens, max(window, max_tokens), sampler, exact))
        session.step.start(0, range(rows))
        numbers = torch.zeros(rows, dtype=torch.int64, device=model.device)
        whole = [session.most_in_pieces + length for length in _LENGTHS]
        for length in (1, *(length for length in whole if length <= longest_prompt)):
            session.cache.reset()
            for some, logits in session.prefill([[0] * length] * rows):
                sampler.choose(logits, numbers[: len(some)], numbers[: len(some)], numbers[: len(some), None])
        for width in sorted({padded_size(width, max_tokens) for width in range(1, max_tokens + 1)}):
            session.step.choose(list(range(rows)), [[0] * width] * rows, [0] * rows)
            session.cache.accept([0] * rows)
        session.cache.close()
