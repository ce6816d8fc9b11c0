"""Where draft tokens come from: the text so far, a callable of the user, or a smaller model (``draft_model.py``).

A drafter proposes a continuation of each row; what it proposes never changes the text, only the speed. It is told the
prompts once and every accepted token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

DraftFunction = Callable[[Tensor, int], Tensor]

# Look-up drafts are as long as the match deserves, so their limit may be long; others pay for every token they propose.
MOST_LOOKUP_TOKENS, MOST_OTHER_TOKENS = 11, 4


def default_draft_tokens(draft: object) -> int:
    """Longest draft where the caller names none: 11 by look-up, 4 from a model or a callable."""
    return MOST_LOOKUP_TOKENS if draft == "lookup" else MOST_OTHER_TOKENS


class Drafter(Protocol):
    """What the decoding loop asks of a source of drafts."""

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Learn the prompts; the row's number is its place in this sequence."""

    def propose(self, rows: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
        """Return for each of ``rows`` at most ``limits[i]`` tokens, possibly none."""

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Learn the tokens that were appended to a row."""

    def close(self) -> None:
        """Give back what the drafter holds."""


class NoDrafts:
    """Proposes nothing: ordinary decoding, one token a round."""

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """See Drafter."""

    def propose(self, rows: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
        """See Drafter."""
        return [[] for _ in rows]

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """See Drafter."""

    def close(self) -> None:
        """See Drafter."""


class NgramIndex:
    """The text of one row, with the newest place of every n-gram that has a continuation.

    Adding a token and finding the longest repeated suffix each cost a few dictionary look-ups, whatever the length of
    the text.

    Args:
        longest: length of the longest n-gram looked for.
        shortest: length of the shortest one.
        trust: tokens proposed per matched token, as short matches soon lead astray. 4 gave the fewest seconds per token
            on the shipped model's held-out prompts, single tokens included (docs/log.md).

    Example:
        >>> index = NgramIndex()
        >>> index.extend([5, 6, 7, 8, 5, 6])
        >>> index.propose(3)
        [7, 8, 5]
    """

    def __init__(self, longest: int = 4, shortest: int = 1, trust: int = 4) -> None:
        self._trust = trust
        self.tokens: list[int] = []
        self._lengths = range(longest, shortest - 1, -1)
        self._next: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        text, known = self.tokens, self._next
        for token in tokens:
            end = len(text)
            # Every n-gram that ends here gets its continuation now; the text's own suffix must not match itself.
            for length in self._lengths:
                if length <= end:
                    known[tuple(text[end - length : end])] = end
            text.append(token)

    def propose(self, num_tokens: int) -> list[int]:
        """What followed the newest earlier occurrence of the longest repeated suffix.

        A continuation that runs into the end of the text goes on with the proposed tokens, as a loop would.
        """
        text = self.tokens
        for length in self._lengths:
            start = self._next.get(tuple(text[-length:])) if length <= len(text) else None
            if start is not None:
                num_tokens = min(num_tokens, self._trust * length)
                found = text[start : start + num_tokens]
                while len(found) < num_tokens:
                    found.append(found[len(found) - (len(text) - start)])
                return found
        return []


class LookupDrafter:
    """Drafts from the row's own prompt and text (prompt look-up)."""

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """See Drafter."""
        self._rows = [NgramIndex() for _ in prompts]
        for index, prompt in zip(self._rows, prompts, strict=True):
            index.extend(prompt)

    def propose(self, rows: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
        """See Drafter."""
        return [self._rows[row].propose(limit) if limit else [] for row, limit in zip(rows, limits, strict=True)]

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """See Drafter."""
        self._rows[row].extend(tokens)

    def close(self) -> None:
        """See Drafter."""
        self._rows = []


class CallableDrafter:
    """Drafts from ``function(token_ids, num_tokens)``, called once per row and round.

    Args:
        function: gets the row's prompt and text, int64 ``[length]``, its own copy, and returns 1-D token ids (a tensor
            or a sequence of ints) of any length up to ``num_tokens``.
        vocab_size: ids must lie below.
    """

    def __init__(self, function: DraftFunction, vocab_size: int) -> None:
        self._function, self._vocab_size = function, vocab_size

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """See Drafter."""
        self._rows = [list(prompt) for prompt in prompts]

    def propose(self, rows: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
        """See Drafter.

        Raises:
            ValueError: the function returned something else than numbers, too many tokens, a wrong shape, or an id
                outside the vocabulary.
        """
        return [self._ask(row, limit) if limit else [] for row, limit in zip(rows, limits, strict=True)]

    def _ask(self, row: int, limit: int) -> list[int]:
        given = self._function(torch.tensor(self._rows[row], device="cpu"), limit)
        try:
            answer = given if isinstance(given, Tensor) else torch.as_tensor(given, device="cpu")
            tokens = answer.tolist()
        except (RuntimeError, TypeError, ValueError) as error:  # no numbers, a ragged list, a tensor without data
            raise ValueError(f"draft: expected 1-D token ids (an empty tensor for none), got {given!r}") from error
        if answer.dim() != 1 or answer.shape[0] > limit:
            raise ValueError(
                f"draft: expected 1-D token ids, at most num_tokens={limit} of them, got shape {list(answer.shape)}"
            )
        if answer.numel() and (answer.is_floating_point() or answer.is_complex() or answer.dtype == torch.bool):
            raise ValueError(f"draft: expected integer token ids, got {answer.dtype}")
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                raise ValueError(f"draft: expected token ids in 0..{self._vocab_size - 1}, got {token} for row {row}")
        return tokens

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """See Drafter."""
        self._rows[row].extend(tokens)

    def close(self) -> None:
        """See Drafter."""
        self._rows = []
