"""Exact decode of Mamba-2: a decoded row has the bits that a scan over the whole sequence gives it.

``docs/maths.md`` §5, ``docs/numerics.md`` §5.
"""

from __future__ import annotations

from math import inf

from torch import Tensor

from replayssm.batch_invariant_decode import ops
from replayssm.batch_invariant_decode.adapter import MambaBatchInvariantDecode
from replayssm.batch_invariant_decode.arguments import check_decode_rows, check_masked_update_rows
from replayssm.batch_invariant_decode.buffers import BatchInvariantDecodeBuffers
from replayssm.batch_invariant_decode.scan import batch_invariant_decode_buffered_scan

__all__ = ["BatchInvariantDecodeBuffers", "MambaBatchInvariantDecode", "batch_invariant_decode_buffered_scan"]


def _masked_update_rows(states: Tensor, indices: Tensor, values: Tensor) -> None:
    """Copy ``values[i]`` to ``states[indices[i]]``, in place, except where the index is negative.

    Args:
        states: ``[rows, ...]``, packed from axis 1 on.
        indices: int32 or int64 ``[n]``, below rows, those that are not negative distinct.
        values: ``[n, ...]``, states' dtype. Rows of negative indices are not read.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: a shape, dtype, device or stride does not fit; on the CPU also an index out of range. Nothing has
            been written then.
        NotImplementedError: no implementation for this device.

    Example:
        >>> import torch
        >>> states = torch.zeros(3, 2)
        >>> _masked_update_rows(states, torch.tensor([2, -1]), torch.ones(2, 2))
        >>> states.tolist()
        [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    """
    check_masked_update_rows(states, indices, values)
    ops.masked_update_rows(states, indices, values)


def _mamba_chunk_scan_decode_rows(
    x: Tensor,
    z: Tensor | None,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    chunk_starts: Tensor,
    slots: Tensor,
    target_rows: Tensor,
    chunk_flags: Tensor,
    initial_states: Tensor,
    out: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf),
) -> None:
    """One row of a chunk per lane, from rows that lie in flat buffers, as ``chunk_scan`` computes it.

    Row t of the chunk that begins at ``chunk_starts`` is computed from rows 0..t of it and the state before it; where
    ``chunk_flags`` is not zero, rows 0..t are then folded into the state. Rows behind t are never read.

    Args:
        x: ``[rows, H, P]``, bf16, fp16 or fp32: the flattened buffers, as z, dt, B and C.
        z: ``[rows, H, P]``, x's dtype, or None.
        dt: ``[rows, H]``, bf16, fp16 or fp32: before bias and softplus.
        A: ``[H]``, bf16, fp16 or fp32.
        B: ``[rows, G, N]``, x's dtype.
        C: ``[rows, G, N]``, x's dtype.
        chunk_size: 16..256.
        chunk_starts: int32 or int64 ``[R]``, as the next three: first row of the lane's chunk.
        slots: the lane's state, distinct where they are folded.
        target_rows: t, 0..chunk_size-1; negative: padding, nothing is read or written.
        chunk_flags: not zero: fold. The row should be the chunk's last.
        initial_states: fp32 ``[S, H, P, N]``, written where folded.
        out: ``[R, H, P]``, x's dtype, written.
        D: ``[H]`` or ``[H, P]``, or None.
        dt_bias: ``[H]`` or None.
        dt_softplus: apply softplus after the bias.
        dt_limit: bounds of dt, applied last.

    Raises:
        TypeError: an argument is no tensor, an option of another type.
        ValueError: a shape, dtype, device, stride or number does not fit; on the CPU also a row or slot out of range.
            Nothing has been written then.
        NotImplementedError: no implementation for this device.
    """
    check_decode_rows(
        x, z, dt, B, C, A, dt_bias, chunk_starts, slots, target_rows, chunk_flags, initial_states, out, D, chunk_size,
        dt_softplus, dt_limit,
    )  # fmt: skip
    ops.decode_rows(
        initial_states, out, x, z, dt, A, B, C, chunk_size, chunk_starts, slots, target_rows, chunk_flags, D, dt_bias,
        dt_softplus, float(dt_limit[0]), float(dt_limit[1]),
    )  # fmt: skip
