"""Exact decode for a Mamba-2 mixer module whose tensors have flattened heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from replayssm.batch_invariant_decode.buffers import BatchInvariantDecodeBuffers
from replayssm.batch_invariant_decode.scan import batch_invariant_decode_buffered_scan


class MambaBatchInvariantDecode:
    """Exact decode of one mixer; its buffers are allocated at first use.

    Args:
        mixer: has ``chunk_size``, ``A_log [H]``, ``D`` (``[H]``, or ``[H * P]`` where ``D_has_hdim``), ``dt_bias [H]``,
            ``D_has_hdim`` and ``rmsnorm``. The gate is applied inside the scan, so the norm behind it must be a
            separate one: ``rmsnorm`` true. Its parameters are read in every step.
        max_tokens: most tokens of a lane in one step; see ``BatchInvariantDecodeBuffers``.

    Raises:
        AssertionError: the mixer has no separate norm.
    """

    def __init__(self, mixer: Any, *, max_tokens: int = 1) -> None:
        if not mixer.rmsnorm:
            raise AssertionError("mixer: batch-invariant decode requires rmsnorm=True, the gate is inside the scan")
        self.mixer = mixer
        self.max_tokens = max_tokens
        self.buffers: BatchInvariantDecodeBuffers | None = None

    def _get_buffers(self, max_requests: int, x: Tensor, B: Tensor) -> BatchInvariantDecodeBuffers:
        """The buffers, allocated by the first call.

        Args:
            max_requests: slots.
            x: ``[..., H, P]``.
            B: ``[..., G, N]``.

        Raises:
            ValueError: the buffers exist with another number of slots.
        """
        if self.buffers is None:
            (nheads, headdim), (ngroups, dstate) = x.shape[-2:], B.shape[-2:]
            self.buffers = BatchInvariantDecodeBuffers.allocate(
                max_requests, self.mixer.chunk_size, nheads, headdim, ngroups, dstate, x.device, x.dtype,
                max_tokens=self.max_tokens,
            )  # fmt: skip
        slots = self.buffers.x.shape[0]
        if slots != max_requests:
            raise ValueError(f"max_requests: expected {slots}, as when the buffers were allocated, got {max_requests}")
        return self.buffers

    def seed(
        self,
        x: Tensor,
        z: Tensor | None,
        dt: Tensor,
        B: Tensor,
        C: Tensor,
        cu_seqlens: Tensor,
        batch_indices: Tensor,
        max_requests: int,
    ) -> None:
        """Store the unfinished chunks of a prefill: ``BatchInvariantDecodeBuffers.seed``, which tells the arguments.

        Args:
            x: ``[T, H, P]``.
            z: ``[T, H, P]`` or None.
            dt: ``[T, H]``.
            B: ``[T, G, N]``.
            C: ``[T, G, N]``.
            cu_seqlens: int32 ``[n + 1]``.
            batch_indices: int32 or int64, at least n entries.
            max_requests: slots; must stay the same.
        """
        self._get_buffers(max_requests, x, B).seed(x, z, dt, B, C, cu_seqlens, batch_indices)

    def step(
        self, x: Tensor, z: Tensor | None, dt: Tensor, B: Tensor, C: Tensor, batch_indices: Tensor, ssm_state: Tensor
    ) -> Tensor:
        """Run one decode step in the mixer's layouts.

        Args:
            x: ``[R, T, H * P]``.
            z: ``[R, T, H * P]`` or None.
            dt: ``[R, T, H]``.
            B: ``[R, T, G * N]``.
            C: ``[R, T, G * N]``.
            batch_indices: int32 or int64 ``[R]``; negative ones are inactive and return zeros.
            ssm_state: fp32 ``[S, H, P, N]``, written where a chunk is folded.

        Returns:
            ``[R, T, H * P]``, memory that the next step overwrites.

        Raises:
            AssertionError, TypeError, ValueError, NotImplementedError: see ``batch_invariant_decode_buffered_scan``.
        """
        H, P, N = ssm_state.shape[1:]
        lanes, tokens = x.shape[:2]
        heads, groups = (lanes, tokens, H, P), (lanes, tokens, -1, N)
        x, B, C = x.reshape(heads), B.reshape(groups), C.reshape(groups)
        D = self.mixer.D.float()
        out = batch_invariant_decode_buffered_scan(
            self._get_buffers(ssm_state.shape[0], x, B), x, None if z is None else z.reshape(heads), dt, B, C,
            -torch.exp(self.mixer.A_log.float()), D.view(H, P) if self.mixer.D_has_hdim else D,
            self.mixer.dt_bias.float(), batch_indices, ssm_state,
        )  # fmt: skip
        return out.view(lanes, tokens, H * P)
