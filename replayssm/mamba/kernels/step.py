"""``checkpointing_ssu`` in one launch: a program handles some rows of one head of one request.

History and new tokens form one window, so that a step that does not flush is a single scan over at most ``window`` rows
on top of the checkpoint. A step that flushes folds the history first and is left with the new tokens as its window. The
branch is taken per program on a scalar, so a batch may mix both.
"""

import triton
import triton.language as tl
from torch import Tensor

from replayssm.mamba.configs import next_power_of_2, state_columns, step_tile, window_rows
from replayssm.mamba.kernels.common import KINDS, assembly_available, operand_dtype, raw
from replayssm.mamba.kernels.rounding import decode_operand
from replayssm.mamba.kernels.window import fold_rows, fold_weights, load, ring_row, settle, store


@triton.jit
def _processed(dt, bias, dt_min, dt_max, SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr):
    dt = dt + bias
    if SOFTPLUS:
        u = tl.exp(tl.minimum(dt, 20.0))
        w = 1.0 + u
        # log1p: the quotient corrects what rounding 1 + u lost.
        small = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
        dt = tl.where(dt > 20.0, dt, small)
    if LIMIT:
        dt = tl.minimum(tl.maximum(dt, dt_min), dt_max)
    return dt


@triton.jit
def _number(vector, head, stride):
    """The head's entry in fp32, zero where there is no vector."""
    if vector is None:
        return 0.0
    else:
        return tl.load(vector + head * stride).to(tl.float32)


@triton.jit
def _new_dt(dt, at, at_in, bias, dt_min, dt_max, SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr):
    """Processed dt of the new tokens at the offsets ``at``, zero outside ``at_in``."""
    value = tl.load(dt + at, mask=at_in, other=0.0).to(tl.float32)
    return tl.where(at_in, _processed(value, bias, dt_min, dt_max, SOFTPLUS, LIMIT), 0.0)


@triton.jit
def _add_new_token(y, x_new, product, dt, a, skip):
    """``y`` [rows, TP] decayed to the one new token, plus what that and the skip contribute.

    All columns get the token's contribution: the first is the token, and the others are not stored.
    """
    return y * tl.exp(a * dt) + (x_new.to(tl.float32) * (skip + product * dt))[:, None]


@triton.jit
def _add_new_tokens(
    y, x_new, products, identity, dt_rows, dt_tokens, a, skip, seq_len, OPERAND: tl.constexpr, HAS_D: tl.constexpr
):  # fmt: skip
    """``y`` [rows, TP] decayed to the new tokens, plus what these contribute and the skip.

    ``dt_rows`` [TK] and ``dt_tokens`` [TP] hold the same numbers, one for each axis of the scores.
    """
    TK: tl.constexpr = products.shape[0]
    TP: tl.constexpr = products.shape[1]
    j = tl.arange(0, TK)
    t = tl.arange(0, TP)
    sums = tl.cumsum(dt_rows, 0)
    total = tl.cumsum(dt_tokens, 0)
    seen = (j[:, None] <= t[None, :]) & (t < seq_len)[None, :]
    scores = products * tl.where(seen, tl.exp(a * (total[None, :] - sums[:, None])) * dt_rows[:, None], 0.0)
    x_new = tl.trans(x_new).to(OPERAND)
    y = tl.dot(x_new, scores.to(OPERAND), y * tl.exp(a * total)[None, :], input_precision="tf32x3")
    if HAS_D:
        # x by token and in y's layout: an exact product with the identity, cheaper than another load.
        y += tl.dot(x_new, identity, input_precision="tf32x3") * skip
    return y


@triton.jit
def _write(y, z, out, p, p_in, seq_len, s_z_t, s_out_t):
    """Gate and store ``y`` [rows, tokens]."""
    t = tl.arange(0, y.shape[1])
    mask = p_in[:, None] & (t < seq_len)[None, :]
    if z is not None:
        gate = tl.load(z + t[None, :] * s_z_t + p[:, None], mask=mask, other=0.0).to(tl.float32)
        y *= gate / (1.0 + tl.exp(-gate))
    tl.store(out + t[None, :] * s_out_t + p[:, None], y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _step(
    state, state_scale, x_cache, B_cache, dt_cache, out, ring_start, num_live, x, dt, A, B, C, D, z, dt_bias,
    slots, cu_seqlens, rand_seed,
    s_state, s_scale, s_x_cache, s_B_cache, s_dt_cache, s_start, s_live,
    s_out_b, s_out_t, s_x_b, s_x_t, s_dt_b, s_dt_t, s_dt_h, s_A, s_B_b, s_B_t, s_C_b, s_C_t, s_D, s_z_b, s_z_t, s_bias,
    s_slots, seq_len, nheads, heads_per_group, ring_len, window, pad_slot_id, dt_min, dt_max,
    P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, WP: tl.constexpr, TP: tl.constexpr, TK: tl.constexpr,
    BP: tl.constexpr, BLOCKS: tl.constexpr, FOLD_ROWS: tl.constexpr, STAGES: tl.constexpr, ONE: tl.constexpr,
    KIND: tl.constexpr, OPERAND: tl.constexpr, SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr, ROUNDS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    SETTLE: tl.constexpr = ASM and BLOCKS == 1
    PARTS: tl.constexpr = (P + BP - 1) // BP  # blocks of a head
    HEADS: tl.constexpr = (BLOCKS + PARTS - 1) // PARTS  # heads that a program touches, all of one group
    SCALED: tl.constexpr = KIND == "int8" or KIND == "fp8"
    MASKED: tl.constexpr = (P % BP != 0) or (NP != N)
    per_request = nheads * PARTS // BLOCKS
    request = (tl.program_id(0) // per_request).to(tl.int64)
    first_block = tl.program_id(0) % per_request * BLOCKS
    head = first_block // PARTS
    part = first_block % PARTS
    group = head // heads_per_group
    slot = request
    if slots is not None:
        slot = tl.load(slots + request * s_slots).to(tl.int64)
    outer = request  # index of the row of x that holds the request's tokens, the first of which is token `first`
    first = request * 0
    if cu_seqlens is not None:
        begin = tl.load(cu_seqlens + request)
        seq_len = tl.load(cu_seqlens + request + 1) - begin
        outer = first
        first = begin.to(tl.int64)
    # Every pointer is moved to the program's own rows, so that what is left are offsets known when compiling.
    row0 = head * P + part * BP
    x += outer * s_x_b + first * s_x_t + row0
    out += outer * s_out_b + first * s_out_t + row0
    if z is not None:
        z += outer * s_z_b + first * s_z_t + row0
    dt += outer * s_dt_b + first * s_dt_t + head * s_dt_h
    B += outer * s_B_b + first * s_B_t + group * N
    C += outer * s_C_b + first * s_C_t + group * N
    n = tl.arange(0, NP)
    w = tl.arange(0, WP)
    t = tl.arange(0, TP)
    j = tl.arange(0, TK)
    n_in = n < N
    j_in = j < seq_len
    # Every load is written as early as its address is known, so that a small batch waits for few of them in turn.
    c = tl.load(C + t[:, None] * s_C_t + n[None, :], mask=(t < seq_len)[:, None] & n_in[None, :], other=0.0)
    B_new = tl.load(B + j[:, None] * s_B_t + n[None, :], mask=j_in[:, None] & n_in[None, :], other=0.0)
    if (slot < 0) | (slot == pad_slot_id) | (seq_len <= 0):
        return
    live = tl.load(num_live + slot * s_live)
    start = tl.load(ring_start + slot * s_start)
    state += slot * s_state + head * (P * N) + part * (BP * N)
    x_cache += slot * s_x_cache + head * P * ring_len + part * BP
    B_cache += slot * s_B_cache + group * N * ring_len
    dt_cache += slot * s_dt_cache + head * ring_len
    if SCALED:
        state_scale += slot * s_scale + row0
    if BLOCKS == 1:
        p = tl.arange(0, BP)
        early = load(state + p[:, None] * N + n[None, :], (part * BP + p < P)[:, None] & n_in[None, :], MASKED)
    c = tl.trans(settle(c, SETTLE)).to(OPERAND)
    flush = (live > 0) & (live + seq_len > window)
    is_live = w < live
    ring = ring_row(start, w, ring_len)
    ring_new = ring_row(start, live + j, ring_len)
    B_old = tl.load(B_cache + ring[:, None] * N + n[None, :], mask=is_live[:, None] & n_in[None, :], other=0.0)
    h = tl.arange(0, HEADS)
    new_bias = 0.0
    if dt_bias is not None:
        new_bias = tl.load(dt_bias + (head + h) * s_bias).to(tl.float32)[:, None]
    dt_at = h[:, None] * s_dt_h + j[None, :] * s_dt_t
    new_dt = _new_dt(dt, dt_at, j_in[None, :], new_bias, dt_min, dt_max, SOFTPLUS, LIMIT)
    tl.store(dt_cache + h[:, None] * ring_len + ring_new[None, :], new_dt, mask=j_in[None, :])
    products_new = tl.dot(settle(B_new, SETTLE).to(OPERAND), c, input_precision="tf32x3")
    identity = (j[:, None] == t[None, :]).to(OPERAND)
    product_new = 0.0
    if ONE:
        first_only = (j[:, None] == 0) & (t[None, :] == 0)
        product_new = tl.sum(tl.sum(tl.where(first_only, products_new, 0.0), 1), 0)
    if first_block % (heads_per_group * PARTS) == 0:
        tl.store(B_cache + ring_new[:, None] * N + n[None, :], B_new, mask=j_in[:, None] & n_in[None, :])
    # A fold needs the whole block in registers, so it takes fewer rows at a time.
    if flush:
        seed = tl.full((), 0, tl.int64)
        if ROUNDS > 0:
            seed = tl.load(rand_seed)
        FOLDS: tl.constexpr = BP // FOLD_ROWS
        q = tl.arange(0, FOLD_ROWS)
        for step in tl.range(0, BLOCKS * FOLDS, num_stages=STAGES):
            i = step // (FOLDS * PARTS) if BLOCKS > 1 else 0
            at = step % (FOLDS * PARTS) * FOLD_ROWS if BLOCKS > 1 else step * FOLD_ROWS  # row, from the head's first
            q_in = part * BP + at + q < P
            codes_at = state + i * (P * N) + at * N + q[:, None] * N + n[None, :]
            codes = load(codes_at, q_in[:, None] & n_in[None, :], MASKED)
            scale = tl.full((FOLD_ROWS,), 1.0, tl.float32)
            if SCALED:
                scale = load(state_scale + i * P + at + q, q_in, MASKED)
            x_cache_at = x_cache + i * P * ring_len + at
            x_old = tl.load(
                x_cache_at + ring[:, None] * P + q[None, :], mask=is_live[:, None] & q_in[None, :], other=0.0
            )
            if ONE:
                x_new = tl.load(x + i * P + at + q, mask=q_in, other=0.0)
            else:
                x_from = x + i * P + at + j[:, None] * s_x_t + q[None, :]
                x_new = tl.load(x_from, mask=j_in[:, None] & q_in[None, :], other=0.0)
            a = _number(A, head + i, s_A)
            bias = _number(dt_bias, head + i, s_bias)
            skip = _number(D, head + i, s_D)
            dt_old = tl.load(dt_cache + i * ring_len + ring, mask=is_live, other=0.0)
            decay, weights = fold_weights(dt_old, a, live, WP)
            folded, codes, scale = fold_rows(
                codes, scale, x_old, weights, B_old, decay, seed, slot, head + i, part * BP + at + q,
                NP, KIND, ROUNDS, OPERAND,
            )  # fmt: skip
            store(codes_at, codes, q_in[:, None] & n_in[None, :], MASKED)
            if SCALED:
                store(state_scale + i * P + at + q, scale, q_in, MASKED)
            if ONE:
                tl.store(x_cache_at + ring_row(start, live, ring_len) * P + q, x_new, mask=q_in)
            else:
                x_to = x_cache_at + ring_new[:, None] * P + q[None, :]
                tl.store(x_to, x_new, mask=j_in[:, None] & q_in[None, :])
            y = tl.dot(folded.to(OPERAND), c, input_precision="tf32x3")
            if ONE:
                dt_one = tl.load(dt + i * s_dt_h).to(tl.float32)
                dt_one = _processed(dt_one, bias, dt_min, dt_max, SOFTPLUS, LIMIT)
                y = _add_new_token(y, x_new, product_new, dt_one, a, skip)
            else:
                dt_rows = _new_dt(dt + i * s_dt_h, j * s_dt_t, j_in, bias, dt_min, dt_max, SOFTPLUS, LIMIT)
                dt_tokens = _new_dt(dt + i * s_dt_h, t * s_dt_t, t < seq_len, bias, dt_min, dt_max, SOFTPLUS, LIMIT)
                y = _add_new_tokens(
                    y, x_new, products_new, identity, dt_rows, dt_tokens, a, skip, seq_len, OPERAND, D is not None
                )
            _write(y, z if z is None else z + i * P + at, out + i * P + at, q, q_in, seq_len, s_z_t, s_out_t)
    else:
        p = tl.arange(0, BP)
        if BLOCKS > 1:
            products = tl.dot(B_old.to(OPERAND), c, input_precision="tf32x3")
        for step in tl.range(0, BLOCKS, num_stages=STAGES):
            i = step // PARTS if BLOCKS > 1 else 0
            at = step % PARTS * BP if BLOCKS > 1 else 0
            p_in = part * BP + at + p < P
            if BLOCKS == 1:
                values = early
            else:
                values_at = state + i * (P * N) + at * N + p[:, None] * N + n[None, :]
                values = load(values_at, p_in[:, None] & n_in[None, :], MASKED)
            x_cache_at = x_cache + i * P * ring_len + at
            x_old = tl.load(
                x_cache_at + ring[:, None] * P + p[None, :], mask=is_live[:, None] & p_in[None, :], other=0.0
            )
            if ONE:
                x_new = tl.load(x + i * P + at + p, mask=p_in, other=0.0)
            else:
                x_from = x + i * P + at + j[:, None] * s_x_t + p[None, :]
                x_new = tl.load(x_from, mask=j_in[:, None] & p_in[None, :], other=0.0)
            a = _number(A, head + i, s_A)
            bias = _number(dt_bias, head + i, s_bias)
            skip = _number(D, head + i, s_D)
            dt_old = tl.load(dt_cache + i * ring_len + ring, mask=is_live, other=0.0)
            decay, weights = fold_weights(dt_old, a, live, WP)
            values = decode_operand(settle(values, SETTLE), KIND, OPERAND, ASM)
            y = tl.dot(values, c, input_precision="tf32x3") * decay
            if SCALED:
                y *= load(state_scale + i * P + at + p, p_in, MASKED)[:, None]
            if BLOCKS == 1:
                products = tl.dot(settle(B_old, SETTLE).to(OPERAND), c, input_precision="tf32x3")
            scores = products * weights[:, None]
            y = tl.dot(tl.trans(settle(x_old, SETTLE)).to(OPERAND), scores.to(OPERAND), y, input_precision="tf32x3")
            if ONE:
                tl.store(x_cache_at + ring_row(start, live, ring_len) * P + p, x_new, mask=p_in)
            else:
                x_to = x_cache_at + ring_new[:, None] * P + p[None, :]
                tl.store(x_to, x_new, mask=j_in[:, None] & p_in[None, :])
            if ONE:
                dt_one = tl.load(dt + i * s_dt_h).to(tl.float32)
                dt_one = _processed(dt_one, bias, dt_min, dt_max, SOFTPLUS, LIMIT)
                y = _add_new_token(y, x_new, product_new, dt_one, a, skip)
            else:
                dt_rows = _new_dt(dt + i * s_dt_h, j * s_dt_t, j_in, bias, dt_min, dt_max, SOFTPLUS, LIMIT)
                dt_tokens = _new_dt(dt + i * s_dt_h, t * s_dt_t, t < seq_len, bias, dt_min, dt_max, SOFTPLUS, LIMIT)
                y = _add_new_tokens(
                    y, x_new, products_new, identity, dt_rows, dt_tokens, a, skip, seq_len, OPERAND, D is not None
                )
            _write(y, z if z is None else z + i * P + at, out + i * P + at, p, p_in, seq_len, s_z_t, s_out_t)


def checkpointing_ssu(
    state: Tensor,
    state_scale: Tensor | None,
    x_cache: Tensor,
    B_cache: Tensor,
    dt_cache: Tensor,
    out: Tensor,
    ring_start: Tensor,
    prev_num_accepted_tokens: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    state_batch_indices: Tensor | None,
    pad_slot_id: int,
    rand_seed: Tensor | None,
    philox_rounds: int,
    cu_seqlens: Tensor | None,
    seq_len: int,
    window: int,
    dt_min: float,
    dt_max: float,
) -> None:
    """See ``replayssm.mamba.checkpointing_ssu``; ``seq_len`` is T and ``window`` the window in force."""
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    _, nheads, P, N = state.shape
    if batch == 0 or state.numel() == 0:
        return
    heads_per_group = nheads // B.shape[2]
    tile = step_tile(P, N, state.element_size(), x.element_size(), seq_len, window, heads_per_group, batch * nheads)
    blocks = nheads * triton.cdiv(P, tile.rows)
    _step[(batch * blocks // tile.blocks,)](
        raw(state), state_scale, x_cache, B_cache, dt_cache, out, ring_start, prev_num_accepted_tokens,
        x, dt, A, B, C, D, z, dt_bias, state_batch_indices, cu_seqlens, rand_seed,
        state.stride(0), 0 if state_scale is None else state_scale.stride(0),
        x_cache.stride(0), B_cache.stride(0), dt_cache.stride(0),
        ring_start.stride(0), prev_num_accepted_tokens.stride(0),
        out.stride(0), out.stride(1), x.stride(0), x.stride(1), dt.stride(0), dt.stride(1), dt.stride(2),
        A.stride(0), B.stride(0), B.stride(1), C.stride(0), C.stride(1),
        0 if D is None else D.stride(0),
        0 if z is None else z.stride(0), 0 if z is None else z.stride(1),
        0 if dt_bias is None else dt_bias.stride(0),
        0 if state_batch_indices is None else state_batch_indices.stride(0),
        seq_len, nheads, heads_per_group, x_cache.shape[2], window, pad_slot_id, dt_min, dt_max,
        P=P, N=N, NP=state_columns(N), WP=window_rows(window), TP=max(8, next_power_of_2(seq_len)),
        TK=window_rows(seq_len),
        BP=tile.rows, BLOCKS=tile.blocks, FOLD_ROWS=tile.fold_rows, STAGES=tile.stages, ONE=seq_len == 1,
        KIND=KINDS[state.dtype], OPERAND=operand_dtype(x.dtype), SOFTPLUS=dt_softplus,
        LIMIT=dt_min > 0.0 or dt_max != float("inf"), ROUNDS=0 if rand_seed is None else philox_rounds,
        ASM=assembly_available(), num_warps=tile.warps, maxnreg=tile.registers,
    )  # fmt: skip
