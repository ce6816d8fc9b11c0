"""What a pool keeps for one Mamba-2 layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from replayssm.cache.records import check_dtypes, check_sizes
from replayssm.mamba.arguments import MAX_WINDOW, STATE_DTYPES
from replayssm.rounding import SCALED_DTYPES


@dataclass(frozen=True)
class Mamba2Layer:
    """Sizes of a Mamba-2 layer.

    Attributes:
        nheads: heads, a multiple of ``ngroups``.
        headdim: channels of a head.
        dstate: columns of the state.
        ngroups: groups that share B and C.
        conv_width: taps of the short convolution, 2..5.

    Raises:
        TypeError: a size that is no int.
        ValueError: a size out of range.

    Example:
        >>> Mamba2Layer(nheads=8, headdim=64, dstate=128, ngroups=2, conv_width=4).conv_channels
        1024
    """

    nheads: int
    headdim: int
    dstate: int
    ngroups: int
    conv_width: int

    def __post_init__(self) -> None:
        check_sizes(self, "nheads", "ngroups")

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution, in the order x, B, C."""
        return self.nheads * self.headdim + 2 * self.ngroups * self.dstate

    @property
    def state_sizes(self) -> dict[str, int]:
        """Axes of a slot's state by name."""
        return {"nheads": self.nheads, "headdim": self.headdim, "dstate": self.dstate}

    @property
    def max_tokens(self) -> int:
        """Most tokens that one step of the layer's op takes."""
        return MAX_WINDOW


@dataclass(frozen=True)
class Mamba2Buffers:
    """Tensors of a Mamba-2 layer; the first axis of each is the slot.

    Whatever is done to a slot (zeroing, copying, counting bytes) is a loop over these fields. Each field says in its
    metadata which ``part`` of :class:`replayssm.cache.plan.SlotBytes` it counts for.

    Attributes:
        state: checkpoints ``[slots, nheads, headdim, dstate]``.
        state_scale: fp32 ``[slots, nheads, headdim]`` for the 8-bit state types, else None.
        x_cache: ring ``[slots, nheads, ring_len, headdim]``, activation type.
        B_cache: ring ``[slots, ngroups, ring_len, dstate]``, activation type.
        dt_cache: ring of processed time steps, fp32 ``[slots, nheads, ring_len]``.
        conv_rows: ring of the convolution's inputs ``[slots, conv_len, conv_channels]``, activation type.
    """

    state: Tensor = field(metadata={"part": "state"})
    state_scale: Tensor | None = field(metadata={"part": "scale"})
    x_cache: Tensor = field(metadata={"part": "ring"})
    B_cache: Tensor = field(metadata={"part": "ring"})
    dt_cache: Tensor = field(metadata={"part": "ring"})
    conv_rows: Tensor = field(metadata={"part": "conv"})

    @classmethod
    def allocate(
        cls,
        layer: Mamba2Layer,
        num_slots: int,
        *,
        ring_len: int,
        conv_len: int,
        state_dtype: torch.dtype,
        activation_dtype: torch.dtype,
        device: torch.device,
    ) -> Mamba2Buffers:
        """Make the tensors of ``num_slots`` slots, all zero. On the meta device this only tells their sizes.

        Args:
            layer: the layer's sizes.
            num_slots: slots.
            ring_len: rows of the replay ring.
            conv_len: rows of the convolution's ring.
            state_dtype: float32, bfloat16, float16, int8 or float8_e4m3fn.
            activation_dtype: float32, bfloat16 or float16.
            device: where to allocate.

        Raises:
            ValueError: a dtype that is not listed above.
        """
        check_dtypes("Mamba-2", state_dtype, activation_dtype, STATE_DTYPES)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        return cls(
            state=zeros(*layer.state_sizes.values(), dtype=state_dtype),
            state_scale=zeros(layer.nheads, layer.headdim, dtype=torch.float32)
            if state_dtype in SCALED_DTYPES
            else None,
            x_cache=zeros(layer.nheads, ring_len, layer.headdim, dtype=activation_dtype),
            B_cache=zeros(layer.ngroups, ring_len, layer.dstate, dtype=activation_dtype),
            dt_cache=zeros(layer.nheads, ring_len, dtype=torch.float32),
            conv_rows=zeros(conv_len, layer.conv_channels, dtype=activation_dtype),
        )
