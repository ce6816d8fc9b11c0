"""Keys and values of the attention layers between recurrent ones, for rows that accept different counts.

Every row writes at its own length, and a key counts for a query when it stands no later than it: a mask says so. What
was rejected lies behind the row's length, hidden by the mask, until it is overwritten; taking tokens back is a smaller
length. The lengths live on the device, and buffers keep their place until a text outgrows them, so that forwards can
be captured as CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Keys that a buffer holds at first; it doubles when a text outgrows it.
_CAPACITY = 64


class KeyValueRows:
    """Keys and values of all attention layers for the rows of a batch.

    Args:
        batch_size: rows. A spare row behind them takes what padding writes.
        device: of the model.
        additive: whether the attention adds its mask to the scores; otherwise it takes a boolean one.

    Attributes:
        capacity: keys that every row has room for.
    """

    def __init__(self, batch_size: int, device: torch.device, additive: bool) -> None:
        self.capacity = _CAPACITY
        self._batch_size, self._device, self._additive = batch_size, device, additive
        with torch.inference_mode(False):  # rows written in inference mode can be written outside of it
            self._lengths = torch.zeros(batch_size + 1, dtype=torch.int64, device=device)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        # Of the forward that runs: its rows, whether these are all in order, its tokens' positions and keys in sight.
        self._rows, self._in_place = self._lengths[:0], False
        self._positions: Tensor | None = None
        self._extent = 0

    def reserve(self, length: int) -> None:
        """Make room for texts of this length. Buffers move when they have to grow."""
        if length <= self.capacity:
            return
        self.capacity = 1 << (length - 1).bit_length()
        for index, pair in self._layers.items():
            self._layers[index] = self._grown(pair[0]), self._grown(pair[1])

    def _grown(self, tensor: Tensor) -> Tensor:
        grown = self._zeros(tensor.shape[1], tensor.shape[3], tensor.dtype)
        grown[:, :, : tensor.shape[2]] = tensor
        return grown

    def _zeros(self, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros(self._batch_size + 1, heads, self.capacity, dim, dtype=dtype, device=self._device)

    def begin_prompts(self, slots: Tensor, tokens: int) -> dict[str, Any]:
        """Start texts of ``tokens`` tokens in empty rows; returns arguments of the model's forward.

        Args:
            slots: int64 ``[rows]``.
            tokens: of every row.
        """
        self._rows, self._positions = slots, None
        self._lengths.index_fill_(0, slots, tokens)
        for pair in self._layers.values():
            for tensor in pair:
                tensor.index_fill_(0, slots, 0)  # as in reset
        positions = torch.arange(tokens, device=self._device).expand(slots.shape[0], -1)
        # Without a mask the attention is causal by itself.
        return _arguments(positions, self._causal(tokens))

    def _causal(self, tokens: int) -> Tensor | None:
        if not self._additive or tokens == 1:
            return None
        return self._mask(torch.arange(tokens, device=self._device).unsqueeze(0), tokens)

    def begin_window(self, slots: Tensor, tokens: int, longest: int, in_place: bool) -> dict[str, Any]:
        """Go on in rows that have a past; returns arguments of the model's forward. Reads nothing back.

        Args:
            slots: int64 ``[rows]``, negative for padding.
            tokens: new ones of every row.
            longest: length that no row exceeds with them.
            in_place: whether the rows are all rows in order, whose keys need not be gathered.
        """
        self._rows, self._in_place = slots % (self._batch_size + 1), in_place
        positions = self._lengths[self._rows].unsqueeze(1) + torch.arange(tokens, device=self._device)
        self._positions = positions
        self._extent = self.extent(longest)
        return _arguments(positions, self._mask(positions, self._extent))

    def extent(self, longest: int) -> int:
        """Keys of every row that the attention of a window looks at, when no row is longer than ``longest`` with it."""
        # Shapes that a graph has captured must not change; elsewhere it is a pity to look at empty room.
        on_cpu = self._device.type == "cpu"
        return min(self.capacity, -(-longest // _CAPACITY) * _CAPACITY) if on_cpu else self.capacity

    def _mask(self, positions: Tensor, extent: int) -> Tensor:
        """Which of the first ``extent`` keys count for the queries at ``positions`` ``[rows, tokens]``."""
        counts = torch.arange(extent, device=self._device) <= positions[:, None, :, None]
        if not self._additive:
            return counts
        return torch.zeros(counts.shape, dtype=torch.float32, device=self._device).masked_fill_(
            ~counts, torch.finfo(torch.float32).min
        )

    def update(self, keys: Tensor, values: Tensor, layer_index: int) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values; returns those that its queries look at.

        Args:
            keys: ``[rows, heads, tokens, dim]``.
            values: the same of values.
            layer_index: number of the layer in the model.
        """
        if layer_index not in self._layers:
            self._layers[layer_index] = (
                self._zeros(keys.shape[1], keys.shape[3], keys.dtype),
                self._zeros(values.shape[1], values.shape[3], values.dtype),
            )
        pair = self._layers[layer_index]
        if self._positions is None:
            for tensor, new in zip(pair, (keys, values), strict=True):
                tensor[self._rows, :, : new.shape[2]] = new
            return keys, values
        at = self._rows.unsqueeze(1), self._positions
        seen = []
        for tensor, new in zip(pair, (keys, values), strict=True):
            tensor.transpose(1, 2)[at] = new.transpose(1, 2)
            tensor = tensor[:, :, : self._extent]
            seen.append(tensor[: self._batch_size] if self._in_place else tensor[self._rows])
        return seen[0], seen[1]

    def commit(self, slots: Tensor, num_accepted: Tensor) -> None:
        """Keep the first ``num_accepted`` ``[rows]`` tokens of the newest window; padding keeps none."""
        self._lengths.index_add_(0, slots % (self._batch_size + 1), num_accepted.to(torch.int64))

    def reset(self) -> None:
        """Forget every row."""
        self._lengths.zero_()
        for pair in self._layers.values():
            for tensor in pair:
                tensor.zero_()  # a key that is not a number would get through any mask

    def bytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(tensor.nbytes for pair in self._layers.values() for tensor in pair)

    def bytes_per_key(self) -> int:
        """Bytes of one key and its value, all layers."""
        return sum(tensor[0, :, 0].nbytes for pair in self._layers.values() for tensor in pair)


def _arguments(positions: Tensor, mask: Tensor | None) -> dict[str, Any]:
    return {"position_ids": positions, "attention_mask": {"full_attention": mask, "linear_attention": None}}
