"""Mamba-2 over whole sequences in chunks, with the same bits for every split into calls (``docs/maths.md`` §5)."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from replayssm.custom_op import define
from replayssm.dispatch import by_device
from replayssm.ssd.arguments import check_chunk_scan
from replayssm.ssd.checked import check_values
from replayssm.ssd.pin import pin_mamba_ssm

__all__ = ["chunk_scan", "pin_mamba_ssm"]


_op = define(
    "chunk_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, int chunk_size, Tensor? cu_seqlens, Tensor? D, "
    "Tensor? z, Tensor? dt_bias, bool dt_softplus, float dt_min, float dt_max, Tensor? initial_states, "
    "Tensor? x_buffer, Tensor? dt_buffer, Tensor? B_buffer, Tensor? num_buffered, Tensor? ring_start, "
    "Tensor? batch_indices, Tensor(a!) out, Tensor(b!)? final_states, Tensor(c!)? boundary_states, "
    "Tensor(d!)? chunk_states) -> ()",
    by_device("ssd", "chunk_scan", check_values),
)


def chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    cu_seqlens: Tensor | None = None,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf),
    initial_states: Tensor | None = None,
    x_buffer: Tensor | None = None,
    dt_buffer: Tensor | None = None,
    B_buffer: Tensor | None = None,
    num_buffered: Tensor | None = None,
    ring_start: Tensor | None = None,
    batch_indices: Tensor | None = None,
    out: Tensor | None = None,
    final_states: Tensor | None = None,
    boundary_states: Tensor | None = None,
    chunk_states: Tensor | None = None,
) -> Tensor:
    """Scan packed sequences; the bits of a row do not depend on how its sequence was split into calls.

    The recurrence is that of ``checkpointing_ssu``: ``S_t = exp(A dt'_t) S_{t-1} + dt'_t x_t B_t^T`` and ``y_t = (S_t
    C_t + D x_t) silu(z_t)`` with ``dt' = clamp(softplus(dt + dt_bias))`` (Dao and Gu, "Transformers are SSMs", 2024).
    It is computed chunk by chunk, and chunks are counted from each sequence's own first token: from the state at the
    last boundary in fp32, and from the rows of the chunk so far. Scaled B, weights and the state that an output reads
    are rounded to x's dtype; sums are fp32, those of dt fp64 on the CPU. On a GPU the bits are those of mamba_ssm's
    Triton kernels for 16-bit inputs (:func:`pin_mamba_ssm`).

    A sequence whose earlier calls ended within a chunk continues from two sources: the state at its last boundary
    (``initial_states``) and the rows since then (the buffers, of which ``num_buffered[slot]`` rows come before the new
    tokens). Any split then gives the same outputs and boundary states, bit for bit. Buffers are read only;
    ``BatchInvariantDecodeBuffers`` of ``replayssm.batch_invariant_decode`` keeps them.

    Sizes: tokens of all sequences T, sequences n, nheads H, headdim P, dstate N, ngroups G (divides H), slots S,
    rows of a slot R, chunk size Q. Tensors that are read may have any strides, those that are written are packed from
    axis 1 on.

    Args:
        x: ``[T, H, P]``, bf16, fp16 or fp32.
        dt: ``[T, H]``, any of these dtypes; with buffers that of dt_buffer. Before bias and softplus.
        A: ``[H]``, any of these dtypes: negative, per unit of dt'.
        B: ``[T, G, N]``, x's dtype.
        C: ``[T, G, N]``, x's dtype.
        chunk_size: Q, 16..256.
        cu_seqlens: int32 ``[n + 1]``, ascending: sequence i owns tokens ``cu_seqlens[i]..cu_seqlens[i+1]``, perhaps
            none. None means one sequence. Tokens of no sequence are neither read nor written.
        D: ``[H]`` or ``[H, P]``, bf16, fp16 or fp32: skip connection; None for none.
        z: ``[T, H, P]``, x's dtype: gate; None for none.
        dt_bias: ``[H]``, bf16, fp16 or fp32, or None.
        dt_softplus: apply ``log(1 + exp(v))`` (the identity above 20) after the bias.
        dt_limit: bounds of dt', applied last, ``0 <= lower <= upper``.
        initial_states: fp32 ``[n, H, P, N]``: each sequence's state at its last boundary; None means zeros.
        x_buffer: ``[S, R, H, P]``, x's dtype, R >= Q: rows of unfinished chunks. All four buffers or none.
        dt_buffer: ``[S, R, H]``, dt's dtype, before bias and softplus.
        B_buffer: ``[S, R, G, N]``, x's dtype.
        num_buffered: int32 ``[S]``: live rows, 0..Q-1, with ring_start 0..R. Other rows are never read.
        ring_start: int32 ``[S]``, 0..R-1: the live rows begin there and go around the end; None means at row 0.
        batch_indices: int32 or int64 ``[n]``: slot of each sequence, distinct; needed with the buffers. A sequence
            with a negative one is padding: nothing of it is read or written.
        out: ``[T, H, P]``, x's dtype, written; None allocates it. Padding keeps what it held, which in an allocated
            one is undefined.
        final_states: fp32 ``[n, H, P, N]``, written: each sequence's state after its last token. A state within a
            chunk cannot be continued from with the same bits; boundary_states can.
        boundary_states: fp32 ``[n, H, P, N]``, written: each sequence's state at its last boundary, which is its
            initial state when no chunk was completed.
        chunk_states: fp32 ``[T // Q + n, H, P, N]``, written: the state after the k-th chunk that new tokens of
            sequence i complete, k = 0, 1, ..., in row ``cu_seqlens[i] // Q + i + k``. Other rows are not written.

    Returns:
        ``out``.

    Raises:
        TypeError: an argument is no tensor, an option of another type.
        ValueError: a shape, dtype, device, stride or number does not fit, or buffers are incomplete; on the CPU also a
            bound, slot or cursor out of range or a slot used twice. Nothing has been written then.
        NotImplementedError: no implementation for this device.

    Example:
        >>> import torch
        >>> T, H, P, N, G = 40, 4, 8, 16, 2
        >>> x, dt, A = torch.ones(T, H, P), torch.full((T, H), 0.5), torch.full((H,), -1.0)
        >>> B = torch.ones(T, G, N)
        >>> state = torch.empty(1, H, P, N)
        >>> whole = chunk_scan(x, dt, A, B, B, 16, boundary_states=state)
        >>> [round(value, 4) for value in whole[:3, 0, 0].tolist()]  # 8, then 8 (1 + e^-0.5), ...
        [8.0, 12.8522, 15.7953]
        >>> state = torch.empty(1, H, P, N)
        >>> first = chunk_scan(x[:16], dt[:16], A, B[:16], B[:16], 16, boundary_states=state)
        >>> rest = chunk_scan(x[16:], dt[16:], A, B[16:], B[16:], 16, initial_states=state)
        >>> torch.equal(torch.cat((first, rest)), whole)
        True
    """
    dt_limit = tuple(dt_limit) if isinstance(dt_limit, list) else dt_limit
    check_chunk_scan(
        x, dt, A, B, C, z, dt_bias, out, x_buffer, dt_buffer, B_buffer, num_buffered, ring_start, batch_indices,
        initial_states, final_states, boundary_states, chunk_states, cu_seqlens, D, chunk_size, dt_softplus, dt_limit,
    )  # fmt: skip
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    # Kernels step over these without a stride.
    cu_seqlens, num_buffered, ring_start = (
        None if each is None else each.contiguous() for each in (cu_seqlens, num_buffered, ring_start)
    )
    _op(
        x, dt, A, B, C, chunk_size, cu_seqlens, D, z, dt_bias, dt_softplus, float(dt_limit[0]), float(dt_limit[1]),
        initial_states, x_buffer, dt_buffer, B_buffer, num_buffered, ring_start, batch_indices, out, final_states,
        boundary_states, chunk_states,
    )  # fmt: skip
    return out
