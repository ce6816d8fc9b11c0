"""What a pool keeps for one Mamba-2 layer whose decoding has the bits of a scan over the whole sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from replayssm.batch_invariant_decode import BatchInvariantDecodeBuffers
from replayssm.cache.mamba2 import Mamba2Layer
from replayssm.cache.records import check_dtypes
from replayssm.checks import check_device, check_dtype, check_sequence, check_shape
from replayssm.mamba.arguments import MAX_WINDOW
from replayssm.ssd.arguments import check_chunk_size


@dataclass(frozen=True)
class ExactMamba2Layer(Mamba2Layer):
    """Sizes of a Mamba-2 layer that runs on ``replayssm.batch_invariant_decode``.

    Attributes:
        chunk_size: tokens of a chunk, 16..256; chunks are counted from a sequence's first token.

    Raises:
        TypeError: a size that is no int.
        ValueError: a size out of range.

    Example:
        >>> ExactMamba2Layer(nheads=8, headdim=64, dstate=128, ngroups=2, conv_width=4, chunk_size=64).max_tokens
        64
    """

    chunk_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk_size(self.chunk_size)

    @property
    def max_tokens(self) -> int:
        """Most tokens that one step of the layer's op takes in a pool."""
        return min(self.chunk_size, MAX_WINDOW)


@dataclass(frozen=True)
class ExactMamba2Buffers:
    """Tensors of an exact Mamba-2 layer; the first axis of each is the slot, those of ``records`` included.

    Attributes:
        state: fp32 ``[slots, nheads, headdim, dstate]``: the state at each slot's last chunk boundary.
        records: the rows since then, with cursors of their own: chunks are folded, whatever the pool's window is.
        conv_rows: ring of the convolution's inputs ``[slots, conv_len, conv_channels]``, activation type.
    """

    state: Tensor = field(metadata={"part": "state"})
    records: BatchInvariantDecodeBuffers = field(metadata={"part": "ring"})
    conv_rows: Tensor = field(metadata={"part": "conv"})

    @classmethod
    def allocate(
        cls,
        layer: ExactMamba2Layer,
        num_slots: int,
        *,
        ring_len: int,
        conv_len: int,
        state_dtype: torch.dtype,
        activation_dtype: torch.dtype,
        device: torch.device,
    ) -> ExactMamba2Buffers:
        """Make the tensors of ``num_slots`` slots, all zero. On the meta device this only tells their sizes.

        Args:
            layer: the layer's sizes.
            num_slots: slots.
            ring_len: not used: the records hold a chunk.
            conv_len: rows of the convolution's ring, which also tells how many tokens a step may have.
            state_dtype: float32.
            activation_dtype: float32, bfloat16 or float16.
            device: where to allocate.

        Raises:
            ValueError: a dtype that is not listed above.
        """
        check_dtypes("exact Mamba-2", state_dtype, activation_dtype, (torch.float32,))
        records = BatchInvariantDecodeBuffers.allocate(
            num_slots,
            layer.chunk_size,
            layer.nheads,
            layer.headdim,
            layer.ngroups,
            layer.dstate,
            device,
            activation_dtype,
            # With one token the records would commit it themselves, and nothing could be taken back.
            max_tokens=max(2, conv_len - layer.conv_width + 1),
            trimmed=True,
            sums=True,  # on a CPU too, so that a slot has the same fields and bytes on every device
        )
        return cls(
            state=torch.zeros(num_slots, *layer.state_sizes.values(), dtype=torch.float32, device=device),
            records=records,
            conv_rows=torch.zeros(num_slots, conv_len, layer.conv_channels, dtype=activation_dtype, device=device),
        )

    def check_rows(self, rows: Any, n: int) -> None:
        """Check the argument ``rows`` of ``ReplayPool.write_state`` for ``n`` slots.

        Raises:
            TypeError: not three tensors in a tuple or list.
            ValueError: a shape, dtype or device does not fit, or a chunk or more.
        """
        check_sequence("rows", rows, "x, dt and B")
        if len(rows) != 3:
            raise ValueError(f"rows: expected x, dt and B, got {len(rows)} values")
        _, _, nheads, headdim = self.records.x.shape
        sizes = {"n": n, "nheads": nheads, "headdim": headdim}
        sizes |= dict(zip(("ngroups", "dstate"), self.records.B.shape[2:], strict=True))
        for index, spec in enumerate(("n r nheads headdim", "n r nheads", "n r ngroups dstate")):
            name = f"rows[{index}]"
            check_shape(name, rows[index], spec, sizes)
            check_dtype(name, rows[index], torch.float32, torch.float64, torch.bfloat16, torch.float16)
            check_device(name, rows[index], self.state.device)
        if sizes["r"] >= self.records.chunk_size:
            raise ValueError(
                f"rows: expected those since the last chunk boundary, fewer than chunk_size={self.records.chunk_size}, "
                f"got {sizes['r']}"
            )

    def write_rows(self, slots: Tensor, x: Tensor, dt: Tensor, B: Tensor) -> None:
        """Store the rows of an unfinished chunk in slots that hold none.

        Args:
            slots: int64 ``[n]``.
            x: ``[n, rows, nheads, headdim]``, fewer rows than a chunk has; as are dt and B.
            dt: ``[n, rows, nheads]``, before bias and softplus.
            B: ``[n, rows, ngroups, dstate]``.
        """
        n, rows = x.shape[:2]
        cu_seqlens = torch.arange(n + 1, dtype=torch.int32, device=x.device) * rows
        packed = [each.reshape(n * rows, *each.shape[2:]).to(self.records.x.dtype) for each in (x, dt, B)]
        self.records.seed(packed[0], None, packed[1], packed[2], None, cu_seqlens, slots)

    def take_back(self, src: Tensor, dst: Tensor, rewind: Tensor) -> None:
        """Copy state and rows of ``src`` to ``dst`` without the newest ``rewind`` committed rows."""
        live = self.records.num_buffered[src] - rewind.to(torch.int32)
        for tensor in (self.state, *self.records.per_slot().values()):
            tensor.index_copy_(0, dst, tensor.index_select(0, src))
        self.records.num_buffered[dst] = live
