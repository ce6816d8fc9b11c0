"""What a pool keeps for one Mamba-2 layer."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from replayssm.checks import check_integer, check_range
from replayssm.mamba.arguments import MAX_WINDOW
from replayssm.rounding import SCALED_DTYPES

STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, *SCALED_DTYPES)
ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
        for each in fields(self):
            check_integer(each.name, getattr(self, each.name))
            if getattr(self, each.name) < 1:
                raise ValueError(f"{each.name}: expected at least 1, got {getattr(self, each.name)}")
        if self.nheads % self.ngroups:
            raise ValueError(f"nheads: expected a multiple of ngroups={self.ngroups}, got {self.nheads}")
        if not 2 <= self.conv_width <= 5:
            raise ValueError(f"conv_width: expected 2 <= conv_width <= 5, got {self.conv_width}")

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution, in the order x, B, C."""
        return self.nheads * self.headdim + 2 * self.ngroups * self.dstate


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
        for name, dtype, allowed in (
            ("state_dtype", state_dtype, STATE_DTYPES),
            ("activation_dtype", activation_dtype, ACTIVATION_DTYPES),
        ):
            if dtype not in allowed:
                raise ValueError(f"{name}: expected {' or '.join(str(each) for each in allowed)}, got {dtype}")

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        return cls(
            state=zeros(layer.nheads, layer.headdim, layer.dstate, dtype=state_dtype),
            state_scale=zeros(layer.nheads, layer.headdim, dtype=torch.float32)
            if state_dtype in SCALED_DTYPES
            else None,
            x_cache=zeros(layer.nheads, ring_len, layer.headdim, dtype=activation_dtype),
            B_cache=zeros(layer.ngroups, ring_len, layer.dstate, dtype=activation_dtype),
            dt_cache=zeros(layer.nheads, ring_len, dtype=torch.float32),
            conv_rows=zeros(conv_len, layer.conv_channels, dtype=activation_dtype),
        )


def ring_lengths(layers: list[Mamba2Layer], window: int, max_tokens: int) -> tuple[int, int]:
    """Rows of the replay ring and of the convolution's ring of a pool.

    A step of ``max_tokens`` tokens must overwrite neither the live rows, ``window`` at most, nor the convolution's
    history. Layers of different widths share one length, since they share the cursor.

    Args:
        layers: the pool's layers.
        window: most rows that may be replayed.
        max_tokens: most tokens of one step.

    Returns:
        (ring_len, conv_len).

    Raises:
        TypeError: a number of another type.
        ValueError: no layer, or not ``1 <= max_tokens <= window <= 64``.
    """
    if not layers:
        raise ValueError("layers: expected at least one layer, got none")
    check_range("window", window, 1, MAX_WINDOW)
    check_integer("max_tokens", max_tokens)
    if not 1 <= max_tokens <= window:
        raise ValueError(
            f"max_tokens: expected 1 <= max_tokens <= window={window} (a step's tokens become live rows), "
            f"got {max_tokens}"
        )
    return window + max_tokens, max(layer.conv_width for layer in layers) - 1 + max_tokens
