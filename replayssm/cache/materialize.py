"""Replaying a prefix of the live ring rows into other slots, for all layers of a pool, whatever their kinds."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from replayssm import gdn_decode
from replayssm.cache.exact import ExactMamba2Buffers
from replayssm.cache.gdn import GDNBuffers, GDNLayer
from replayssm.cache.layers import Buffers, Layer
from replayssm.cache.mamba2 import Mamba2Buffers, Mamba2Layer
from replayssm.cache.mamba2_tables import Mamba2Tables
from replayssm.checks import check_device, check_dtype, check_shape, check_tensor


class Materializer:
    """Calls each kind's materialize for the layers of a pool.

    Args:
        layers: sizes of every layer.
        buffers: their tensors, which must stay where they are.
        window: the pool's window.
        ring_len: rows of the replay ring.
    """

    def __init__(self, layers: Sequence[Layer], buffers: Sequence[Buffers], window: int, ring_len: int) -> None:
        self._layers, self._device = layers, buffers[0].state.device
        self._gdn: list[tuple[GDNLayer, GDNBuffers]] = []
        self._exact = [each for each in buffers if isinstance(each, ExactMamba2Buffers)]
        mamba2_layers: list[Mamba2Layer] = []
        mamba2_buffers: list[Mamba2Buffers] = []
        for layer, each in zip(layers, buffers, strict=True):
            if isinstance(layer, GDNLayer) and isinstance(each, GDNBuffers):
                self._gdn.append((layer, each))
            elif isinstance(layer, Mamba2Layer) and isinstance(each, Mamba2Buffers):
                mamba2_layers.append(layer)
                mamba2_buffers.append(each)
        self._mamba2 = Mamba2Tables(mamba2_layers, mamba2_buffers, window, ring_len)

    def decays(self, A: Sequence[Tensor | None] | None) -> list[Tensor]:
        """The Mamba-2 layers' decay rates.

        Raises:
            TypeError: no list, or a layer's entry is no tensor.
            ValueError: not one entry per layer, a rate for a layer without rates, or a tensor that does not fit.
        """
        if A is None and len(self._gdn) + len(self._exact) == len(self._layers):
            return []
        if not isinstance(A, Sequence):
            raise TypeError(f"A: expected a list of one tensor per layer, got {type(A).__name__}")
        if len(A) != len(self._layers):
            raise ValueError(f"A: expected one tensor per layer, {len(self._layers)}, got {len(A)}")
        decays: list[Tensor] = []
        for index, (decay, layer) in enumerate(zip(A, self._layers, strict=True)):
            name = f"A[{index}]"
            if type(layer) is not Mamba2Layer:
                if decay is not None:
                    kind = (
                        "a GDN layer, whose ring holds the decays"
                        if isinstance(layer, GDNLayer)
                        else "an exact layer, whose rows are copied as they are"
                    )
                    raise ValueError(f"{name}: expected None for {kind}, got a tensor")
                continue
            check_tensor(name, decay)
            assert decay is not None  # said for mypy
            check_shape(name, decay, "nheads headdim dstate" if decay.dim() == 3 else "nheads", layer.state_sizes)
            decays.append(decay)
            check_dtype(name, decay, decays[0].dtype)
            check_device(name, decay, self._device)
            if layer.nheads > 1 and decay.stride(0) != 1:
                raise ValueError(f"{name}: expected consecutive heads (stride 1 at axis 0), got {decay.stride(0)}")
        return decays

    def write_states(
        self,
        src: Tensor,
        dst: Tensor,
        ring_start: Tensor,
        prefix_len: Tensor,
        decays: Sequence[Tensor],
        rewind: Tensor,
    ) -> None:
        """Replay ``prefix_len`` ring rows onto the checkpoints of ``src`` and store the results in ``dst``.

        Args:
            src: int64 ``[n]``.
            dst: int64 ``[n]``.
            ring_start: row of the oldest live token, ``[n]``.
            prefix_len: live rows to apply, ``[n]``.
            decays: from :meth:`decays`.
            rewind: newest rows to leave out, ``[n]``; what exact layers go by.
        """
        if not src.numel():
            return
        if decays:
            self._mamba2.write_states(src, dst, ring_start, prefix_len, decays)
        for layer, buffers in self._gdn:
            gdn_decode.gated_delta_rule_replayssm_materialize(
                buffers.state.unsqueeze(0),
                buffers.v_cache.unsqueeze(0),
                buffers.k_cache.unsqueeze(0),
                buffers.g_cache.unsqueeze(0),
                buffers.beta_cache.unsqueeze(0),
                src,
                dst,
                prefix_len,
                ring_start=ring_start,
                use_qk_l2norm=layer.use_qk_l2norm,
            )
        for exact in self._exact:
            exact.take_back(src, dst, rewind)
