"""``replayssm_materialize`` in one launch over all requests, layers and heads, through tables of pointers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.mamba.configs import materialize_tile, next_power_of_2, state_columns, window_rows
from replayssm.mamba.kernels.common import DTYPES, KINDS, STORAGE, operand_dtype
from replayssm.mamba.kernels.rounding import layer_seed
from replayssm.mamba.kernels.window import fold_rows, fold_weights, load, ring_row, store


@triton.jit
def _base(pointers, strides, layer, slot, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Address of one slot in one layer's storage."""
    pointer = tl.load(pointers + layer).to(tl.pointer_type(DTYPE))
    stride = tl.load(strides + layer)
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
        stride = tl.multiple_of(stride, 16)
    return pointer + slot.to(tl.int64) * stride


@triton.jit
def _active_count(active, batch, BLOCK: tl.constexpr):
    """Entries of the list before its first negative one."""
    count = batch
    first = 0
    while first < count:
        at = first + tl.arange(0, BLOCK)
        entry = tl.load(active + at, mask=at < batch, other=-1)
        count = tl.minimum(count, tl.min(tl.where(entry < 0, at, batch), 0))
        first += BLOCK
    return count


@triton.jit
def _materialize(
    state_ptrs, state_strides, x_ptrs, x_strides, B_ptrs, B_strides, dt_ptrs, dt_strides, A_ptrs,
    scale_ptrs, scale_strides, src_slots, dst_slots, ring_start, prefix_len, active, rand_seed,
    batch, layers, nheads, heads_per_group, ring_len, pad_slot_id, lanes,
    P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, WP: tl.constexpr, BP: tl.constexpr, FOLD_ROWS: tl.constexpr,
    STAGES: tl.constexpr, LIST_BLOCK: tl.constexpr, STATE: tl.constexpr, INPUT: tl.constexpr, A_TYPE: tl.constexpr,
    KIND: tl.constexpr, OPERAND: tl.constexpr, ROUNDS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    SCALED: tl.constexpr = KIND == "int8" or KIND == "fp8"
    PARTS: tl.constexpr = (P + BP - 1) // BP
    MASKED: tl.constexpr = (P % BP != 0) or (NP != N)
    program = tl.program_id(0)
    p_first = program % PARTS * BP
    head = program // PARTS % nheads
    layer = program // PARTS // nheads % layers
    lane = program // PARTS // nheads // layers
    n = tl.arange(0, NP)
    w = tl.arange(0, WP)
    n_in = n < N
    count = _active_count(active, batch, LIST_BLOCK)
    for entry in range(lane, count, lanes):
        request = tl.load(active + entry)
        src = tl.load(src_slots + layer.to(tl.int64) * batch + request)
        dst = tl.load(dst_slots + layer.to(tl.int64) * batch + request)
        rows = tl.load(prefix_len + request)
        start = tl.load(ring_start + request)
        skip = (src < 0) | (dst < 0) | (src == pad_slot_id) | (dst == pad_slot_id)
        if not skip:
            source = _base(state_ptrs, state_strides, layer, src, STATE, ALIGNED) + head * (P * N) + p_first * N
            target = _base(state_ptrs, state_strides, layer, dst, STATE, ALIGNED) + head * (P * N) + p_first * N
            if SCALED:
                scale_source = _base(scale_ptrs, scale_strides, layer, src, tl.float32, False) + head * P + p_first
                scale_target = _base(scale_ptrs, scale_strides, layer, dst, tl.float32, False) + head * P + p_first
            if rows == 0:
                p = tl.arange(0, BP)
                p_in = p < P - p_first
                mask = p_in[:, None] & n_in[None, :]
                at = p[:, None] * N + n[None, :]
                store(target + at, load(source + at, mask, MASKED), mask, MASKED)
                if SCALED:
                    store(scale_target + p, load(scale_source + p, p_in, MASKED), p_in, MASKED)
            else:
                x = _base(x_ptrs, x_strides, layer, src, INPUT, ALIGNED) + head * P * ring_len + p_first
                B = _base(B_ptrs, B_strides, layer, src, INPUT, ALIGNED) + head // heads_per_group * N * ring_len
                dt = _base(dt_ptrs, dt_strides, layer, src, tl.float32, False) + head * ring_len
                a = tl.load(tl.load(A_ptrs + layer).to(tl.pointer_type(A_TYPE)) + head).to(tl.float32)
                seed = tl.full((), 0, tl.int64)
                if ROUNDS > 0:
                    seed = layer_seed(tl.load(rand_seed), layer)
                ring = ring_row(start, w, ring_len)
                live = w < rows
                decay, weights = fold_weights(tl.load(dt + ring, mask=live, other=0.0), a, rows, WP)
                B_rows = tl.load(B + ring[:, None] * N + n[None, :], mask=live[:, None] & n_in[None, :], other=0.0)
                for block in tl.range(0, BP, FOLD_ROWS, num_stages=STAGES):
                    p = tl.arange(0, FOLD_ROWS)
                    p_in = block + p < P - p_first
                    mask = p_in[:, None] & n_in[None, :]
                    at = p[:, None] * N + n[None, :]
                    codes = load(source + block * N + at, mask, MASKED)
                    scale = tl.full((FOLD_ROWS,), 1.0, tl.float32)
                    if SCALED:
                        scale = load(scale_source + block + p, p_in, MASKED)
                    x_rows = tl.load(
                        x + block + ring[:, None] * P + p[None, :], mask=live[:, None] & p_in[None, :], other=0.0
                    )
                    _, codes, scale = fold_rows(
                        codes, scale, x_rows, weights, B_rows, decay, seed, dst, head, p_first + block + p,
                        NP, KIND, ROUNDS, OPERAND,
                    )  # fmt: skip
                    store(target + block * N + at, codes, mask, MASKED)
                    if SCALED:
                        store(scale_target + block + p, scale, p_in, MASKED)


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
    state_dtype: torch.dtype,
    input_dtype: torch.dtype,
    matrixA_dtype: torch.dtype,
    dim: int,
    dstate: int,
    num_heads: int,
    heads_per_group: int,
    max_window: int,
    ring_buffer_len: int,
    pad_slot_id: int,
    rand_seed: Tensor | None,
    philox_rounds: int,
    dependency_inputs: list[Tensor],
    dependency_outputs: list[Tensor],
) -> None:
    """See ``replayssm.mamba.replayssm_materialize``."""
    layers, batch = src_slots.shape
    if layers * batch * num_heads * dim * dstate == 0:
        return
    kind = KINDS[state_dtype]
    tile = materialize_tile(dim, dstate, state_dtype.itemsize)
    parts = triton.cdiv(dim, tile.program_rows)
    per_request = layers * num_heads * parts
    lanes = max(1, min(batch, tile.programs // per_request))
    item = input_dtype.itemsize
    aligned = (dim * dstate * state_dtype.itemsize) % 16 == 0 and (dim * item) % 16 == 0 and (dstate * item) % 16 == 0
    _materialize[(lanes * per_request,)](
        state_ptrs, state_slot_strides, x_cache_ptrs, x_cache_slot_strides, B_cache_ptrs, B_cache_slot_strides,
        dt_cache_ptrs, dt_cache_slot_strides, A_ptrs, state_scale_ptrs, state_scale_slot_strides,
        src_slots, dst_slots, ring_start, replay_prefix_len, active_request_indices, rand_seed,
        batch, layers, num_heads, heads_per_group, ring_buffer_len, pad_slot_id, lanes,
        P=dim, N=dstate, NP=state_columns(dstate), WP=window_rows(max_window), BP=tile.program_rows,
        FOLD_ROWS=tile.fold_rows, STAGES=tile.stages, LIST_BLOCK=min(1024, next_power_of_2(batch)),
        STATE=STORAGE[kind], INPUT=DTYPES[input_dtype], A_TYPE=DTYPES[matrixA_dtype], KIND=kind,
        OPERAND=operand_dtype(input_dtype), ROUNDS=0 if rand_seed is None else philox_rounds, ALIGNED=aligned,
        num_warps=tile.warps,
    )  # fmt: skip
