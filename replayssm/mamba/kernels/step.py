"""``checkpointing_ssu`` in one launch: a program handles some heads of one request, or some rows of one head.

History and new tokens form one window, so that a step that does not flush is a single scan over at most ``window`` rows
on top of the checkpoint. A step that flushes folds the history first and is left with the new tokens as its window. The
branch is taken per program on a scalar, so a batch may mix both.
"""

import triton
import triton.language as tl
from torch import Tensor

from replayssm.kernels import held, ring_row
from replayssm.mamba.configs import (
    next_power_of_2,
    requests_in_order,
    state_columns,
    state_planes,
    step_tile,
    window_rows,
)
from replayssm.mamba.kernels.common import KINDS, architecture, in_words, operand_dtype, raw
from replayssm.mamba.kernels.order import turn
from replayssm.mamba.kernels.outputs import add_rows, of_head, skip_of, store_outputs, to_columns, window_decays
from replayssm.mamba.kernels.read import read_state, state_operand
from replayssm.mamba.kernels.window import (
    fold_rows,
    fold_weights,
    load,
    planes,
    store,
    turned,
    weighted,
)


@triton.jit
def _processed(dt, bias, dt_min, dt_max, SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr):
    dt = dt + bias
    if SOFTPLUS:
        u = tl.exp(tl.minimum(dt, 20.0))
        w = 1.0 + u
        # log1p: the quotient corrects what rounding 1 + u lost.
        small = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
        # NaN stays NaN: the minimum above makes a number of it.
        dt = tl.where(dt <= 20.0, small, dt)
    if LIMIT:
        dt = tl.maximum(dt, dt_min, propagate_nan=tl.PropagateNan.ALL)
        dt = tl.minimum(dt, dt_max, propagate_nan=tl.PropagateNan.ALL)
    return dt


@triton.jit
def _numbers(vector, heads, stride):
    """The heads' entries in fp32, zero where there is no vector."""
    if vector is None:
        return tl.zeros(heads.shape, tl.float32)
    else:
        return tl.load(vector + heads * stride).to(tl.float32)


@triton.jit
def _window_rows(ring, ring_rows, s_ring: tl.constexpr, new, s_new, columns, columns_in, old, count):
    """Rows of the window ``[WP, columns]``: ``old`` rows of a ring, new tokens up to row ``count``, zeros."""
    w = tl.arange(0, ring_rows.shape[0])
    is_new = (w >= old) & (w < count)
    ring_at = ring + ring_rows[:, None] * s_ring + columns[None, :]
    new_at = new + (w - old)[:, None] * s_new + columns[None, :]
    from_ring = tl.load(ring_at, mask=(w < old)[:, None] & columns_in[None, :], other=0.0)
    from_new = tl.load(new_at, mask=is_new[:, None] & columns_in[None, :], other=0.0)
    return tl.where(is_new[:, None], from_new, from_ring)


@triton.jit(do_not_specialize=["batch"])
def _step(
    state, state_to, state_scale, x_cache, B_cache, dt_cache, out, ring_start, num_live, x, dt, A, B, C, D, z, dt_bias,
    slots, cu_seqlens, rand_seed,
    s_state, s_scale, s_x_cache, s_B_cache, s_dt_cache, s_start, s_live,
    s_out_b, s_out_t, s_x_b, s_x_t, s_dt_b, s_dt_t, s_dt_h, s_A, s_B_b, s_B_t, s_C_b, s_C_t, s_D, s_z_b, s_z_t, s_bias,
    s_slots, seq_len, ring_len, window, pad_slot_id, dt_min, dt_max, batch,
    HEADS: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, WP: tl.constexpr,
    TP: tl.constexpr, TK: tl.constexpr, XP: tl.constexpr, BP: tl.constexpr, BLOCKS: tl.constexpr, LISTED: tl.constexpr,
    BETWEEN: tl.constexpr, FOLDS: tl.constexpr, PLANES: tl.constexpr, WORDS: tl.constexpr,
    FOLD_ROWS: tl.constexpr, STAGES: tl.constexpr, FOLD_STAGES: tl.constexpr, KIND: tl.constexpr,
    OPERAND: tl.constexpr, SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr, ROUNDS: tl.constexpr, ARCH: tl.constexpr,
):  # fmt: skip
    """Score a request's new tokens in BLOCKS blocks of BP rows, fold its ring into them first when it is full.

    Tiles have NP columns of a state, WP rows of the window, TK new tokens, XP rows of a head; what a product makes of
    new tokens has TP columns. The cut of a fold (FOLDS, FOLD_ROWS, FOLD_STAGES) and STAGES are told of by
    ``configs.Tile``, LISTED and BETWEEN by ``order.turn``, PLANES and WORDS by ``window.planes``.
    """
    HELD: tl.constexpr = ARCH > 0 and BLOCKS == 1
    PARTS: tl.constexpr = (P + BP - 1) // BP  # blocks of a head
    OWN: tl.constexpr = (BLOCKS + PARTS - 1) // PARTS  # heads that a program touches, all of one group
    DIGITS: tl.constexpr = 2 if KIND == "int8" and tl.bfloat16 == OPERAND and NP >= 32 and TK <= 4 else 1
    SCALED: tl.constexpr = KIND == "int8" or KIND == "fp8"
    MASKED: tl.constexpr = (P % BP != 0) or (NP != N)
    PROGRAMS: tl.constexpr = HEADS * PARTS // BLOCKS  # of a request
    request = tl.program_id(0) // PROGRAMS
    if LISTED > 0:
        request = turn(
            request, batch, slots, s_slots, pad_slot_id, num_live, s_live, cu_seqlens, seq_len, window, LISTED, BETWEEN
        )  # fmt: skip
    request = request.to(tl.int64)
    first_block = tl.program_id(0) % PROGRAMS * BLOCKS
    head = first_block // PARTS
    part = first_block % PARTS
    group = head // GROUP
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
    # A column of a product with new tokens is one of them, or one digit of it; what needs no digits has them all zero
    # but the first.
    t = tl.arange(0, TP) // DIGITS
    t_in = (t < seq_len) & (tl.arange(0, TP) % DIGITS == 0)
    h = tl.arange(0, OWN)
    n_in = n < N
    # Every load is written as early as its address is known, so that a small batch waits for few of them in turn.
    c_rows = tl.load(C + t[:, None] * s_C_t + n[None, :], mask=t_in[:, None] & n_in[None, :], other=0.0)
    a = _numbers(A, head + h, s_A)
    bias = _numbers(dt_bias, head + h, s_bias)
    skip = _numbers(D, head + h, s_D)
    j = tl.arange(0, TK)
    r = tl.arange(0, OWN * XP)  # rows of the own heads, one head after the other
    j_in = j < seq_len
    x_mask = j_in[:, None] & (part * BP + r % XP < P)[None, :]
    x_new = tl.load(x + j[:, None] * s_x_t + (r // XP * P + r % XP)[None, :], mask=x_mask, other=0.0)
    if BLOCKS == 1:
        dt_tokens = tl.load(dt + h[:, None] * s_dt_h + j[None, :] * s_dt_t, mask=j_in[None, :], other=0.0)
        dt_tokens = _processed(dt_tokens.to(tl.float32), bias[:, None], dt_min, dt_max, SOFTPLUS, LIMIT)
    if (slot < 0) | (slot == pad_slot_id) | (seq_len <= 0):
        return
    state += slot * s_state + head * (P * N) + part * (BP * N)
    # The same address under another name: addresses of loads would be kept in registers for the stores.
    state_to += slot * s_state + head * (P * N) + part * (BP * N)
    live = tl.load(num_live + slot * s_live)
    start = tl.load(ring_start + slot * s_start)
    x_cache += slot * s_x_cache + head * P * ring_len + part * BP
    B_cache += slot * s_B_cache + group * N * ring_len
    dt_cache += slot * s_dt_cache + head * ring_len
    if SCALED:
        state_scale += slot * s_scale + row0
    if BLOCKS == 1:
        p = tl.arange(0, BP)
        early = load(state + p[:, None] * N + n[None, :], (part * BP + p < P)[:, None] & n_in[None, :], MASKED)
    flush = (live > 0) & (live + seq_len > window)
    old = tl.where(flush, 0, live)  # rows of the window before the new tokens
    is_row = w < old + seq_len
    is_new = is_row & (w >= old)
    is_live = w < live
    ring = ring_row(start, w, ring_len)
    ring_seen = ring_row(start, live - old + w, ring_len)  # where the window's rows lie, once the new ones are written
    B_rows = _window_rows(B_cache, ring, N, B, s_B_t, n, n_in, old, old + seq_len)
    dt_old = tl.load(dt_cache + h[:, None] * ring_len + ring[None, :], mask=is_live[None, :], other=0.0)
    if BLOCKS == 1:
        early_x = _window_rows(x_cache, ring, P, x, s_x_t, p, part * BP + p < P, old, old + seq_len)
        is_token = (w[:, None] == old + j[None, :]) & j_in[None, :]
        dt_new = tl.sum(tl.where(is_token[None, :, :], dt_tokens[:, None, :], 0.0), 2)
    else:
        dt_new = tl.load(dt + h[:, None] * s_dt_h + (w - old)[None, :] * s_dt_t, mask=is_new[None, :], other=0.0)
        dt_new = _processed(dt_new.to(tl.float32), bias[:, None], dt_min, dt_max, SOFTPLUS, LIMIT)
    tl.store(dt_cache + h[:, None] * ring_len + ring_seen[None, :], dt_new, mask=is_new[None, :])
    dt_rows = tl.where(is_new[None, :], dt_new, tl.where((w < old)[None, :], dt_old, 0.0))
    c_rows = held(c_rows, HELD)
    c = tl.trans(c_rows).to(OPERAND)
    c_state, units = state_operand(c, C, s_C_t, seq_len, n_in, KIND, OPERAND, ARCH, DIGITS)
    products = tl.dot(held(B_rows, HELD).to(OPERAND), c, input_precision="tf32x3")
    if first_block % (GROUP * PARTS) == 0:
        tl.store(B_cache + ring_seen[:, None] * N + n[None, :], B_rows, mask=is_new[:, None] & n_in[None, :])
    x_to = x_cache + ring_row(start, live + j, ring_len)[:, None] * P + (r // XP * (P * ring_len) + r % XP)[None, :]
    tl.store(x_to, x_new, mask=x_mask)
    if BLOCKS > 1:
        tl.debug_barrier()  # the loops read the new rows of x where they have just been written
    row_decays, decays = window_decays(dt_rows, a, old, seq_len, TK)
    pick = (t_in[None, :] & (w[:, None] == old + t[None, :])).to(OPERAND)
    # A fold needs the whole block in registers, so it may take fewer rows at a time.
    if flush:
        seed = tl.full((), 0, tl.int64)
        if ROUNDS > 0:
            seed = tl.load(rand_seed)
        B_old = tl.load(B_cache + ring[:, None] * N + n[None, :], mask=is_live[:, None] & n_in[None, :], other=0.0)
        keeps, weights = fold_weights(dt_old, a, live)
        B_planes = planes(B_old, PLANES if WORDS else 1)
        c_planes = turned(planes(c_rows, PLANES)) if PLANES > 1 else (c,)
        WORD: tl.constexpr = tl.int32 if WORDS else state.dtype.element_ty
        words, words_to = state.to(tl.pointer_type(WORD)), state_to.to(tl.pointer_type(WORD))
        NW: tl.constexpr = N // 4 if WORDS else N
        m = tl.arange(0, NP // 4 if WORDS else NP)
        m_in = m < NW
        q = tl.arange(0, FOLD_ROWS)
        TURNS: tl.constexpr = BP // (FOLD_ROWS * FOLDS)  # rounds of the loop for a block
        for step in tl.range(0, BLOCKS * TURNS, num_stages=FOLD_STAGES):
            i = step // (TURNS * PARTS) if BLOCKS > 1 else 0
            first_row = step % (TURNS * PARTS) * (FOLD_ROWS * FOLDS) if BLOCKS > 1 else step * (FOLD_ROWS * FOLDS)
            keep = of_head(keeps, i)
            weights_i = of_head(weights, i)
            scores = (to_columns(of_head(row_decays, i), TP, DIGITS) * products).to(OPERAND)
            decay = to_columns(of_head(decays, i)[None, :], TP, DIGITS)
            skip_i = skip_of(skip, D, head, s_D, i, BLOCKS)
            for fold in tl.static_range(FOLDS):
                at = first_row + fold * FOLD_ROWS  # row, from the head's first
                q_in = part * BP + at + q < P
                x_old_at = x_cache + i * P * ring_len + at + ring[:, None] * P + q[None, :]
                x_old = tl.load(x_old_at, mask=is_live[:, None] & q_in[None, :], other=0.0)
                x_rows_at = x + i * P + at + w[:, None] * s_x_t + q[None, :]
                x_rows = tl.load(x_rows_at, mask=is_row[:, None] & q_in[None, :], other=0.0)
                x_weighted = weighted(x_old, weights_i, OPERAND)
                y = tl.zeros((FOLD_ROWS, TP), tl.float32)
                y = add_rows(y, x_rows, scores, pick, skip_i, OPERAND, D is not None)
                # The state is waited for here, behind the exchanges between threads above.
                codes_at = words + i * (P * NW) + at * NW + q[:, None] * NW + m[None, :]
                codes = load(codes_at, q_in[:, None] & m_in[None, :], MASKED)
                scale = tl.full((FOLD_ROWS,), 1.0, tl.float32)
                if SCALED:
                    scale = load(state_scale + i * P + at + q, q_in, MASKED)
                folded, codes, scale = fold_rows(
                    codes, scale, x_weighted, B_planes, keep, seed, slot, head + i, part * BP + at + q,
                    NP, KIND, ROUNDS, OPERAND, ARCH,
                )  # fmt: skip
                codes_to = words_to + i * (P * NW) + at * NW + q[:, None] * NW + m[None, :]
                store(codes_to, codes, q_in[:, None] & m_in[None, :], MASKED)
                if SCALED:
                    store(state_scale + i * P + at + q, scale, q_in, MASKED)
                if PLANES > 1 and not WORDS:
                    folded = planes(folded[0], PLANES)
                from_state = tl.dot(folded[0].to(OPERAND), c_planes[0].to(OPERAND), input_precision="tf32x3")
                for plane in tl.static_range(1, PLANES):
                    operand = folded[plane].to(OPERAND)
                    from_state = tl.dot(operand, c_planes[plane].to(OPERAND), from_state, input_precision="tf32x3")
                y += from_state * decay
                z_at = z if z is None else z + i * P + at
                store_outputs(y, z_at, out + i * P + at, q, q_in, seq_len, s_z_t, s_out_t, DIGITS)
    else:
        p = tl.arange(0, BP)
        for step in tl.range(0, BLOCKS, num_stages=STAGES):
            i = step // PARTS if BLOCKS > 1 else 0
            at = step % PARTS * BP if BLOCKS > 1 else 0
            p_in = part * BP + at + p < P
            if BLOCKS == 1:
                codes = early
                x_rows = early_x
            else:
                codes_at = state + i * (P * N) + at * N + p[:, None] * N + n[None, :]
                codes = load(codes_at, p_in[:, None] & n_in[None, :], MASKED)
                x_rows_at = x_cache + i * P * ring_len + at + ring_seen[:, None] * P + p[None, :]
                x_rows = tl.load(x_rows_at, mask=is_row[:, None] & p_in[None, :], other=0.0)
            # Codes that become wider operands are not held: by what it sees behind a load the compiler groups the terms
            # of the sum that the matrix unit adds up at once, and every tile shall group them alike.
            HELD_CODES: tl.constexpr = HELD and (not SCALED or c_state.dtype == tl.int8)
            y = read_state(held(codes, HELD_CODES), c_state, units, TP, KIND, OPERAND, ARCH, DIGITS)
            y *= to_columns(of_head(decays, i)[None, :], TP, DIGITS)
            if SCALED:
                y *= load(state_scale + i * P + at + p, p_in, MASKED)[:, None]
            scores = to_columns(of_head(row_decays, i), TP, DIGITS) * products
            y = add_rows(
                y, held(x_rows, HELD), scores, pick, skip_of(skip, D, head, s_D, i, BLOCKS), OPERAND, D is not None
            )  # fmt: skip
            z_at = z if z is None else z + i * P + at
            store_outputs(y, z_at, out + i * P + at, p, p_in, seq_len, s_z_t, s_out_t, DIGITS)


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
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    _, nheads, P, N = state.shape
    if batch == 0 or state.numel() == 0:
        return
    heads_per_group = nheads // B.shape[2]
    tile = step_tile(P, N, state.element_size(), x.element_size(), seq_len, window, heads_per_group, batch * nheads)
    blocks = nheads * triton.cdiv(P, tile.rows)
    plane_count = state_planes(N, state.element_size())
    listed, between = requests_in_order(batch, batch * nheads, state.element_size(), tile.blocks, seq_len)
    _step[(batch * blocks // tile.blocks,)](
        raw(state), raw(state), state_scale, x_cache, B_cache, dt_cache, out, ring_start, prev_num_accepted_tokens,
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
        seq_len, x_cache.shape[2], window, pad_slot_id, dt_min, dt_max, batch,
        HEADS=nheads, GROUP=heads_per_group, P=P, N=N, NP=state_columns(N), WP=window_rows(max(window, seq_len)),
        TP=max(8, next_power_of_2(seq_len)), TK=next_power_of_2(seq_len),
        XP=tile.rows if tile.blocks == 1 else next_power_of_2(P), BP=tile.rows, BLOCKS=tile.blocks,
        LISTED=listed, BETWEEN=between, FOLDS=tile.folds, PLANES=plane_count, WORDS=plane_count > 1 and in_words(state),
        FOLD_ROWS=tile.fold_rows, STAGES=tile.stages, FOLD_STAGES=tile.fold_stages,
        KIND=KINDS[state.dtype], OPERAND=operand_dtype(x.dtype), SOFTPLUS=dt_softplus,
        LIMIT=dt_min > 0.0 or dt_max != float("inf"), ROUNDS=0 if rand_seed is None else philox_rounds,
        ARCH=architecture(x.device), num_warps=tile.warps, maxnreg=tile.registers,
    )  # fmt: skip
