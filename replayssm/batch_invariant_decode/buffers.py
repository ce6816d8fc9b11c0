"""The rows that exact decode keeps between two chunk boundaries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm.batch_invariant_decode import ops
from replayssm.batch_invariant_decode.arguments import check_refresh, check_store
from replayssm.checks import (
    FLOATS,
    as_device,
    check_device,
    check_dtype,
    check_flag,
    check_packed,
    check_range,
    check_shape,
)
from replayssm.ssd.arguments import check_chunk_size

_PER_SLOT = ("x", "z", "dt", "B", "C", "num_buffered", "ring_start", "shadow", "sums", "num_summed")


@dataclass
class BatchInvariantDecodeBuffers:
    """Per slot, the raw inputs since the last chunk boundary; the state at that boundary is the caller's ``ssm_state``.

    Sizes: slots S, chunk size Q, rows R of a slot, nheads H, headdim P, ngroups G, dstate N. With ``max_tokens == 1``
    R = Q, row t is the chunk's token t, and the call that fills a chunk folds it into the state. With more, the rows
    are a ring of R = Q + 2 max_tokens - 1 that begins at ``ring_start``; rejected tokens cost nothing, and a full chunk
    is folded by the call after the one that filled it, when it is known which tokens were accepted.

    Attributes:
        x: ``[S, R, H, P]``, the activation dtype, as the others: after convolution and activation.
        z: ``[S, R, H, P]`` or None: gates. Kept for the seed's sake and never read; so is C.
        dt: ``[S, R, H]``: before bias and softplus.
        B: ``[S, R, G, N]``.
        C: ``[S, R, G, N]`` or None.
        num_buffered: int32 ``[S]``: live rows.
        out: ``[S, max_tokens, H, P]``, without axis 1 when max_tokens is 1: outputs of the last call, by lane.
        target_rows: int32 ``[S]``, by lane: the chunk's row of the lane's first token in the last call, -1 for padding.
        chunk_flags: int32 ``[S]``, by lane: 1 where the last call folded a chunk.
        ring_start: int32 ``[S]``: the oldest live row; None when max_tokens is 1.
        max_tokens: most tokens a lane may have in one call.
        shadow: ``[S, H, P, N]`` or None: ``ssm_state`` rounded to the activation dtype, which is what a step reads of
            it. Half the bytes of a step for half as much memory again.
        arrivals: int32 ``[S]``, by lane: zeros between calls; kernels count in it who has read a cursor. Without it a
            call makes its own.
        sums: fp32 ``[S, H, R, 2]`` or None: what a GPU derives from dt for every row, so that no step does it for a
            whole chunk again: dt behind bias, softplus and limits, and A times its sum from the chunk's first row on. A
            CPU keeps none.
        num_summed: int32 ``[S]`` or None, as ``sums`` is: how many rows from the oldest live one on have them. If fewer
            than ``num_buffered``, the next step derives all of them. Kept numbers belong to one A, dt_bias, softplus
            and limits: who changes these within a chunk, or copies rows without :meth:`per_slot`, sets the slot's
            number to 0.
    """

    x: Tensor
    z: Tensor | None
    dt: Tensor
    B: Tensor
    C: Tensor | None
    num_buffered: Tensor
    out: Tensor
    target_rows: Tensor
    chunk_flags: Tensor
    ring_start: Tensor | None = None
    max_tokens: int = 1
    shadow: Tensor | None = None
    arrivals: Tensor | None = None
    sums: Tensor | None = None
    num_summed: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        max_requests: int,
        chunk_size: int,
        nheads: int,
        headdim: int,
        ngroups: int,
        dstate: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        max_tokens: int = 1,
        trimmed: bool = False,
        shadow: bool = False,
        sums: bool | None = None,
    ) -> BatchInvariantDecodeBuffers:
        """Allocate zeroed buffers.

        Args:
            max_requests: slots S, and most lanes of a call.
            chunk_size: Q, 16..256; that of the prefill's ``chunk_scan``.
            nheads: H.
            headdim: P.
            ngroups: G, divides H.
            dstate: N.
            device: of every tensor.
            dtype: of x, z, dt, B, C and out: bf16, fp16 or fp32.
            max_tokens: most tokens a lane may have in one call, 1..Q.
            trimmed: leave z and C out, which saves nearly half of the memory.
            shadow: keep a rounded copy of the state; for bf16 and fp16.
            sums: keep what is derived from dt, 8 bytes per row and head; None: on a CUDA device. A CPU does not use it.

        Raises:
            TypeError: a size is no whole number, device none, or an option no bool.
            ValueError: a size is out of range, or device or dtype another.

        Example:
            >>> b = BatchInvariantDecodeBuffers.allocate(3, 16, 4, 8, 2, 16, torch.device("cpu"), torch.float32)
            >>> list(b.x.shape), list(b.out.shape), b.num_buffered.tolist()
            ([3, 16, 4, 8], [3, 4, 8], [0, 0, 0])
        """
        check_chunk_size(chunk_size)
        named = {
            "max_requests": max_requests,
            "nheads": nheads,
            "headdim": headdim,
            "ngroups": ngroups,
            "dstate": dstate,
        }
        for name, value in named.items():
            check_range(name, value, 1, (1 << 31) - 1)
        check_range("max_tokens", max_tokens, 1, chunk_size, "at most a chunk")
        if nheads % ngroups:
            raise ValueError(f"ngroups: expected a divisor of nheads={nheads}, got {ngroups}")
        if dtype not in FLOATS:
            raise ValueError(f"dtype: expected {' or '.join(str(d) for d in FLOATS)}, got {dtype}")
        check_flag("trimmed", trimmed)
        check_flag("shadow", shadow)
        if sums is not None:
            check_flag("sums", sums)
        if shadow and dtype == torch.float32:
            raise ValueError("shadow: expected a dtype of 16 bits, since an fp32 state is read as it is")
        device = as_device("device", device)
        sums = device.type == "cuda" if sums is None else sums
        rows = chunk_size if max_tokens == 1 else chunk_size + 2 * max_tokens - 1
        zeros = lambda *shape, kind=dtype: torch.zeros(max_requests, *shape, dtype=kind, device=device)  # noqa: E731
        per_lane = () if max_tokens == 1 else (max_tokens,)
        return cls(
            x=zeros(rows, nheads, headdim), z=None if trimmed else zeros(rows, nheads, headdim),
            dt=zeros(rows, nheads), B=zeros(rows, ngroups, dstate), C=None if trimmed else zeros(rows, ngroups, dstate),
            num_buffered=zeros(kind=torch.int32), out=zeros(*per_lane, nheads, headdim),
            target_rows=zeros(kind=torch.int32), chunk_flags=zeros(kind=torch.int32),
            ring_start=None if max_tokens == 1 else zeros(kind=torch.int32), max_tokens=max_tokens,
            shadow=zeros(nheads, headdim, dstate) if shadow else None, arrivals=zeros(kind=torch.int32),
            sums=zeros(nheads, rows, 2, kind=torch.float32) if sums else None,
            num_summed=zeros(kind=torch.int32) if sums else None,
        )  # fmt: skip

    @property
    def chunk_size(self) -> int:
        """Q."""
        return self.x.shape[1] if self.ring_start is None else self.x.shape[1] - 2 * self.max_tokens + 1

    def seed(
        self, x: Tensor, z: Tensor | None, dt: Tensor, B: Tensor, C: Tensor | None, cu_seqlens: Tensor,
        batch_indices: Tensor,
    ) -> None:  # fmt: skip
        """Store the unfinished chunk of each prefill that began at a chunk boundary.

        ``ssm_state`` must then hold each sequence's state at its last boundary, the ``boundary_states`` of
        ``replayssm.ssd.chunk_scan``, and with a ``shadow`` be followed by :meth:`refresh`. What the slot held before
        is gone: rows behind the tail repeat its last token.

        Args:
            x: ``[T, H, P]``, the buffers' dtype, as all of these: packed sequences.
            z: ``[T, H, P]``, or None: not stored.
            dt: ``[T, H]``, before bias and softplus.
            B: ``[T, G, N]``.
            C: ``[T, G, N]``; None only with trimmed buffers.
            cu_seqlens: int32 ``[n + 1]``: sequence i owns tokens ``cu_seqlens[i]..cu_seqlens[i+1]``, perhaps none.
            batch_indices: int32 or int64, at least n entries: slot of each sequence. Negative ones are padding:
                nothing of the sequence is read, nothing is written.

        Raises:
            TypeError: an argument is no tensor.
            ValueError: a shape, dtype, device or stride does not fit; on the CPU also a bound or slot out of range or
                a slot used twice. Nothing has been written then.
            NotImplementedError: no implementation for this device.
        """
        self._store(x, z, dt, B, C, cu_seqlens, batch_indices, False)

    def extend(
        self, x: Tensor, z: Tensor | None, dt: Tensor, B: Tensor, C: Tensor | None, cu_seqlens: Tensor,
        batch_indices: Tensor,
    ) -> None:  # fmt: skip
        """Store what a later piece of a prefill, which began anywhere, leaves unfinished.

        Call it after ``chunk_scan`` has scanned the piece with ``**buffers.unfinished()``, and store that call's
        ``boundary_states`` into ``ssm_state``; a ``shadow`` then needs :meth:`refresh`. Arguments and errors are those
        of :meth:`seed`; on the CPU a cursor out of range is refused too.
        """
        self._store(x, z, dt, B, C, cu_seqlens, batch_indices, True)

    def _store(
        self, x: Tensor, z: Tensor | None, dt: Tensor, B: Tensor, C: Tensor | None, cu_seqlens: Tensor,
        batch_indices: Tensor, extend: bool,
    ) -> None:  # fmt: skip
        rows = self.x, self.z, self.dt, self.B, self.C, self.num_buffered, self.ring_start, self.num_summed
        n = check_store(*rows, x, z, dt, B, C, cu_seqlens, batch_indices)
        ops.store_tails(*rows, x, z, dt, B, C, cu_seqlens.contiguous(), batch_indices[:n], self.chunk_size, extend)

    def refresh(self, ssm_state: Tensor, batch_indices: Tensor) -> None:
        """Round the state of some slots into ``shadow``; without one, do nothing.

        Needed wherever ``ssm_state`` was written by anything but a step: after a prefill, above all.

        Args:
            ssm_state: fp32 ``[S, H, P, N]``, packed from axis 1.
            batch_indices: int32 or int64: the slots; negative ones are skipped.

        Raises:
            TypeError: an argument is no tensor.
            ValueError: a shape, dtype, device or stride does not fit; on the CPU also a slot out of range.
        """
        if self.shadow is not None:
            check_refresh(self.shadow, ssm_state, batch_indices)
            ops.refresh(self.shadow, ssm_state, batch_indices)

    def unfinished(self) -> dict[str, Tensor | None]:
        """The arguments by which ``chunk_scan`` continues these sequences: the rows and cursors, as they are."""
        return {
            "x_buffer": self.x, "dt_buffer": self.dt, "B_buffer": self.B, "num_buffered": self.num_buffered,
            "ring_start": self.ring_start,
        }  # fmt: skip

    def per_slot(self) -> dict[str, Tensor]:
        """Everything that belongs to a slot, first axis slots: what a fork, a move or a snapshot copies.

        ``ssm_state[slot]`` goes with it.
        """
        named = {name: getattr(self, name) for name in _PER_SLOT}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def commit(self, batch_indices: Tensor, num_accepted: Tensor) -> None:
        """Keep the first tokens of each lane's last call; the others are forgotten. For ``max_tokens > 1``.

        Args:
            batch_indices: int32 or int64 ``[R]``: the slots, as in the call; negative ones are padding.
            num_accepted: int32 or int64 ``[R]``: 0..T of the T tokens that the lane had.

        Raises:
            TypeError: an argument is no tensor.
            ValueError: a shape, dtype or device does not fit, or max_tokens is 1: there the call itself commits its
                token. On the CPU also a number out of range. Nothing has been written then.

        Example:
            >>> b = BatchInvariantDecodeBuffers.allocate(
            ...     3, 16, 4, 8, 2, 16, torch.device("cpu"), torch.float32, max_tokens=4)
            >>> b.commit(torch.tensor([2, -1]), torch.tensor([3, 4]))
            >>> b.num_buffered.tolist()
            [0, 0, 3]
        """
        if self.ring_start is None:
            raise ValueError("num_accepted: expected max_tokens > 1, since a call commits its only token itself")
        sizes: dict[str, int] = {}
        for name, tensor in (("batch_indices", batch_indices), ("num_accepted", num_accepted)):
            check_shape(name, tensor, "lanes", sizes)
            check_dtype(name, tensor, torch.int32, torch.int64)
            check_device(name, tensor, self.num_buffered.device)
        check_packed("buffers.num_buffered", self.num_buffered, 0)
        ops.commit(self.num_buffered, batch_indices, num_accepted, self.max_tokens)
