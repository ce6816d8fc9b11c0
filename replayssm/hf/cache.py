"""A transformers cache whose recurrent layers live in a replay pool, so that ``crop`` really takes tokens back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from replayssm.cache import ReplayPool
from replayssm.cache.records import MAX_SIZE
from replayssm.checks import check_flag, check_integer, check_range
from replayssm.hf.attachment import attachment_of
from replayssm.hf.attention import KeyValueRows
from replayssm.hf.body import Body, with_head
from replayssm.hf.fixed_cache import FixedCache, UnattachedLayer
from replayssm.hf.linear import RowProduct, may_pack
from replayssm.hf.options import integers
from replayssm.hf.traffic import Traffic


class ReplayCache(FixedCache):
    """Cache of an attached model, over slots of a ``replayssm.cache.ReplayPool``.

    The first forward of a row is its prefill: it takes any number of tokens, and its final states become the pool's
    checkpoints. Every later forward takes up to ``max_tokens`` tokens and leaves the checkpoint alone until the window
    is full. The tokens of the newest forward count as accepted when the next forward starts, unless ``crop`` or
    ``accept`` said otherwise.

    Args:
        model: an attached model. The weights it has now are used; they must not change while the cache is in use.
        batch_size: rows of ``input_ids`` in every forward.
        max_tokens: most tokens of one forward after the prefill, at most ``window``.
        window: most ring rows that are replayed before they are folded into the checkpoint.
        exact: run the recurrent layers on exact decode, which folds whole chunks instead: logits of the model are then
            those of ``score(..., exact=True)``, bit for bit. Mamba-2 models.

    Attributes:
        pool: the pool; its slots are freed by ``close`` or at the end of a ``with`` block.
        slots: int64, the pool's slots of the selected rows, -1 for padding; where they lie never changes.
        weights: what the family's ``prepare`` gave for every mixer.
        head: the language-model head, whose rows do not depend on their number.
        whole: the model with that head, which runs when the attached model is called with this cache.
        traffic: counts of what was read and written.
        rows_alike: whether all matrix products were measured to treat every row alike.

    Raises:
        TypeError: an argument of another type.
        ValueError: the model is not attached, or was changed since in a way that replay cannot follow; an argument out
            of range; logits that cannot be exact here.

    Example:
        >>> import torch
        >>> from transformers import Mamba2Config, Mamba2ForCausalLM
        >>> from replayssm.hf import attach
        >>> config = Mamba2Config(vocab_size=61, hidden_size=24, num_heads=6, head_dim=8, state_size=10, n_groups=2,
        ...                       num_hidden_layers=2, chunk_size=16)
        >>> model = attach(Mamba2ForCausalLM(config).eval())
        >>> cache = ReplayCache(model, batch_size=1)
        >>> with torch.no_grad():
        ...     _ = model(torch.tensor([[5, 9, 2, 7]]), **{cache.name: cache})
        ...     first = model(torch.tensor([[3, 1, 4]]), **{cache.name: cache}).logits
        ...     cache.crop(-2)
        ...     second = model(torch.tensor([[1, 4]]), **{cache.name: cache}).logits
        >>> torch.equal(first[:, 1:], second)
        True
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch_size: int,
        *,
        max_tokens: int = 8,
        window: int = 16,
        exact: bool = False,
    ) -> None:
        check_flag("exact", exact)
        attachment = attachment_of(model) if isinstance(model, PreTrainedModel) else None
        if attachment is None:
            raise ValueError("model: expected an attached model; call replayssm.hf.attach(model) first")
        attachment.check_bypassed(model)
        check_range("batch_size", batch_size, 1, MAX_SIZE)
        family, mixers = attachment.exact_family() if exact else attachment.family, attachment.mixers
        super().__init__(layers=[UnattachedLayer() for _ in mixers])
        self.name = attachment.cache_name
        self.pool = ReplayPool(
            [family.layer_shape(mixer) for mixer in mixers],
            batch_size,
            window=window,
            max_tokens=max_tokens,
            device=model.device,
        )
        self._prompts = False
        self._family, self._model = family, model.base_model
        pack = may_pack(attachment.linears)
        self.weights = [family.prepare(mixer, pack) for mixer in mixers]
        self._body = Body(attachment, pack)
        self.head = RowProduct(attachment.head, pack)
        self.whole = with_head(model, attachment, self.head)
        self.rows_alike = all(part.rows_alike for part in (self._body, self.head, *self.weights))
        if exact and not self.rows_alike:
            raise ValueError(
                "exact: expected matrix products whose rows do not depend on how many are multiplied together, which "
                f"those of this model on '{model.device}' do not; on a CPU torch.set_num_threads(1) usually helps"
            )
        masked = attachment.takes_masks
        self._attention = KeyValueRows(batch_size, model.device, attachment.adds_masks) if masked else None
        self.traffic = Traffic(self.pool, self._attention)
        self._slots = self.pool.allocate(batch_size)
        # Host copies of what the next forward needs, so that no device value is read back.
        self._lengths = [0] * batch_size
        # Empty rows whose first forward is no prefill but a window.
        self._begun: set[int] = set()
        self._pending = 0
        # Whether the newest forward has not run all layers.
        self._unfinished = False
        self._rows: list[int] = []
        self._in_place = False
        # One place for the slots of every selection, because a captured graph reads them there.
        with torch.inference_mode(False):
            self._selectable = torch.zeros_like(self._slots)
        self.slots = self._selectable[:0]
        # Per row the tokens of its newest forward and how many to keep, where commits are left to a later forward.
        self._owed: list[tuple[int, int]] | None = None
        self._recording = False
        self.select(range(batch_size))

    def __repr__(self) -> str:
        return f"ReplayCache(rows of {self._lengths} tokens, max_tokens={self.pool.max_tokens})"

    def select(self, rows: Sequence[int], total: int | None = None) -> None:
        """Let the next forwards have these rows of the batch only, in this order. Accepts what is pending.

        Args:
            rows: distinct numbers in ``0..batch_size-1``.
            total: rows of the forwards, ``len(rows)..batch_size``; those behind the selected ones are padding, of which
                nothing gets into the pool. None: no padding.
        """
        # Nearly always what it was; only other rows are looked at.
        if isinstance(rows, list) and rows == self._rows and (total or len(rows)) == self.slots.shape[0]:
            self.accept()
            return
        chosen = integers("rows", rows)
        total = len(chosen) if total is None else total
        if not chosen or len(set(chosen)) != len(chosen) or not all(0 <= row < len(self._lengths) for row in chosen):
            raise ValueError(f"rows: expected distinct numbers in 0..{len(self._lengths) - 1}, got {chosen}")
        check_range("total", total, len(chosen), len(self._lengths))
        self.accept()
        self._rows = chosen
        self.slots = self._selectable[:total]
        self.slots[: len(chosen)] = self._slots[chosen]
        self.slots[len(chosen) :] = -1
        self._in_place = chosen == list(range(len(self._lengths)))

    def _longest(self) -> int:
        return max(self._lengths[row] for row in self._rows)

    def _check_usable(self) -> None:
        if not self._slots.numel():
            raise ValueError("ReplayCache: closed, its slots are freed; make a new one")
        if self._unfinished:
            # Some layers may have written new checkpoints and others not, and they share their cursors.
            raise ValueError(
                "ReplayCache: the newest forward broke off between two layers; call reset, and prefill again"
            )

    @property
    def layout(self) -> tuple[object, ...]:
        """What a captured forward depends on beside the shapes of its arguments."""
        return () if self._attention is None else (self._attention.capacity, self._in_place)

    def begin_forward(self, model: nn.Module, batch: int, seq_len: int) -> None:
        """Called at the head of every forward: accept what is pending, then book the new tokens.

        Args:
            model: the base model whose forward it is.
            batch: rows of the forward.
            seq_len: its tokens per row.

        Raises:
            ValueError: another model, another batch size, no tokens, too many tokens, or rows with and without a past
                in one forward.
        """
        self.check_model(model)
        if not self._recording:
            self.book_forward(batch, seq_len)

    def check_model(self, base: nn.Module) -> None:
        """Raise ValueError unless the cache was made for the model with this base model."""
        if base is not self._model:
            raise ValueError("ReplayCache: made for another model; make one with ReplayCache(model, ...)")

    def book_forward(self, batch: int, seq_len: int) -> None:
        """The part of ``begin_forward`` that is booked; called alone for a forward that a graph runs."""
        self.accept()
        if batch != self.slots.shape[0]:
            raise ValueError(f"input_ids: expected {self.slots.shape[0]} rows as the ReplayCache has, got {batch}")
        if not seq_len:
            raise ValueError("input_ids: expected at least one token, got none")
        new = [self._lengths[row] == 0 and row not in self._begun for row in self._rows]
        if all(new):
            self._prompts = True
            self.pool.reset(self.slots)
            self.traffic.prefilled(self._rows, seq_len)
        elif any(new):
            raise ValueError("ReplayCache: rows with and without a past cannot share a forward; see select")
        elif seq_len > self.pool.max_tokens:
            raise ValueError(
                f"input_ids: expected at most max_tokens={self.pool.max_tokens} tokens after the prefill, got {seq_len}"
            )
        else:
            self._prompts = False
            self._pending = seq_len
        for row in self._rows:
            self._lengths[row] += seq_len
        if not self._prompts:
            self.traffic.verify(self._rows, seq_len, self._longest())
        if self._prompts:  # a window has its room since the accept before it, and graphs of it count on the places
            self._reserve()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While a graph captures a forward, which runs when the graph is replayed: nothing is booked here."""
        self._recording, self._prompts = True, False
        try:
            yield
        finally:
            self._recording = False

    def run(self, tokens: int, arguments: dict[str, Any]) -> Any:
        """Run the forward that has begun: work for the device alone, nothing is read back.

        Args:
            tokens: of every row.
            arguments: of the base model's forward; what the cache knows better is replaced.
        """
        prompts = self._prompts
        if self._attention is not None and prompts:
            arguments |= self._attention.begin_prompts(self.slots, tokens)
        elif self._attention is not None:
            arguments |= self._attention.begin_window(self.slots, tokens, self._longest(), self._in_place)
        self._unfinished = not self._recording
        out = self._body.run(arguments, one_by_one=not prompts)
        self._unfinished = False
        return out

    def replay(self, position: int, mixer: nn.Module, hidden_states: Tensor) -> Tensor:
        """Run one recurrent layer from the pool, or through a prompt that the pool then goes on from."""
        pool, weights = self.pool, self.weights[position]
        if self._prompts:
            out, *prefilled = self._family.run_prompt(mixer, weights, hidden_states)
            pool.write_state(position, self.slots, *prefilled)
            return out
        buffers = pool.buffers[position]
        return self._family.replay_forward(
            mixer, weights, hidden_states, buffers, pool.cursors, self.slots, pool.window
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by every attention layer: write new keys and values, return all that its queries may look at."""
        if self._attention is None or not (self._unfinished or self._recording):
            raise RuntimeError("ReplayCache: the model is not attached; call replayssm.hf.attach(model) first")
        return self._attention.update(key_states, value_states, layer_idx)

    def accept(self, num_accepted: Sequence[int] | None = None) -> None:
        """Keep the first tokens of the newest forward and forget the others.

        Args:
            num_accepted: one number per row of that forward, in ``0..tokens``; None keeps all. Without a forward to
                decide about, None does nothing.

        Raises:
            ValueError: no such forward, or a number out of range.
        """
        self._check_usable()
        pending = self._pending
        if num_accepted is None:
            if not pending:
                return
            num_accepted = [pending] * len(self._rows)
        num_accepted = integers("num_accepted", num_accepted)
        if not pending:
            raise ValueError("num_accepted: expected a forward after the prefill that is not accepted yet, found none")
        if len(num_accepted) != len(self._rows) or not all(0 <= n <= pending for n in num_accepted):
            raise ValueError(f"num_accepted: expected {len(self._rows)} numbers in 0..{pending}, got {num_accepted}")
        if self._owed is None:
            kept = num_accepted + [0] * (self.slots.shape[0] - len(num_accepted))
            self.commit(torch.tensor(kept, device=self.slots.device), pending)
        else:
            for row, accepted in zip(self._rows, num_accepted, strict=True):
                self._owed[row] = (pending, accepted)
        for row, accepted in zip(self._rows, num_accepted, strict=True):
            self.traffic.accept(row, accepted)
            self._lengths[row] += accepted - pending
        self._pending = 0
        self._reserve()

    def commit(self, num_accepted: Tensor, seq_len: Tensor | int) -> None:
        """Commit for the selected rows, on the device alone; ``accept`` does it unless commits are deferred.

        Args:
            num_accepted: int64 ``[rows]``, 0 for padding.
            seq_len: tokens that the rows' newest forward saw, one number or int64 ``[rows]``; 0 changes nothing.
        """
        self.pool.commit(self.slots, num_accepted, seq_len)
        if self._attention is not None:
            self._attention.commit(self.slots, num_accepted)

    def begin_in_windows(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Let rows that nothing was written to since they were reset begin with windows in place of a prefill.

        Args:
            prompts: by row what is to come, for which there is room made at once: places must not change between the
                windows of a prompt, or each would take a graph of its own.
        """
        self._begun.update(prompts)
        if self._attention is not None:
            self._attention.reserve(max(map(len, prompts.values()), default=0) + self.pool.max_tokens)

    def _reserve(self) -> None:
        """Make room for the next forward already, so that ``layout`` is known before it."""
        if self._attention is not None:
            self._attention.reserve(max(self._lengths) + self.pool.max_tokens)

    def defer_commits(self) -> None:
        """From now on leave it to the caller to commit what was accepted, before the rows' next forward."""
        self._owed = [(0, 0)] * len(self._lengths)

    def take_owed(self) -> list[tuple[int, int]]:
        """For every selected row the arguments ``seq_len`` and ``num_accepted`` of the commit that it is owed."""
        assert self._owed is not None
        owed = [self._owed[row] for row in self._rows]
        for row in self._rows:
            self._owed[row] = (0, 0)
        return owed

    def crop(self, tokens_to_remove: int) -> None:
        """Take back tokens of the newest forward, in every row and every recurrent layer.

        Args:
            tokens_to_remove: zero or the negative number of tokens, as in transformers. 0 keeps all.

        Raises:
            ValueError: positive, or more tokens than the newest forward had. Older ones are already accepted, those
                of a prefill too, and the window of their convolution is gone.
        """
        self._check_usable()
        check_integer("tokens_to_remove", tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: expected zero or a negative number, got {tokens_to_remove}")
        if -tokens_to_remove > self._pending:
            raise ValueError(
                f"tokens_to_remove: expected at least {-self._pending}, the newest forward's tokens that are still "
                f"open, got {tokens_to_remove}"
            )
        if self._pending:
            self.accept([self._pending + tokens_to_remove] * len(self._rows))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the longest row, the pending ones included."""
        return max(self._lengths)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the selected rows have a past."""
        return all(self._lengths[row] > 0 for row in self._rows)

    def reset(self) -> None:
        """Forget every row; the next forward is a prefill."""
        self._pending, self._unfinished = 0, False
        self.pool.reset(self._slots)
        if self._attention is not None:
            self._attention.reset()
        self._lengths = [0] * len(self._lengths)
        self._begun.clear()
        self.traffic.forget()
        if self._owed is not None:
            self.defer_commits()

    def close(self) -> None:
        """Free the pool's slots. The cache cannot be used any more."""
        if self._slots.numel():
            self.pool.free(self._slots)
            self._slots = self._slots[:0]
            self._rows = []

    def __enter__(self) -> ReplayCache:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
