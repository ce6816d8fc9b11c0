"""What a generation did and what it cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GenerationStats:
    """Counts, seconds and bytes of one call of ``generate``, summed over the rows of the batch.

    Attributes:
        new_tokens: tokens generated, end tokens included.
        rounds: forwards after the prefill.
        drafted: draft tokens that were verified.
        accepted: draft tokens that became part of a text.
        seconds: wall time of the whole call.
        prefill_seconds: the part of it spent on the prompts, up to the first token.
        pool_bytes: memory of the replay pool.
        slot_bytes: the part of one row.
        state_bytes_read: checkpoint and ring bytes that the verifies read, all layers.
        state_bytes_written: checkpoint and ring bytes that they wrote.
        key_value_bytes: memory of the keys and values of attention layers, 0 without such.
        key_value_bytes_read: what of it the verifies' attention looked at: the room of each row up to a multiple of 64
            behind the longest one, on a GPU all of it. A mask hides the rest of it, but it is read.
        key_value_bytes_written: what of it they wrote.
        flushes: checkpoints written after the prefill, counted once for all layers.
        graph_rounds: rounds that were replayed from a CUDA graph; a shape is captured the second time that it comes.
        eager_because: why no round could be, None if some could.
        rows_alike: whether matrix products were measured to round a token alike in every window and batch, which
            ``exact`` needs and other generations have mostly too (see docs/hf.md).
    """

    new_tokens: int
    rounds: int
    drafted: int
    accepted: int
    seconds: float
    prefill_seconds: float
    pool_bytes: int
    slot_bytes: int
    state_bytes_read: int
    state_bytes_written: int
    key_value_bytes: int
    key_value_bytes_read: int
    key_value_bytes_written: int
    flushes: int
    graph_rounds: int
    eager_because: str | None
    rows_alike: bool

    @property
    def accept_rate(self) -> float:
        """Accepted share of the draft tokens, 0 when none were drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of the whole call."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """New tokens per second behind the prefill."""
        decoding = self.seconds - self.prefill_seconds
        return self.new_tokens / decoding if decoding > 0 else 0.0

    @property
    def state_bytes_read_per_token(self) -> float:
        """Checkpoint and ring bytes read per new token."""
        return self.state_bytes_read / self.new_tokens if self.new_tokens else 0.0

    @property
    def state_bytes_written_per_token(self) -> float:
        """Checkpoint and ring bytes written per new token."""
        return self.state_bytes_written / self.new_tokens if self.new_tokens else 0.0
