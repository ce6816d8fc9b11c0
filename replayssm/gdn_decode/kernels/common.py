"""What the kernels of the family share: reading tokens and states, and what launchers need to know."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.delta_rule.kernels import advance, exp, inverse_norm, pick, total
from replayssm.kernels import ring_row

# Arguments that change from call to call, or whose divisors do not matter: one kernel serves all their values.
PLAIN = [
    "s_g_l", "s_g", "s_beta_l", "s_beta", "s_g_ring", "s_beta_ring", "s_start", "s_starts", "s_live",
    "s_slots", "s_sources", "s_targets", "s_counts", "s_track_slots", "s_track_steps", "s_steps", "s_read", "s_write",
    "s_scatter_b", "s_scatter_t", "s_A", "s_a_b", "s_a_t", "s_a_h", "s_bias", "s_b_b", "s_b_t", "s_b_h",
    "HV", "heads_per_key", "ring_len", "window", "batch", "folders", "limit", "pad_slot_id", "null_block_id",
]  # fmt: skip


def stride(tensor: Tensor | None, axis: int) -> int:
    """A stride of a tensor that may be missing."""
    return 0 if tensor is None else tensor.stride(axis)


def can_fetch() -> bool:
    """Whether ``fetch``, which is PTX, can run."""
    return not triton.knobs.runtime.interpret and torch.version.hip is None


@triton.jit
def vector(pointer, s, LANES: tl.constexpr, C: tl.constexpr, count):
    """Quarters ``[L, 1, C]`` of a vector of ``count`` elements, the same for all L; zeros beyond it."""
    c = tl.arange(0, C)[None, None, :] + tl.arange(0, LANES)[:, None, None] * 0
    x0 = tl.load(pointer + c * s, mask=c < count, other=0.0)
    x1 = tl.load(pointer + (c + C) * s, mask=c + C < count, other=0.0)
    x2 = tl.load(pointer + (c + 2 * C) * s, mask=c + 2 * C < count, other=0.0)
    x3 = tl.load(pointer + (c + 3 * C) * s, mask=c + 3 * C < count, other=0.0)
    return x0, x1, x2, x3


@triton.jit
def store_vector(pointer, x0, x1, x2, x3, K: tl.constexpr):
    """Store a vector of K elements, which all L have, once and rounded to the type that is pointed to."""
    C: tl.constexpr = x0.shape[2]
    LANES: tl.constexpr = x0.shape[0]
    DTYPE: tl.constexpr = pointer.dtype.element_ty
    lane = tl.arange(0, LANES)[:, None, None]
    c = tl.arange(0, C)[None, None, :] + lane * 0
    once = lane == 0
    tl.store(pointer + c, x0.to(DTYPE), mask=once & (c < K))
    tl.store(pointer + C + c, x1.to(DTYPE), mask=once & (c + C < K))
    tl.store(pointer + 2 * C + c, x2.to(DTYPE), mask=once & (c + 2 * C < K))
    tl.store(pointer + 3 * C + c, x3.to(DTYPE), mask=once & (c + 3 * C < K))


@triton.jit
def rounded(x0, x1, x2, x3, DTYPE: tl.constexpr):
    """Quarters in fp32, after rounding to a type."""
    return (
        x0.to(DTYPE).to(tl.float32), x1.to(DTYPE).to(tl.float32), x2.to(DTYPE).to(tl.float32),
        x3.to(DTYPE).to(tl.float32),
    )  # fmt: skip


@triton.jit
def scaled(x0, x1, x2, x3, factor):
    """Quarters times a number."""
    return x0 * factor, x1 * factor, x2 * factor, x3 * factor


@triton.jit
def norm_of(x0, x1, x2, x3):
    """``1 / sqrt(sum x^2 + 1e-6)`` of vectors in quarters, fp32."""
    squares = tl.fma(x1, x1, x0 * x0)
    squares = tl.fma(x2, x2, squares)
    return inverse_norm(total(tl.fma(x3, x3, squares)))


@triton.jit
def inverse_norms(pointer, tokens, s, live, C: tl.constexpr, K: tl.constexpr, DTYPE: tl.constexpr):
    """``1 / sqrt(sum x^2 + 1e-6)`` of the vectors at the offsets ``tokens`` [T]."""
    at = pointer + tokens[:, None, None]
    live = live[:, None, None]
    c = tl.arange(0, C)[None, None, :]
    x0, x1, x2, x3 = rounded(
        tl.load(at + c * s, mask=live & (c < K), other=0.0),
        tl.load(at + (c + C) * s, mask=live & (c + C < K), other=0.0),
        tl.load(at + (c + 2 * C) * s, mask=live & (c + 2 * C < K), other=0.0),
        tl.load(at + (c + 3 * C) * s, mask=live & (c + 3 * C < K), other=0.0),
        DTYPE,
    )  # fmt: skip
    return tl.reshape(norm_of(x0, x1, x2, x3), [tokens.shape[0]])


@triton.jit
def rows_from(first, ROWS: tl.constexpr, C: tl.constexpr):
    """Rows of a head that a warp holds: ``[L, R]``, from ``first`` on."""
    LANES: tl.constexpr = 128 // C
    return first + tl.arange(0, ROWS // LANES)[None, :] * LANES + tl.arange(0, LANES)[:, None]


@triton.jit
def load_rows(head, row, end, C: tl.constexpr, K: tl.constexpr, POLICY: tl.constexpr = ""):
    """Quarters of the rows of a head's state, as stored; zeros from row ``end`` on.

    The policy tells the L2 cache what follows: "evict_last" that the rows are written back, "evict_first" that nothing
    follows.
    """
    c = tl.arange(0, C)[None, None, :]
    at = head + row[:, :, None] * K + c
    here = (row < end)[:, :, None]
    S0 = tl.load(at, mask=here & (c < K), other=0.0, eviction_policy=POLICY)
    S1 = tl.load(at + C, mask=here & (c + C < K), other=0.0, eviction_policy=POLICY)
    S2 = tl.load(at + 2 * C, mask=here & (c + 2 * C < K), other=0.0, eviction_policy=POLICY)
    S3 = tl.load(at + 3 * C, mask=here & (c + 3 * C < K), other=0.0, eviction_policy=POLICY)
    return S0, S1, S2, S3


@triton.jit
def fetch(head, first, V: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    """Ask for rows of a head's state to be brought into the L2 cache. PTX."""
    ELEMENTS: tl.constexpr = 1024 // head.dtype.element_ty.primitive_bitwidth  # of 128 bytes
    LINES: tl.constexpr = ROWS * K // ELEMENTS
    if (LINES & (LINES - 1)) == 0:
        element = tl.minimum(first * K + tl.arange(0, LINES) * ELEMENTS, V * K - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [head + element], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def fetch_values(v, start, count, ring_len, first, V: tl.constexpr):
    """Ask for values from row ``first`` on of the first 16 of ``count`` > 0 records to be brought into L2. PTX."""
    record = tl.minimum(tl.arange(0, 16), count - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [v + ring_row(start, record, ring_len) * V + first],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def store_rows(head, row, end, S0, S1, S2, S3, K: tl.constexpr):
    """Store rows before ``end``, rounded to the type of the state."""
    C: tl.constexpr = S0.shape[2]
    DTYPE: tl.constexpr = head.dtype.element_ty
    c = tl.arange(0, C)[None, None, :]
    at = head + row[:, :, None] * K + c
    here = (row < end)[:, :, None]
    tl.store(at, S0.to(DTYPE), mask=here & (c < K))
    tl.store(at + C, S1.to(DTYPE), mask=here & (c + C < K))
    tl.store(at + 2 * C, S2.to(DTYPE), mask=here & (c + 2 * C < K))
    tl.store(at + 3 * C, S3.to(DTYPE), mask=here & (c + 3 * C < K))


@triton.jit
def record_place(index, HV, batch):
    """``(head, request, layer)`` of number ``index`` of all heads of all requests of all layers; the last two int64."""
    return index % HV, (index // HV % batch).to(tl.int64), (index // HV // batch).to(tl.int64)


@triton.jit
def record_slots(request, sources, targets, counts, s_sources, s_targets, s_counts, null_block_id):
    """``(source, target, count, live)`` of a request. Without targets a state is its own, live if there are tokens."""
    source = tl.load(sources + request * s_sources).to(tl.int64)
    count = tl.load(counts + request * s_counts).to(tl.int32)
    if targets is None:
        return source, source, count, (source > null_block_id) & (count > 0)
    else:
        target = tl.load(targets + request * s_targets).to(tl.int64)
        return source, target, count, (source > null_block_id) & (target > null_block_id)


@triton.jit
def prepare(
    g, beta, k, start, begin, count, ring_len, TP: tl.constexpr, C: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """Decays, betas and inverse norms of the records ``begin`` .. ``begin + TP - 1``, as far as below ``count``."""
    record = begin + tl.arange(0, TP)
    exists = record < count
    at = ring_row(start, record, ring_len)
    decays = exp(tl.load(g + at, mask=exists, other=0.0))
    betas = tl.load(beta + at, mask=exists, other=0.0)
    norms = betas
    if NORM:
        norms = inverse_norms(k, at * K, 1, exists, C, K, k.dtype.element_ty)
    return decays, betas, norms


@triton.jit
def apply_records(
    S0, S1, S2, S3, decays, betas, norms, v, k, start, begin, count, ring_len, row, track, track_step,
    V: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Apply the records that ``prepare`` made ready to rows of a state, one after the other.

    Args:
        S0: first quarter of the state.
        S1: second.
        S2: third.
        S3: fourth.
        decays: ``[TP]``.
        betas: likewise.
        norms: likewise, read if NORM.
        v: pointer to the head's values, ``[ring_len, V]``.
        k: pointer to the key head's raw keys, ``[ring_len, K]``.
        start: ring row of record 0.
        begin: first record.
        count: records; no others are read.
        ring_len: rows of the rings.
        row: rows of the state, ``[L, R]``.
        track: head of another state, where the rows after record ``track_step`` are stored too; or None.
        track_step: read if there is such a state.
        V: rows of a head.
        K: columns.
        NORM: divide keys by their norms.

    Returns:
        The quarters after the last record.
    """
    C: tl.constexpr = S0.shape[2]
    LANES: tl.constexpr = S0.shape[0]
    TP: tl.constexpr = decays.shape[0]
    first = ring_row(start, begin, ring_len)
    k0, k1, k2, k3 = vector(k + first * K, 1, LANES, C, K)
    value = tl.load(v + first * V + row, mask=row < V, other=0.0)
    decay, beta, norm = pick(decays, 0), pick(betas, 0), pick(norms, 0)
    for i in range(0, tl.minimum(TP, count - begin)):
        x0, x1, x2, x3 = rounded(k0, k1, k2, k3, k.dtype.element_ty)
        if NORM:
            x0, x1, x2, x3 = scaled(x0, x1, x2, x3, norm)
        u = value.to(tl.float32)
        decay_now, beta_now = decay, beta
        # The next record is on its way while this one is applied.
        following = tl.minimum(i + 1, TP - 1)
        decay, beta, norm = pick(decays, following), pick(betas, following), pick(norms, following)
        ahead = ring_row(start, tl.minimum(begin + i + 1, count - 1), ring_len)
        k0, k1, k2, k3 = vector(k + ahead * K, 1, LANES, C, K)
        value = tl.load(v + ahead * V + row, mask=row < V, other=0.0)
        S0, S1, S2, S3 = advance(S0, S1, S2, S3, x0, x1, x2, x3, u, decay_now, beta_now)
        if track is not None and begin + i == track_step:
            store_rows(track, row, V, S0, S1, S2, S3, K)
    return S0, S1, S2, S3


@triton.jit
def replay(
    S0, S1, S2, S3, v, k, g, beta, start, count, ring_len, row, V: tl.constexpr, K: tl.constexpr, TP: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Apply any number of records; arguments as in ``prepare`` and ``apply_records``."""
    C: tl.constexpr = S0.shape[2]
    for begin in range(0, count, TP):
        decays, betas, norms = prepare(g, beta, k, start, begin, count, ring_len, TP, C, K, NORM)
        S0, S1, S2, S3 = apply_records(
            S0, S1, S2, S3, decays, betas, norms, v, k, start, begin, count, ring_len, row, None, -1, V, K, NORM
        )
    return S0, S1, S2, S3
