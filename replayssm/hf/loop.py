"""The draft-verify-accept loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from replayssm.hf.drafts import Drafter
from replayssm.hf.sampling import Greedy, Gumbel, signed_seed
from replayssm.hf.session import Session, Shape, session
from replayssm.hf.stats import GenerationStats
from replayssm.hf.stopping import Rules

# New tokens that a row has room for at first; a round adds no more than this.
_ROOM = 64


class _Rows:
    """The text of every row, and on demand as the tensors that processors and criteria want.

    Attributes:
        texts: prompt and new tokens, without padding.
        prompt_lens: lengths of the prompts.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], rules: Rules, pad_token_id: int, device: torch.device) -> None:
        self.texts = [list(prompt) for prompt in prompts]
        self.prompt_lens = [len(prompt) for prompt in prompts]
        self._max_new = rules.max_new_tokens
        self._widths = [max(self.prompt_lens) if rules.padded_rows else length for length in self.prompt_lens]
        self._ids: list[Tensor] = []
        if rules.per_token:
            for text, width in zip(self.texts, self._widths, strict=True):
                ids = torch.full((1, width + _ROOM), pad_token_id, dtype=torch.int64, device=device)
                ids[0, width - len(text) : width] = torch.tensor(text, device=device)
                self._ids.append(ids)

    def room(self, row: int) -> int:
        """New tokens that the row may still have."""
        return self._max_new - (len(self.texts[row]) - self.prompt_lens[row])

    def tensor(self, row: int, new: Sequence[int]) -> Tensor:
        """int64 ``[1, length]``: the row, followed by tokens that are not part of the text yet."""
        end = self._widths[row] + len(self.texts[row]) - self.prompt_lens[row]
        ids = self._write(row, end, new)
        # A copy: processors and criteria may keep what they are given.
        return ids[:, : end + len(new)].clone()

    def append(self, row: int, new: Sequence[int]) -> None:
        """Make tokens part of the text."""
        if self._ids:
            end = self._widths[row] + len(self.texts[row]) - self.prompt_lens[row]
            self._write(row, end, new)
        self.texts[row].extend(new)

    def _write(self, row: int, end: int, new: Sequence[int]) -> Tensor:
        """Put tokens behind column ``end``; the room doubles as texts grow, whatever ``max_new_tokens`` allows."""
        ids = self._ids[row]
        if end + len(new) > ids.shape[1]:
            ids = self._ids[row] = torch.cat([ids, torch.empty_like(ids)], dim=1)
        if new:
            ids[0, end : end + len(new)] = torch.tensor(new, device=ids.device)
        return ids


class Decoder:
    """One generation: prompts in, new tokens out.

    Args:
        model: attached.
        prompts: token ids of every row, none empty.
        seed: of the sampling noise.
        request_ids: identity of each row for it.
        sampler: chooses tokens from scores.
        rules: when rows end.
        drafter: where drafts come from; closed by the caller.
        num_draft_tokens: longest draft.
        window: the pool's window.
        streamer: an object with ``put(tensor)`` and ``end()`` for a batch of one, or None; if it has
            ``on_round(drafted, accepted)``, that hears of every round.
        shown: what the streamer gets first, None for nothing.
        pad_token_id: fills short rows where processors want padded ones.
        exact: whether recurrent layers run on exact decode.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        *,
        seed: int,
        request_ids: Sequence[int],
        sampler: Greedy | Gumbel,
        rules: Rules,
        drafter: Drafter,
        num_draft_tokens: int,
        window: int,
        streamer: Any,
        shown: Tensor | None,
        pad_token_id: int,
        exact: bool,
    ) -> None:
        self._model, self._sampler, self._rules, self._drafter = model, sampler, rules, drafter
        self._num_draft_tokens, self._window = num_draft_tokens, window
        self._streamer, self._shown = streamer, shown
        self._device, self._exact = model.device, exact
        self._seed, self._request_ids = seed, request_ids
        # For choices outside of a step: behind the prompts, and token by token.
        self._seeds = torch.full((len(prompts),), signed_seed(seed), device=self._device)
        self._requests = torch.tensor(request_ids, device=self._device)
        self._rows = _Rows(prompts, rules, pad_token_id, self._device)
        self._prompts = prompts
        self._active = set(range(len(prompts)))
        self._rounds = self._drafted = self._accepted = 0

    # Not only without gradients but without version counters: a round is many small operations.
    @torch.inference_mode()
    def run(self) -> tuple[list[list[int]], GenerationStats]:
        """Generate until every row has ended; returns the new tokens of each row and what it took."""
        began = time.perf_counter()
        max_tokens = min(self._num_draft_tokens + 1, self._rules.max_new_tokens)
        shape = Shape(len(self._prompts), max_tokens, max(self._window, max_tokens), self._sampler, self._exact)
        with session(self._model, shape) as held:
            if self._shown is not None:  # nothing can be refused any more
                self._streamer.put(self._shown)
            held.step.start(self._seed, self._request_ids)
            self._drafter.start(self._prompts)
            self._prefill(held)
            prefilled = time.perf_counter()
            while self._active:
                self._round(held)
            stats = self._stats(held, time.perf_counter() - began, prefilled - began)
        if self._streamer is not None:
            self._streamer.end()
        new = [text[start:] for text, start in zip(self._rows.texts, self._rows.prompt_lens, strict=True)]
        return new, stats

    def _prefill(self, held: Session) -> None:
        for rows, logits in held.prefill(self._prompts):
            if self._rules.per_token:
                self._take(rows, [self._decide(row, each, []) for row, each in zip(rows, logits, strict=True)])
            else:
                ends = torch.tensor([[len(self._prompts[row])] for row in rows], device=self._device)
                chosen = self._sampler.choose(logits, self._seeds[rows], self._requests[rows], ends).tolist()
                self._take(rows, [self._cut(row, each, []) for row, each in zip(rows, chosen, strict=True)])

    def _round(self, held: Session) -> None:
        rows, texts = sorted(self._active), self._rows.texts
        limits = [min(self._num_draft_tokens, self._rows.room(row) - 1) for row in rows]
        drafts = self._drafter.propose(rows, limits)
        windows = [[texts[row][-1], *draft] for row, draft in zip(rows, drafts, strict=True)]
        positions = [len(texts[row]) for row in rows]
        if self._rules.per_token:
            scores = held.step.score(rows, windows, positions)
            results = [
                self._decide(row, each, draft)
                for row, each, draft in zip(rows, scores[: len(rows)], drafts, strict=True)
            ]
        else:
            choices = held.step.choose(rows, windows, positions)
            results = [self._cut(row, each, draft) for row, each, draft in zip(rows, choices, drafts, strict=True)]
        self._take(rows, results)
        counts = [len(new) for new, _ in results]
        # Of a row that gained n tokens the window holds n rows of the text: the one before them and n - 1 drafts.
        held.cache.accept(counts)
        self._rounds += 1
        self._drafted += sum(map(len, drafts))
        self._accepted += sum(counts) - len(counts)
        if hasattr(self._streamer, "on_round"):
            self._streamer.on_round(sum(map(len, drafts)), sum(counts) - len(counts))

    def _take(self, rows: Sequence[int], results: Sequence[tuple[list[int], bool]]) -> None:
        """Make new tokens part of the rows' texts, end rows, tell drafter and streamer."""
        for row, (new, ended) in zip(rows, results, strict=True):
            self._rows.append(row, new)
            self._drafter.extend(row, new)
            if self._streamer is not None:
                for token in new:
                    self._streamer.put(torch.tensor([token], device="cpu"))
            if ended:
                self._active.discard(row)

    def _cut(self, row: int, choices: Sequence[int], draft: Sequence[int]) -> tuple[list[int], bool]:
        """Accept a draft without processors and criteria."""
        new, ended = self._rules.cut(choices, draft, self._rows.room(row))
        if new[-1] < 0:
            self._refuse_scores(row, len(self._rows.texts[row]) + len(new) - 1)
        return new, ended

    def _refuse_scores(self, row: int, position: int) -> None:
        raise ValueError(
            f"model: expected scores of which one is the highest, got NaN or minus infinity alone in row {row} for "
            f"token {position} of its text (the prompt counted)"
        )

    def _decide(self, row: int, logits: Tensor, draft: Sequence[int]) -> tuple[list[int], bool]:
        """Accept a draft token by token, with processors before and criteria behind each."""
        rules, length = self._rules, len(self._rows.texts[row])
        new: list[int] = []
        tokens, room = self._rows.tensor(row, new), self._rows.room(row)
        for place in range(len(draft) + 1):
            scores = rules.process(tokens, logits[place : place + 1].clone())
            position = torch.tensor([[length + place]], device=self._device)
            keys = self._seeds[row : row + 1], self._requests[row : row + 1]
            new.append(int(self._sampler.choose(scores[:, None], *keys, position)))
            if new[-1] < 0:
                self._refuse_scores(row, length + place)
            tokens = self._rows.tensor(row, new)
            if rules.ends(tokens, scores, room - len(new)):
                return new, True
            if place < len(draft) and new[-1] != draft[place]:
                break
        return new, False

    def _stats(self, held: Session, seconds: float, prefill_seconds: float) -> GenerationStats:
        cache, step = held.cache, held.step
        read, written = cache.traffic.moved_bytes()
        key_value_bytes, keys_read, keys_written = cache.traffic.key_value_bytes()
        lengths = zip(self._rows.texts, self._rows.prompt_lens, strict=True)
        return GenerationStats(
            new_tokens=sum(len(text) - start for text, start in lengths),
            rounds=self._rounds,
            drafted=self._drafted,
            accepted=self._accepted,
            seconds=seconds,
            prefill_seconds=prefill_seconds,
            pool_bytes=cache.pool.bytes(),
            slot_bytes=cache.pool.bytes_per_slot(),
            state_bytes_read=read,
            state_bytes_written=written,
            key_value_bytes=key_value_bytes,
            key_value_bytes_read=keys_read,
            key_value_bytes_written=keys_written,
            flushes=cache.traffic.flushed,
            graph_rounds=step.replayed,
            eager_because=step.graphs.refused,
            rows_alike=cache.rows_alike,
        )
