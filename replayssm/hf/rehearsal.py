"""Running every shape of a generation once, so that what it compiles is there when a request comes."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from replayssm.hf.sampling import Greedy
from replayssm.hf.session import Session, Shape
from replayssm.hf.step import padded_size


def rehearse(model: PreTrainedModel, rows: int, max_tokens: int, window: int, prompts: Sequence[int]) -> None:
    """Run prompts of the given lengths and a step of every width.

    Args:
        model: attached.
        rows: of the batch.
        max_tokens: most tokens of a step.
        window: of the pool; raised to ``max_tokens`` if it is smaller.
        prompts: lengths.
    """
    session = Session(model, Shape(rows, max_tokens, max(window, max_tokens), Greedy()))
    session.step.start(0, range(rows))
    for length in prompts:
        session.cache.reset()
        for _ in session.forward.prefill([[0] * length] * rows):
            pass
    for width in sorted({padded_size(width, max_tokens) for width in range(1, max_tokens + 1)}):
        session.step.choose(list(range(rows)), [[0] * width] * rows, [0] * rows)
        session.cache.accept([0] * rows)
    session.cache.close()
