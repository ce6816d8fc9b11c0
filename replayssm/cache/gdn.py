"""What a pool keeps for one Gated DeltaNet layer: the lazy ring of ``gated_delta_rule_checkpointing``."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from replayssm.cache.records import check_dtypes, check_sizes
from replayssm.checks import FLOATS, check_range
from replayssm.gdn_decode.arguments import MAX_DIM, MAX_TOKENS


@dataclass(frozen=True)
class GDNLayer:
    """Sizes of a Gated DeltaNet layer.

    Attributes:
        value_heads: heads of the state, a multiple of ``key_heads``.
        value_dim: rows of a head's state, at most 256.
        key_dim: columns of a head's state, at most 256.
        key_heads: heads of queries and keys.
        conv_width: taps of the short convolution, 2..5.
        use_qk_l2norm: whether the layer normalises queries and keys.

    Raises:
        TypeError: a size that is no int, or a ``use_qk_l2norm`` that is no bool.
        ValueError: a size out of range.

    Example:
        >>> GDNLayer(value_heads=32, value_dim=128, key_dim=128, key_heads=16, conv_width=4).conv_channels
        8192
    """

    value_heads: int
    value_dim: int
    key_dim: int
    key_heads: int
    conv_width: int
    use_qk_l2norm: bool = True

    def __post_init__(self) -> None:
        for name in ("value_dim", "key_dim"):
            check_range(name, getattr(self, name), 1, MAX_DIM)
        check_sizes(self, "value_heads", "key_heads")

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution, in the order queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_sizes(self) -> dict[str, int]:
        """Axes of a slot's state by name."""
        return {"value_heads": self.value_heads, "value_dim": self.value_dim, "key_dim": self.key_dim}

    @property
    def max_tokens(self) -> int:
        """Most tokens that one step of the layer's op takes."""
        return MAX_TOKENS


@dataclass(frozen=True)
class GDNBuffers:
    """Tensors of a Gated DeltaNet layer; see :class:`replayssm.cache.Mamba2Buffers` for what their order means.

    Attributes:
        state: checkpoints ``[slots, value_heads, value_dim, key_dim]``.
        v_cache: ring ``[slots, value_heads, ring_len, value_dim]``, activation type.
        k_cache: ring of keys before normalisation ``[slots, key_heads, ring_len, key_dim]``, activation type.
        g_cache: ring of log decays, fp32 ``[slots, value_heads, ring_len]``.
        beta_cache: ring of ``sigmoid(b)``, fp32 ``[slots, value_heads, ring_len]``.
        conv_rows: ring of the convolution's inputs ``[slots, conv_len, conv_channels]``, activation type.
    """

    state: Tensor = field(metadata={"part": "state"})
    v_cache: Tensor = field(metadata={"part": "ring"})
    k_cache: Tensor = field(metadata={"part": "ring"})
    g_cache: Tensor = field(metadata={"part": "ring"})
    beta_cache: Tensor = field(metadata={"part": "ring"})
    conv_rows: Tensor = field(metadata={"part": "conv"})

    @classmethod
    def allocate(
        cls,
        layer: GDNLayer,
        num_slots: int,
        *,
        ring_len: int,
        conv_len: int,
        state_dtype: torch.dtype,
        activation_dtype: torch.dtype,
        device: torch.device,
    ) -> GDNBuffers:
        """Make the tensors of ``num_slots`` slots, all zero. On the meta device this only tells their sizes.

        Args:
            layer: the layer's sizes.
            num_slots: slots.
            ring_len: rows of the replay ring.
            conv_len: rows of the convolution's ring.
            state_dtype: float32, bfloat16 or float16.
            activation_dtype: float32, bfloat16 or float16.
            device: where to allocate.

        Raises:
            ValueError: a dtype that is not listed above.
        """
        check_dtypes("GDN", state_dtype, activation_dtype, FLOATS)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        return cls(
            state=zeros(*layer.state_sizes.values(), dtype=state_dtype),
            v_cache=zeros(layer.value_heads, ring_len, layer.value_dim, dtype=activation_dtype),
            k_cache=zeros(layer.key_heads, ring_len, layer.key_dim, dtype=activation_dtype),
            g_cache=zeros(layer.value_heads, ring_len, dtype=torch.float32),
            beta_cache=zeros(layer.value_heads, ring_len, dtype=torch.float32),
            conv_rows=zeros(conv_len, layer.conv_channels, dtype=activation_dtype),
        )
