"""Mamba-2 decoding from a checkpoint and a ring of recent inputs (``docs/maths.md``)."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor

from replayssm.custom_op import define
from replayssm.dispatch import by_device
from replayssm.mamba.arguments import check_checkpointing_ssu, check_replayssm_materialize
from replayssm.mamba.checked import check_copies, check_values

__all__ = ["checkpointing_ssu", "replayssm_materialize"]


_checkpointing_ssu = define(
    "checkpointing_ssu(Tensor(a!) state, Tensor(b!)? state_scale, Tensor(c!) x_cache, Tensor(d!) B_cache, "
    "Tensor(e!) dt_cache, Tensor(f!) out, Tensor ring_start, Tensor prev_num_accepted_tokens, Tensor x, Tensor dt, "
    "Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, bool dt_softplus, "
    "Tensor? state_batch_indices, int pad_slot_id, Tensor? rand_seed, int philox_rounds, Tensor? cu_seqlens, "
    "int seq_len, int window, float dt_min, float dt_max) -> ()",
    by_device("mamba", "checkpointing_ssu", check_values),
)
_replayssm_materialize = define(
    "replayssm_materialize(Tensor state_ptrs, Tensor state_slot_strides, Tensor x_cache_ptrs, "
    "Tensor x_cache_slot_strides, Tensor B_cache_ptrs, Tensor B_cache_slot_strides, Tensor dt_cache_ptrs, "
    "Tensor dt_cache_slot_strides, Tensor A_ptrs, Tensor state_scale_ptrs, Tensor state_scale_slot_strides, "
    "Tensor src_slots, Tensor dst_slots, Tensor ring_start, Tensor replay_prefix_len, Tensor active_request_indices, "
    "ScalarType state_dtype, ScalarType input_dtype, ScalarType matrixA_dtype, int dim, int dstate, int num_heads, "
    "int heads_per_group, int max_window, int ring_buffer_len, int pad_slot_id, Tensor? rand_seed, "
    "int philox_rounds, Tensor[] dependency_inputs, Tensor(a!)[] dependency_outputs) -> ()",
    by_device("mamba", "replayssm_materialize", check_copies),
)


def checkpointing_ssu(
    state: Tensor,
    x_cache: Tensor,
    B_cache: Tensor,
    dt_cache: Tensor,
    ring_start: Tensor,
    prev_num_accepted_tokens: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    out: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: Tensor | None = None,
    rand_seed: Tensor | None = None,
    philox_rounds: int = 10,
    *,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    max_window: int | None = None,
    dt_limit: tuple[float, float] = (0.0, inf),
) -> Tensor:
    """Score T new tokens per request from a checkpoint and the ring of inputs since then (``docs/maths.md`` §2, §3).

    With ``dt' = clamp(softplus(dt + dt_bias))`` per head and ``S`` the state after the live rows::

        S_t = exp(A dt'_t) S_{t-1} + dt'_t x_t B_t^T        y_t = (S_t C_t + D x_t) silu(z_t)

    (Dao and Gu, "Transformers are SSMs", 2024). The new tokens' x, B and dt' are written into the ring, behind the
    live rows, in every call. The state is written only when ``live + seq_len > window``: then it becomes the state
    after the live rows and before the new tokens (a flush). No cursor moves; ``replayssm.cursors.commit`` moves them,
    once, after the accepted tokens are known. A rejected token therefore costs nothing.

    Sizes: slots S, batch, seq_len T (1..64), nheads H, headdim P, dstate N, ngroups G (divides H), ring_len R. "Packed"
    names axes that must have their natural strides; the strides of the axes before them are free. "Expanded" axes
    repeat one value and have stride 0.

    Args:
        state: ``[S, H, P, N]``, fp32, bf16, fp16, int8 or float8_e4m3fn, packed from axis 1. Written at a flush.
        x_cache: ``[S, H, R, P]``, x's dtype, packed from axis 1. T rows are written per request, at ``(ring_start +
            live + i) % R``; row ``(ring_start + j) % R`` is live for j < live. Other rows are never read.
        B_cache: ``[S, G, R, N]``, x's dtype, packed from axis 1, rows as in x_cache.
        dt_cache: ``[S, H, R]``, fp32, packed from axis 1, rows as in x_cache; holds dt'.
        ring_start: int32 ``[S]``, any stride, 0..R-1. Read only.
        prev_num_accepted_tokens: int32 ``[S]``, any stride: live rows, 0..window. Read only.
        x: ``[batch, T, H, P]``, bf16, fp16 or fp32, packed from axis 2; with cu_seqlens ``[1, total, H, P]``.
        dt: ``[batch, T, H, P]``, any of these dtypes, axis 3 expanded: the time step before bias and softplus.
        A: ``[H, P, N]``, any of these dtypes, axes 1 and 2 expanded: negative, per unit of dt'.
        B: ``[batch, T, G, N]``, x's dtype, packed from axis 2.
        C: ``[batch, T, G, N]``, x's dtype, packed from axis 2.
        out: ``[batch, T, H, P]``, x's dtype, packed from axis 2, written; None allocates it. Rows of padding keep what
            they held, which in an allocated one is undefined.
        D: ``[H, P]``, bf16, fp16 or fp32, axis 1 expanded: skip connection; None for none.
        z: ``[batch, T, H, P]``, x's dtype, packed from axis 2: gate; None for none.
        dt_bias: ``[H, P]``, D's dtype when there is D, axis 1 expanded; None for none.
        dt_softplus: apply ``log(1 + exp(v))`` (the identity above 20) after the bias.
        state_batch_indices: int32 or int64 ``[batch]``: the requests' slots, distinct; None means request b in slot b.
            A negative slot is padding: nothing of that request is read or written.
        pad_slot_id: a further slot number that means padding.
        state_scale: fp32 ``[S, H, P]``, packed from axis 1, exactly for the 8-bit states: ``state value = code *
            scale``. Written at a flush.
        rand_seed: int64, one element: round the flushed state stochastically (``replayssm/rounding.py``). fp32 states
            ignore it. Outputs never depend on it. Advance it every step.
        philox_rounds: rounds of the random generator, 0..32; 0 rounds to nearest.
        cu_seqlens: int32 ``[batch + 1]``: request b owns tokens ``cu_seqlens[b]..cu_seqlens[b+1]`` of ``x[0]``; one
            with no token is skipped.
        max_seqlen: T, the most tokens of a request; required with cu_seqlens.
        max_window: the window, T..64, with ``window + T <= R``; None means ``R - T``. A pool passes its own, because
            ``R - T`` changes with T.
        dt_limit: bounds of dt', applied last, ``0 <= lower <= upper``.

    Returns:
        ``out``.

    Raises:
        TypeError: an argument is no tensor, an option of another type.
        ValueError: a shape, dtype, device, stride or number does not fit; on the CPU also a slot, cursor or length out
            of range or a slot used twice. Nothing has been written then.
        NotImplementedError: no implementation for this device.

    Example:
        >>> import torch
        >>> H, P, N, G, T, window = 4, 8, 16, 2, 3, 6
        >>> state, x_cache = torch.zeros(5, H, P, N), torch.zeros(5, H, window + T, P)
        >>> B_cache, dt_cache = torch.zeros(5, G, window + T, N), torch.zeros(5, H, window + T)
        >>> start = live = torch.zeros(5, dtype=torch.int32)
        >>> x, dt = torch.ones(1, T, H, P), torch.full((1, T, H, 1), 0.5).expand(1, T, H, P)
        >>> A, B = torch.full((H, 1, 1), -1.0).expand(H, P, N), torch.ones(1, T, G, N)
        >>> y = checkpointing_ssu(state, x_cache, B_cache, dt_cache, start, live, x, dt, A, B, B,
        ...                       state_batch_indices=torch.tensor([3]))
        >>> [round(value, 4) for value in y[0, :, 0, 0].tolist()]  # 8, then 8 (1 + e^-0.5), ...
        [8.0, 12.8522, 15.7953]
    """
    sizes = check_checkpointing_ssu(
        state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, x, dt, A, B, C, out, D, z, dt_bias,
        state_scale, dt_softplus, state_batch_indices, pad_slot_id, rand_seed, philox_rounds, cu_seqlens, max_seqlen,
        max_window, tuple(dt_limit) if isinstance(dt_limit, list) else dt_limit,
    )  # fmt: skip
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _checkpointing_ssu(
        state, state_scale, x_cache, B_cache, dt_cache, out, ring_start, prev_num_accepted_tokens, x, dt, A, B, C, D, z,
        dt_bias, dt_softplus, state_batch_indices, pad_slot_id, rand_seed, philox_rounds, cu_seqlens, sizes.seq_len,
        sizes.window, float(dt_limit[0]), float(dt_limit[1]),
    )  # fmt: skip
    return out


def _outside_graphs() -> Callable[..., None]:
    # A compiled graph may work on copies of what it changes, and the addresses would miss them: break the graph. Made
    # late, since torch.compiler.disable loads the compiler.
    return torch.compiler.disable(_replayssm_materialize, reason="replayssm_materialize writes through addresses")


def replayssm_materialize(
    state_ptrs: Tensor,
    state_slot_strides: Tensor,
    x_cache_ptrs: Tensor,
    x_cache_slot_strides: Tensor,
    B_cache_ptrs: Tensor,
    B_cache_slot_strides: Tensor,
    dt_cache_ptrs: Tensor,
    dt_cache_slot_strides: Tensor,
    A_ptrs: Tensor,
    state_scale_ptrs: Tensor,
    state_scale_slot_strides: Tensor,
    src_slots: Tensor,
    dst_slots: Tensor,
    ring_start: Tensor,
    replay_prefix_len: Tensor,
    active_request_indices: Tensor,
    *,
    state_dtype: torch.dtype,
    input_dtype: torch.dtype,
    matrixA_dtype: torch.dtype,
    dim: int,
    dstate: int,
    num_heads: int,
    heads_per_group: int,
    max_window: int,
    ring_buffer_len: int,
    pad_slot_id: int = -1,
    rand_seed: Tensor | None = None,
    philox_rounds: int = 0,
    dependency_inputs: list[Tensor] | None = None,
    dependency_outputs: list[Tensor] | None = None,
) -> None:
    """Write the state at a chosen token into another slot, for all layers at once (``docs/maths.md`` §4).

    For every selected request and every layer: take the state of the source slot, apply the first
    ``replay_prefix_len`` live rows of its ring, and store the result in the destination slot. The rows and the source
    stay as they are, and no cursor moves. Zero rows copy the state, and the scale, byte for byte. With rounding to
    nearest the result equals, bit for bit, what ``checkpointing_ssu`` stores when it flushes the same rows.

    Layers are given by tables of addresses, so that one call serves storage of any arrangement. One slot of a layer
    is, packed, state ``[num_heads, dim, dstate]``, x ``[num_heads, ring_buffer_len, dim]``, B ``[num_heads /
    heads_per_group, ring_buffer_len, dstate]``, dt ``[num_heads, ring_buffer_len]`` and scale ``[num_heads, dim]`` in
    fp32; the distance between slots is free. On the CPU the addresses are host addresses (``Tensor.data_ptr()``), and
    the caller keeps the memory alive. On a GPU, where a head's state and a row of x and of B are multiples of 16 bytes
    long, addresses and slot distances of state, x and B must be multiples of 16 bytes too, as those of tensors are; the
    contents of the tables are not checked there.

    Args:
        state_ptrs: int64 ``[layers]``, as all tables: addresses of the states.
        state_slot_strides: distance between slots of the states, in elements, as all strides.
        x_cache_ptrs: addresses of the rings of x.
        x_cache_slot_strides: slot strides of these.
        B_cache_ptrs: addresses of the rings of B.
        B_cache_slot_strides: slot strides of these.
        dt_cache_ptrs: addresses of the rings of processed dt.
        dt_cache_slot_strides: slot strides of these.
        A_ptrs: addresses of num_heads consecutive values of A.
        state_scale_ptrs: addresses of the scales; zeros for a state without scales.
        state_scale_slot_strides: slot strides of these.
        src_slots: int32 ``[layers, batch]``: slots that are read. A request is skipped in a layer where either slot is
            negative or ``pad_slot_id``.
        dst_slots: int32 ``[layers, batch]``: slots that are written. One may equal its own source, but no slot that
            another request reads or writes.
        ring_start: int32 ``[batch]``, 0..ring_buffer_len-1: row of the first token to apply.
        replay_prefix_len: int32 ``[batch]``, 0..max_window: tokens to apply.
        active_request_indices: int32 ``[batch]``: the selected requests, each once, in any order; the first negative
            element ends the list.
        state_dtype: type of the states: fp32, bf16, fp16, int8 or float8_e4m3fn.
        input_dtype: type of the rings of x and B: bf16, fp16 or fp32.
        matrixA_dtype: type of A: bf16, fp16 or fp32.
        dim: head dim.
        dstate: state dim.
        num_heads: heads of every layer.
        heads_per_group: heads that share B; divides num_heads.
        max_window: most tokens that a request may apply, 1..64.
        ring_buffer_len: rows of every ring.
        pad_slot_id: a further slot number that means padding.
        rand_seed: int64, one element, required with philox_rounds > 0. Layer l rounds as a flush into the destination
            slot with the seed ``rounding.layer_seed(rand_seed, l)`` does.
        philox_rounds: rounds of the random generator, 0..32; 0 rounds to nearest.
        dependency_inputs: tensors that hold what is read. On the CPU, when there are any, each source, ring and A must
            lie inside one of them or of dependency_outputs.
        dependency_outputs: tensors that hold what is written. On the CPU, when there are any, each destination must lie
            inside one of them. The registered op (``torch.ops.replayssm.replayssm_materialize``) declares that it
            changes these and nothing else. This function breaks the graph under torch.compile, because a compiled
            graph may hold copies that the addresses miss; ``fullgraph=True`` refuses it.

    Raises:
        TypeError: a table is no tensor, a size or an option of another type.
        ValueError: a shape, dtype, device or number does not fit; on the CPU also a slot, row or length out of range,
            slots that clash, or an address outside the given tensors. Nothing has been written then.
        NotImplementedError: no implementation for this device.

    Example:
        >>> import torch
        >>> state, x, B = torch.zeros(2, 1, 2, 3), torch.ones(2, 1, 5, 2), torch.ones(2, 1, 5, 3)
        >>> dt, A = torch.full((2, 1, 5), 0.5), torch.tensor([-1.0])
        >>> tables = [number for t in (state, x, B, dt) for number in (t.data_ptr(), t.stride(0))]
        >>> tables = [torch.tensor([number]) for number in (*tables, A.data_ptr(), 0, 0)]
        >>> one = lambda value: torch.tensor([value], dtype=torch.int32)
        >>> replayssm_materialize(*tables, one([0]), one([1]), one(4), one(2), one(0), state_dtype=state.dtype,
        ...     input_dtype=x.dtype, matrixA_dtype=A.dtype, dim=2, dstate=3, num_heads=1, heads_per_group=1,
        ...     max_window=4, ring_buffer_len=5)
        >>> round(state[1, 0, 0, 0].item(), 4)  # 0.5 (1 + e^-0.5); slot 0 keeps its zeros
        0.8033
    """
    check_replayssm_materialize(
        {"state_ptrs": state_ptrs, "x_cache_ptrs": x_cache_ptrs, "B_cache_ptrs": B_cache_ptrs,
         "dt_cache_ptrs": dt_cache_ptrs, "A_ptrs": A_ptrs, "state_scale_ptrs": state_scale_ptrs},
        {"state_slot_strides": state_slot_strides, "x_cache_slot_strides": x_cache_slot_strides,
         "B_cache_slot_strides": B_cache_slot_strides, "dt_cache_slot_strides": dt_cache_slot_strides,
         "state_scale_slot_strides": state_scale_slot_strides},
        {"src_slots": src_slots, "dst_slots": dst_slots},
        {"ring_start": ring_start, "replay_prefix_len": replay_prefix_len,
         "active_request_indices": active_request_indices},
        {"state_dtype": state_dtype, "input_dtype": input_dtype, "matrixA_dtype": matrixA_dtype},
        {"dim": dim, "dstate": dstate, "num_heads": num_heads, "heads_per_group": heads_per_group,
         "max_window": max_window, "ring_buffer_len": ring_buffer_len, "philox_rounds": philox_rounds,
         "pad_slot_id": pad_slot_id},
        rand_seed,
        {"dependency_inputs": dependency_inputs, "dependency_outputs": dependency_outputs},
    )  # fmt: skip
    run = _outside_graphs() if torch.compiler.is_compiling() else _replayssm_materialize
    run(
        state_ptrs, state_slot_strides, x_cache_ptrs, x_cache_slot_strides, B_cache_ptrs, B_cache_slot_strides,
        dt_cache_ptrs, dt_cache_slot_strides, A_ptrs, state_scale_ptrs, state_scale_slot_strides, src_slots, dst_slots,
        ring_start, replay_prefix_len, active_request_indices, state_dtype, input_dtype, matrixA_dtype, dim, dstate,
        num_heads, heads_per_group, max_window, ring_buffer_len, pad_slot_id, rand_seed, philox_rounds,
        list(dependency_inputs or ()), list(dependency_outputs or ()),
    )  # fmt: skip
