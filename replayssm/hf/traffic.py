"""What the forwards of a cache read and write of its recurrent state and its keys, counted on the host."""

from __future__ import annotations

from collections.abc import Sequence

from replayssm.cache import ExactMamba2Buffers, ExactMamba2Layer, ReplayPool
from replayssm.hf.attention import KeyValueRows


class Traffic:
    """Counts summed over rows; every layer does the same.

    Args:
        pool: of the cache, whose slots are the rows.
        attention: keys and values of the cache, None without attention layers.

    Attributes:
        verified: verifies, each of which reads a checkpoint.
        flushed: verifies that wrote one.
        rows_read: live rows of the rings that were replayed.
        rows_written: those of new tokens, in rings and, if there are any, in keys and values.
        keys_read: keys that attention looked at.
    """

    def __init__(self, pool: ReplayPool, attention: KeyValueRows | None) -> None:
        self._pool, self._attention = pool, attention
        chunks = [layer.chunk_size for layer in pool.layers if isinstance(layer, ExactMamba2Layer)]
        self._chunk_size = chunks[0] if chunks else None
        self.forget()
        self.count()

    def count(self) -> None:
        """Count from here on."""
        self.verified = self.flushed = self.rows_read = self.rows_written = self.keys_read = 0

    def forget(self) -> None:
        """All rows are empty again; the counts stay."""
        self._live = [0] * self._pool.num_slots

    def prefilled(self, rows: Sequence[int], tokens: int) -> None:
        """These rows got a prompt of ``tokens`` tokens."""
        for row in rows:
            self._live[row] = tokens % self._chunk_size if self._chunk_size else 0

    def verify(self, rows: Sequence[int], tokens: int, longest: int) -> None:
        """These rows score ``tokens`` tokens each, with which the longest one has ``longest``."""
        self.verified += len(rows)
        if self._attention is not None:
            self.keys_read += len(rows) * self._attention.extent(longest)
        self.rows_written += len(rows) * tokens
        for row in rows:
            self.rows_read += self._live[row]
            folded = self._folded(self._live[row], tokens)
            self.flushed += bool(folded)
            self._live[row] -= folded

    def accept(self, row: int, num_accepted: int) -> None:
        """A row keeps ``num_accepted`` tokens of its newest verify."""
        self._live[row] += num_accepted

    def _folded(self, live: int, tokens: int) -> int:
        if self._chunk_size:
            return self._chunk_size if live >= self._chunk_size else 0
        return live if live + tokens > self._pool.window else 0

    def moved_bytes(self) -> tuple[int, int]:
        """Bytes of checkpoints (with scales) and ring rows that were read and written, all layers.

        Convolution rows and cursors are not counted: they are small and every way of decoding moves them.
        """
        sizes, slots = self._pool.bytes_by_field(), self._pool.num_slots
        state = (sizes["state"] + sizes.get("state_scale", 0)) // slots
        if self._chunk_size:
            read_row, written_row = self._exact_row_bytes()
        else:
            rings = sum(count for name, count in sizes.items() if name.endswith("_cache"))
            read_row = written_row = rings // (slots * self._pool.ring_len)
        read = self.verified * state + self.rows_read * read_row
        return read, self.flushed * state + self.rows_written * written_row

    def _exact_row_bytes(self) -> tuple[int, int]:
        """Bytes that exact layers read of a live row and write of a new one.

        A GPU reads what it has kept of dt in its place, and writes both.
        """
        read = written = 0
        for buffers in self._pool.buffers:
            if isinstance(buffers, ExactMamba2Buffers):
                records = buffers.records
                rows = records.x.shape[0] * records.x.shape[1]
                both = (records.x.nbytes + records.B.nbytes) // rows
                raw = records.dt.nbytes // rows
                if records.sums is None or self._pool.device.type != "cuda":
                    read, written = read + both + raw, written + both + raw
                else:
                    kept = records.sums.nbytes // rows
                    read, written = read + both + kept, written + both + raw + kept
        return read, written

    def key_value_bytes(self) -> tuple[int, int, int]:
        """Bytes of keys and values, all layers: those that there are, and those that were read and written."""
        if self._attention is None:
            return 0, 0, 0
        each = self._attention.bytes_per_key()
        return self._attention.bytes(), self.keys_read * each, self.rows_written * each
