"""Scoring a window of tokens per row and choosing a token at every place, with one read by the host."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from replayssm.hf.cache import ReplayCache
from replayssm.hf.forward import Forward
from replayssm.hf.graph import Graphs
from replayssm.hf.sampling import Greedy, Gumbel, signed_seed

# What a row's tokens are followed by: place of the first choice (in a prompt, the last token's in the window), seed,
# request, and the commit that is owed.
_COLUMNS = 5


def padded_size(size: int, most: int) -> int:
    """The next power of two, at most ``most``: a few shapes serve every size.

    Example:
        >>> [padded_size(size, 12) for size in (1, 3, 8, 9, 12)]
        [1, 4, 8, 12, 12]
    """
    return min(1 << (size - 1).bit_length(), most)


class Step:
    """Forwards of the open windows of a batch.

    Everything that a forward needs lies in one buffer that is sent in one copy: tokens, places, keys of the noise, and
    how many tokens of the window before are kept. The commit of those stands at the head of the forward, so that the
    whole step is a function of fixed buffers, and a CUDA graph of it can be replayed. Shapes are padded to a few then.

    Args:
        forward: of the model with ``cache``, whose commits are deferred to here.
        cache: selects the rows.
        sampler: how tokens are chosen.
        refused: why the steps cannot be captured, None if they can.
        most: tokens of the widest window behind the prompts.

    Attributes:
        graphs: the captured steps.
        replayed: steps behind the prompts that came from a graph since ``start``.
    """

    def __init__(
        self, forward: Forward, cache: ReplayCache, sampler: Greedy | Gumbel, refused: str | None, most: int
    ) -> None:
        self._forward, self._cache, self._sampler, self._most = forward, cache, sampler, most
        pool, on_gpu = cache.pool, cache.pool.device.type == "cuda"
        most = pool.num_slots * (pool.max_tokens + _COLUMNS)
        self._host = torch.zeros(most, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        self._given = torch.zeros(most, dtype=torch.int64, device=pool.device) if on_gpu else self._host
        self._chosen = torch.empty_like(self._host, pin_memory=on_gpu)
        self._sent = torch.cuda.Event() if on_gpu else None
        self.graphs = Graphs(refused)
        self.replayed = 0
        cache.defer_commits()

    def start(self, seed: int, request_ids: Sequence[int]) -> None:
        """Begin a generation whose rows draw with these keys."""
        self._keys = [(signed_seed(seed), request) for request in request_ids]
        self.replayed = 0

    def choose(
        self, rows: Sequence[int], windows: Sequence[Sequence[int]], positions: Sequence[int]
    ) -> list[list[int]]:
        """Choose behind every token of the rows' windows.

        Args:
            rows: of the batch, each of them prefilled.
            windows: their next tokens, 1..max_tokens of them. What was not accepted of the window before is forgotten.
            positions: index in its text of the choice behind each window's first token.

        Returns:
            Per row at least as many choices as its window has tokens; -1 where the scores allow none.
        """
        chosen = self._run(self._choices, rows, windows, positions, self._width(windows))
        if chosen.is_cuda:
            read = self._chosen[: chosen.numel()].view(chosen.shape)
            read.copy_(chosen, non_blocking=True)
            torch.cuda.current_stream().synchronize()
            chosen = read
        return chosen[: len(rows)].tolist()

    def score(self, rows: Sequence[int], windows: Sequence[Sequence[int]], positions: Sequence[int]) -> Tensor:
        """Like ``choose``, but return the logits ``[rows, tokens, vocab]``, which the next step may overwrite."""
        return self._run(self._scores, rows, windows, positions, self._width(windows))

    def prompt(self, prompts: Mapping[int, Sequence[int]], width: int) -> Iterator[tuple[list[int], Tensor]]:
        """Run prompts of empty rows window by window; yields rows and the logits of their last tokens.

        Every window has one width, so there is one graph for prompts of all lengths, and a row's bits depend on no
        other row.

        Args:
            prompts: by row.
            width: of the windows.

        Yields:
            Rows, and ``[rows, 1, vocab]``, which the next step may overwrite.
        """
        self._cache.begin_in_windows(prompts)
        rows, done = list(prompts), 0
        while rows:
            windows = [prompts[row][done : done + width] for row in rows]
            counts = [len(window) for window in windows]
            scores = self._run(self._last_scores, rows, windows, [count - 1 for count in counts], width)
            self._cache.accept(counts)
            done += width
            ended = [place for place, row in enumerate(rows) if len(prompts[row]) <= done]
            if ended:
                yield (
                    [rows[place] for place in ended],
                    scores[: len(rows)] if len(ended) == len(rows) else scores[ended],
                )
            rows = [row for row in rows if len(prompts[row]) > done]
        self.replayed = 0

    def _width(self, windows: Sequence[Sequence[int]]) -> int:
        width = max(map(len, windows))
        return width if self.graphs.refused else padded_size(width, self._most)

    def _run(
        self,
        function: Callable[[int, int], Tensor],
        rows: Sequence[int],
        windows: Sequence[Sequence[int]],
        positions: Sequence[int],
        width: int,
    ) -> Tensor:
        total = len(rows) if self.graphs.refused else padded_size(len(rows), self._cache.pool.num_slots)
        self._cache.select(rows, total)
        self._send(rows, windows, positions, total, width)
        graph = self.graphs.find(
            (function.__name__, total, width, *self._cache.layout),
            lambda: function(total, width),
            self._cache.recording,
        )
        if graph is None:
            return function(total, width)
        self._cache.book_forward(total, width)
        self.replayed += 1
        return graph.replay()

    def _send(
        self,
        rows: Sequence[int],
        windows: Sequence[Sequence[int]],
        positions: Sequence[int],
        total: int,
        width: int,
    ) -> None:
        given = array("q")
        for row, window, position, owed in zip(rows, windows, positions, self._cache.take_owed(), strict=True):
            given.extend(window)
            given.extend([0] * (width - len(window)))
            given.extend((position, *self._keys[row], *owed))
        given.extend([0] * ((total - len(rows)) * (width + _COLUMNS)))
        if self._sent is not None:
            self._sent.synchronize()  # the copy before may not have run yet, when nothing has been read since
        self._host[: len(given)] = torch.frombuffer(given, dtype=torch.int64)
        if self._sent is not None:
            self._given[: len(given)].copy_(self._host[: len(given)], non_blocking=True)
            self._sent.record()

    def _columns(self, total: int, width: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        given = self._given[: total * (width + _COLUMNS)].view(total, width + _COLUMNS)
        return given[:, :width], given[:, width:].unbind(1)

    def _scores(self, total: int, width: int) -> Tensor:
        return self._forward.score(self._begun(total, width))

    def _last_scores(self, total: int, width: int) -> Tensor:
        _, (places, *_) = self._columns(total, width)
        return self._forward.score_one(self._begun(total, width), places)

    def _begun(self, total: int, width: int) -> Tensor:
        """The window's tokens, when what is owed of the window before has been committed."""
        ids, (_, _, _, seq_lens, kept) = self._columns(total, width)
        self._cache.commit(kept, seq_lens)
        return ids

    def _choices(self, total: int, width: int) -> Tensor:
        _, (positions, seeds, requests, _, _) = self._columns(total, width)
        places = positions[:, None] + torch.arange(width, device=positions.device)
        return self._sampler.choose(self._scores(total, width), seeds, requests, places)
