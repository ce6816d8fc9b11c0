"""Copies of rows in and out of the buffers, and their cursors."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from replayssm.ssd.kernels.launch import packed, stride


@triton.jit
def _masked_update_rows_kernel(
    states_ptr, indices_ptr, values_ptr, state_row_stride, value_row_stride,
    ROW_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Copy rows to where their index says, unless it is negative. Program (index, block of the row)."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(indices_ptr + index).to(tl.int64)
    if row >= 0:
        element = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        inside = element < ROW_SIZE
        value = tl.load(values_ptr + index * value_row_stride + element, mask=inside)
        tl.store(states_ptr + row * state_row_stride + element, value, mask=inside)


def masked_update_rows(states: Tensor, indices: Tensor, values: Tensor) -> None:
    """See ``replayssm.batch_invariant_decode._masked_update_rows``."""
    size = values[:1].numel()
    if size == 0:
        return
    values, block = packed(values), min(1024, triton.next_power_of_2(size))
    _masked_update_rows_kernel[(indices.shape[0], triton.cdiv(size, block))](
        states, packed(indices, 0), values, states.stride(0), values.stride(0), ROW_SIZE=size, BLOCK_SIZE=block
    )


@triton.jit
def _refresh(shadow, ssm_state, slots, s_shadow, s_state, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Program (lane, block of the state)."""
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    if slot >= 0:
        e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(ssm_state + slot * s_state + e, mask=e < SIZE)
        tl.store(shadow + slot * s_shadow + e, value.to(shadow.dtype.element_ty), mask=e < SIZE)


def refresh(shadow: Tensor, ssm_state: Tensor, batch_indices: Tensor) -> None:
    """See ``BatchInvariantDecodeBuffers.refresh``."""
    size = shadow[:1].numel()
    if size and batch_indices.shape[0]:
        _refresh[(batch_indices.shape[0], triton.cdiv(size, 4096))](
            shadow, ssm_state, packed(batch_indices, 0), shadow.stride(0), ssm_state.stride(0), SIZE=size, BLOCK=4096,
            num_warps=8,
        )  # fmt: skip


@triton.jit
def _tail(sequence, num_buffered, ring_start, cu_seqlens, slot, ring_len, chunk_size, EXTEND: tl.constexpr):
    """``(first place, new rows stored, token behind them, tail, oldest row)`` of a sequence that is not padding."""
    buffered = 0
    start = 0
    if EXTEND:
        buffered = tl.load(num_buffered + slot)
        if ring_start is not None:
            start = tl.load(ring_start + slot)
    end = tl.load(cu_seqlens + sequence + 1)
    length = end - tl.load(cu_seqlens + sequence)
    tail = (buffered + length) % chunk_size
    folded = buffered + length - tail
    stays = folded <= buffered  # new rows behind those old ones that stay
    place = tl.where(stays, start + buffered, start)
    start = tl.where(stays, (start + folded) % ring_len, start)
    return place, tl.where(stays, length, tail), end, tail, start


@triton.jit
def _copy_row(rows, values, s_slot, s_row, s_value, slot, row, token, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    if rows is not None and values is not None:
        for first in range(0, SIZE, BLOCK):
            e = first + tl.arange(0, BLOCK)
            value = tl.load(values + token * s_value + e, mask=e < SIZE)
            tl.store(rows + slot * s_slot + row * s_row + e, value, mask=e < SIZE)


@triton.jit
def _store_rows(
    x_rows, z_rows, dt_rows, B_rows, C_rows, num_buffered, ring_start, x, z, dt, B, C, cu_seqlens, slots,
    s_x_slot, s_z_slot, s_dt_slot, s_B_slot, s_C_slot, s_x_row, s_z_row, s_dt_row, s_B_row, s_C_row,
    s_x, s_z, s_dt, s_B, s_C, ring_len, chunk_size,
    X: tl.constexpr, H: tl.constexpr, B_SIZE: tl.constexpr, BLOCK: tl.constexpr, EXTEND: tl.constexpr,
):  # fmt: skip
    """Program (sequence, row): one row of the slot."""
    sequence = tl.program_id(0)
    slot = tl.load(slots + sequence).to(tl.int64)
    if slot < 0:
        return
    place, count, end, tail, _ = _tail(
        sequence, num_buffered, ring_start, cu_seqlens, slot, ring_len, chunk_size, EXTEND
    )
    k = tl.program_id(1)
    if EXTEND:
        wanted = k < count
        token = end - count + k
    else:  # rows behind the tail repeat the last token
        wanted = end > tl.load(cu_seqlens + sequence)
        token = tl.where(k < tail, end - tail + k, end - 1)
    if wanted:
        row = ((place + k) % ring_len).to(tl.int64)
        source = token.to(tl.int64)
        _copy_row(x_rows, x, s_x_slot, s_x_row, s_x, slot, row, source, X, BLOCK)
        _copy_row(z_rows, z, s_z_slot, s_z_row, s_z, slot, row, source, X, BLOCK)
        _copy_row(dt_rows, dt, s_dt_slot, s_dt_row, s_dt, slot, row, source, H, BLOCK)
        _copy_row(B_rows, B, s_B_slot, s_B_row, s_B, slot, row, source, B_SIZE, BLOCK)
        _copy_row(C_rows, C, s_C_slot, s_C_row, s_C, slot, row, source, B_SIZE, BLOCK)


@triton.jit
def _store_cursors(
    num_buffered, ring_start, num_summed, cu_seqlens, slots, ring_len, chunk_size, EXTEND: tl.constexpr
):  # fmt: skip
    """Program (sequence)."""
    sequence = tl.program_id(0)
    slot = tl.load(slots + sequence).to(tl.int64)
    if slot >= 0:
        _, _, _, tail, start = _tail(sequence, num_buffered, ring_start, cu_seqlens, slot, ring_len, chunk_size, EXTEND)
        tl.store(num_buffered + slot, tail)
        if ring_start is not None:
            tl.store(ring_start + slot, start)
        if num_summed is not None:
            tl.store(num_summed + slot, 0)


def store_tails(
    x_rows: Tensor,
    z_rows: Tensor | None,
    dt_rows: Tensor,
    B_rows: Tensor,
    C_rows: Tensor | None,
    num_buffered: Tensor,
    ring_start: Tensor | None,
    num_summed: Tensor | None,
    x: Tensor,
    z: Tensor | None,
    dt: Tensor,
    B: Tensor,
    C: Tensor | None,
    cu_seqlens: Tensor,
    batch_indices: Tensor,
    chunk_size: int,
    extend: bool,
) -> None:
    """Store each sequence's unfinished chunk: ``BatchInvariantDecodeBuffers.seed`` and ``extend``."""
    sequences, ring_len = batch_indices.shape[0], x_rows.shape[1]
    if sequences == 0:
        return
    rows, slots = (x_rows, z_rows, dt_rows, B_rows, C_rows), packed(batch_indices, 0)
    values = [None if value is None else packed(value) for value in (x, z, dt, B, C)]
    _store_rows[(sequences, ring_len)](
        *rows, num_buffered, ring_start, *values, cu_seqlens, slots,
        *(stride(r) for r in rows), *(stride(r, 1) for r in rows), *(stride(v) for v in values), ring_len, chunk_size,
        X=x_rows[0, 0].numel(), H=dt_rows.shape[2], B_SIZE=B_rows[0, 0].numel(), BLOCK=1024, EXTEND=extend,
    )  # fmt: skip
    _store_cursors[(sequences,)](
        num_buffered, ring_start, num_summed, cu_seqlens, slots, ring_len, chunk_size, EXTEND=extend
    )


# One form for any number of lanes and wherever slots and counts begin: it would cost a call's first user 50 ms.
@triton.jit(do_not_specialize=["s_accepted", "lanes"], do_not_specialize_on_alignment=["slots", "num_accepted"])
def _commit(num_buffered, slots, num_accepted, s_accepted, lanes, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < lanes
    slot = tl.load(slots + lane, mask=inside, other=-1).to(tl.int64)
    inside = inside & (slot >= 0)
    count = tl.load(num_accepted + lane * s_accepted, mask=inside, other=0).to(tl.int32)
    tl.store(num_buffered + slot, tl.load(num_buffered + slot, mask=inside, other=0) + count, mask=inside)


def commit(num_buffered: Tensor, batch_indices: Tensor, num_accepted: Tensor, max_tokens: int) -> None:
    """See ``BatchInvariantDecodeBuffers.commit``."""
    lanes = batch_indices.shape[0]
    if lanes:
        _commit[(triton.cdiv(lanes, 128),)](
            num_buffered, packed(batch_indices, 0), num_accepted, num_accepted.stride(0), lanes, BLOCK=128
        )
