"""``replayssm_materialize`` in one launch over all requests, layers and heads, through tables of pointers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.kernels import ring_row
from replayssm.mamba.configs import materialize_tile, next_power_of_2, state_columns, state_planes, window_rows
from replayssm.mamba.kernels.common import DTYPES, KINDS, STORAGE, architecture, operand_dtype
from replayssm.mamba.kernels.rounding import layer_seed
from replayssm.mamba.kernels.window import fold_rows, fold_weights, load, planes, store, weighted


@triton.jit
def _base(pointers, layer, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Address of one layer's storage."""
    pointer = tl.load(pointers + layer).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _stride(strides, layer, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr = 1):
    """Elements from one slot to the next in one layer's storage, as int64; each holds COLUMNS of those in the table."""
    stride = tl.load(strides + layer)
    if COLUMNS > 1:  # by 1 the hint below would vanish together with the division
        stride //= COLUMNS
    return tl.multiple_of(stride, 128 // DTYPE.primitive_bitwidth) if ALIGNED else stride


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
    PLANES: tl.constexpr, COPY_ROWS: tl.constexpr, STAGES: tl.constexpr, LIST_BLOCK: tl.constexpr, STATE: tl.constexpr,
    INPUT: tl.constexpr, A_TYPE: tl.constexpr, KIND: tl.constexpr, OPERAND: tl.constexpr, ROUNDS: tl.constexpr,
    ALIGNED: tl.constexpr, ARCH: tl.constexpr,
):  # fmt: skip
    """Copy or fold BP rows of one head of one layer, for every ``lanes``-th request that is listed."""
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
    # A state's row is NM elements of the type STATE: its columns, or words of four of them.
    NM: tl.constexpr = N // PLANES
    m = tl.arange(0, NP // PLANES)
    m_in = m < NM
    # What depends on the layer alone is asked for first, so that fewer loads wait for one another.
    states = _base(state_ptrs, layer, STATE, ALIGNED) + head * (P * NM) + p_first * NM
    state_stride = _stride(state_strides, layer, STATE, ALIGNED, PLANES)
    x_rings = _base(x_ptrs, layer, INPUT, ALIGNED) + head * P * ring_len + p_first
    x_stride = _stride(x_strides, layer, INPUT, ALIGNED)
    B_rings = _base(B_ptrs, layer, INPUT, ALIGNED) + head // heads_per_group * N * ring_len
    B_stride = _stride(B_strides, layer, INPUT, ALIGNED)
    dt_rings = _base(dt_ptrs, layer, tl.float32, False) + head * ring_len
    dt_stride = _stride(dt_strides, layer, tl.float32, False)
    a = tl.load(_base(A_ptrs, layer, A_TYPE, False) + head + tl.arange(0, 1)).to(tl.float32)
    if SCALED:
        scales = _base(scale_ptrs, layer, tl.float32, False) + head * P + p_first
        scale_stride = _stride(scale_strides, layer, tl.float32, False)
    src_slots += layer.to(tl.int64) * batch
    dst_slots += layer.to(tl.int64) * batch
    seed = tl.full((), 0, tl.int64)
    if ROUNDS > 0:
        seed = layer_seed(tl.load(rand_seed), layer)
    count = _active_count(active, batch, LIST_BLOCK)
    if lane >= count:
        return
    # The entry after this one is looked up while this one is worked on.
    request = tl.load(active + lane)
    after = tl.load(active + tl.minimum(lane + lanes, count - 1))
    next_src = tl.load(src_slots + request).to(tl.int64)
    next_dst = tl.load(dst_slots + request).to(tl.int64)
    next_rows = tl.load(prefix_len + request)
    next_start = tl.load(ring_start + request)
    for entry in range(lane, count, lanes):
        src, dst, rows, start = next_src, next_dst, next_rows, next_start
        request = after
        after = tl.load(active + tl.minimum(entry + 2 * lanes, count - 1))
        next_src = tl.load(src_slots + request).to(tl.int64)
        next_dst = tl.load(dst_slots + request).to(tl.int64)
        next_rows = tl.load(prefix_len + request)
        next_start = tl.load(ring_start + request)
        skip = (src < 0) | (dst < 0) | (src == pad_slot_id) | (dst == pad_slot_id)
        if not skip:
            source = states + src * state_stride
            target = states + dst * state_stride
            if SCALED:
                scale_source = scales + src * scale_stride
                scale_target = scales + dst * scale_stride
            if rows == 0:
                for block in tl.range(0, BP, COPY_ROWS, num_stages=1):
                    p = block + tl.arange(0, COPY_ROWS)
                    p_in = p < P - p_first
                    mask = p_in[:, None] & m_in[None, :]
                    at = p[:, None] * NM + m[None, :]
                    store(target + at, load(source + at, mask, MASKED), mask, MASKED)
                    if SCALED:
                        store(scale_target + p, load(scale_source + p, p_in, MASKED), p_in, MASKED)
            else:
                x = x_rings + src * x_stride
                B = B_rings + src * B_stride
                dt = dt_rings + src * dt_stride
                ring = ring_row(start, w, ring_len)
                live = w < rows
                dt_rows = tl.load(dt + ring, mask=live, other=0.0)
                B_rows = tl.load(B + ring[:, None] * N + n[None, :], mask=live[:, None] & n_in[None, :], other=0.0)
                B_planes = planes(B_rows, PLANES)
                decay = 0.0
                weights = tl.zeros((WP,), tl.float32)
                for block in tl.range(0, BP, FOLD_ROWS, num_stages=STAGES):
                    p = tl.arange(0, FOLD_ROWS)
                    p_in = block + p < P - p_first
                    mask = p_in[:, None] & m_in[None, :]
                    at = block * NM + p[:, None] * NM + m[None, :]
                    codes = load(source + at, mask, MASKED)
                    scale = tl.full((FOLD_ROWS,), 1.0, tl.float32)
                    if SCALED:
                        scale = load(scale_source + block + p, p_in, MASKED)
                    x_at = x + block + ring[:, None] * P + p[None, :]
                    x_rows = tl.load(x_at, mask=live[:, None] & p_in[None, :], other=0.0)
                    if block == 0:
                        # Here rather than before the loop, so that dt is waited for when the states are under way.
                        decay, weights = fold_weights(dt_rows[None, :], a, rows)
                        decay, weights = tl.sum(decay, 0), tl.sum(weights, 0)  # of the one head
                    _, codes, scale = fold_rows(
                        codes, scale, weighted(x_rows, weights, OPERAND), B_planes, decay, seed, dst, head,
                        p_first + block + p, NP, KIND, ROUNDS, OPERAND, ARCH,
                    )  # fmt: skip
                    store(target + at, codes, mask, MASKED)
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
    plane_count = state_planes(dstate, state_dtype.itemsize) if aligned else 1
    _materialize[(lanes * per_request,)](
        state_ptrs, state_slot_strides, x_cache_ptrs, x_cache_slot_strides, B_cache_ptrs, B_cache_slot_strides,
        dt_cache_ptrs, dt_cache_slot_strides, A_ptrs, state_scale_ptrs, state_scale_slot_strides,
        src_slots, dst_slots, ring_start, replay_prefix_len, active_request_indices, rand_seed,
        batch, layers, num_heads, heads_per_group, ring_buffer_len, pad_slot_id, lanes,
        P=dim, N=dstate, NP=state_columns(dstate), WP=window_rows(max_window), BP=tile.program_rows,
        FOLD_ROWS=tile.fold_rows, PLANES=plane_count, COPY_ROWS=tile.copy_rows, STAGES=tile.stages,
        LIST_BLOCK=min(1024, next_power_of_2(batch)), STATE=STORAGE[kind] if plane_count == 1 else tl.int32,
        INPUT=DTYPES[input_dtype], A_TYPE=DTYPES[matrixA_dtype], KIND=kind, OPERAND=operand_dtype(input_dtype),
        ROUNDS=0 if rand_seed is None else philox_rounds, ALIGNED=aligned,
        ARCH=architecture(state_ptrs.device), num_warps=tile.warps, maxnreg=tile.registers,
    )  # fmt: skip
