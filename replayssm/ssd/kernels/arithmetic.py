"""The operations whose bits are the contract, as every kernel uses them: prefill and decode. ``docs/maths.md`` §5.

Formulas, roundings and orders are those of mamba_ssm's chunk scan. What the tiles are is free, but for ``sums``.
"""

import triton
import triton.language as tl

from replayssm.ssd.kernels.constants import NAN_STAYS


@triton.jit
def processed(dt, bias, dt_min, dt_max, SOFTPLUS: tl.constexpr):
    """``clamp(softplus(dt + bias))`` of fp32 numbers, softplus being the identity above 20."""
    dt = dt + bias
    if SOFTPLUS:
        dt = tl.where(dt <= 20.0, tl.log(tl.exp(dt) + 1.0), dt)
    dt = tl.maximum(dt, dt_min, propagate_nan=NAN_STAYS)
    return tl.minimum(dt, dt_max, propagate_nan=NAN_STAYS)


@triton.jit
def _lane_before(values, distance: tl.constexpr):
    """``values`` [heads, lanes] moved to the right; the first lanes repeat themselves."""
    lane = tl.arange(0, values.shape[1])
    source = tl.where(lane >= distance, lane - distance, lane)
    return tl.gather(values, tl.broadcast_to(source[None, :], values.shape), 1)


@triton.jit
def _sum_lanes(total, product, A, FUSED: tl.constexpr):
    """Sums over lanes [heads, lanes] up to and with each: doubling steps in groups of 32, then a carry between them.

    With ``FUSED``, ``total`` is ``product * A`` and the first step adds it before it is rounded.
    """
    LANES: tl.constexpr = total.shape[1]
    GROUP: tl.constexpr = min(32, LANES)
    lane = tl.arange(0, LANES)[None, :]
    for power in tl.static_range(5):
        if 2**power < GROUP:
            before = _lane_before(total, 2**power)
            both = total + before
            if FUSED and power == 0:
                both = tl.fma(product, A, before)
            total = tl.where(lane % GROUP >= 2**power, both, total)
    if LANES > GROUP:
        tl.static_assert(LANES == 2 * GROUP)
        carry = tl.sum(tl.where(lane == GROUP - 1, total, 0.0), 1)[:, None]
        total = tl.where(lane >= GROUP, carry + total, total)
    return total


@triton.jit
def _after(values, product, A, before, FUSED: tl.constexpr):
    """Sums within a lane and the sum of all lanes before it."""
    lane = tl.arange(0, values.shape[1])[None, :]
    both = tl.fma(product, A, before) if FUSED else before + values
    return tl.where(lane > 0, both, values)


@triton.jit
def lane_sums(values, last, A, again, ROWS: tl.constexpr):
    """``A`` [heads, 1] times the sums of processed dt, as ``sums`` orders them.

    ``values`` and the result are four [heads, lanes]: one for each row of a lane, repeated where a lane has fewer rows.
    ``last`` are sums of the lanes' last rows that are known already. They are added anew only if ``again``; without,
    the last row of a lane that is not among the known ones must not be asked for.
    """
    v0, v1, v2, v3 = values
    if ROWS == 16:
        s0 = _sum_lanes(v0 * A, v0, A, True)
        return s0, s0, s0, s0
    elif ROWS == 32:
        s0 = v0 * A
        s1 = _sum_lanes(tl.fma(v1, A, s0), v1, A, False)
        s0 = _after(s0, v0, A, _lane_before(s1, 1), True)
        return s0, s1, s0, s1
    else:
        s0 = v0 * A
        s1 = tl.fma(v1, A, s0)
        s2 = tl.fma(v2, A, s1)
        if again:
            last = _sum_lanes(tl.fma(v3, A, s2), v3, A, False)
        before = _lane_before(last, 1)
        return _after(s0, v0, A, before, True), _after(s1, v1, A, before, False), _after(s2, v2, A, before, False), last


@triton.jit
def sums(dt, A):
    """``A`` [8] times the sums of ``dt`` [8, chunk] up to and with each row, fp32.

    In the order in which ``tl.cumsum`` adds a tile of 8 heads and more with 4 warps, products fused as the compiler
    fuses them there; written out, since that order follows from a layout, which another kernel around it changes. Up to
    four rows make a lane. A row's sum does not depend on the rows behind it.
    """
    HEADS: tl.constexpr = dt.shape[0]
    ROWS: tl.constexpr = dt.shape[1]
    A = tl.broadcast_to(A[:, None], (HEADS, 1))
    if ROWS == 16:
        s0, s1, s2, s3 = lane_sums((dt, dt, dt, dt), dt, A, True, ROWS)
        return s0
    elif ROWS == 32:
        v0, v1 = tl.split(tl.reshape(dt, (HEADS, 16, 2)))
        s0, s1, s2, s3 = lane_sums((v0, v1, v0, v1), v1, A, True, ROWS)
        return tl.reshape(tl.join(s0, s1), (HEADS, ROWS))
    else:
        even, odd = tl.split(tl.reshape(dt, (HEADS, ROWS // 4, 2, 2)))
        v0, v2 = tl.split(even)
        v1, v3 = tl.split(odd)
        s0, s1, s2, s3 = lane_sums((v0, v1, v2, v3), v3, A, True, ROWS)
        return tl.reshape(tl.join(tl.join(s0, s2), tl.join(s1, s3)), (HEADS, ROWS))


@triton.jit
def times(a, b, OPERAND: tl.constexpr):
    """``a b``, rounded: where products are fp32, no addition that follows may be fused with it, in no kernel."""
    if tl.float32 == OPERAND:
        return tl.fma(a, b, 0.0)
    else:
        return a * b


@triton.jit
def _leading(values):
    """fp32 numbers rounded to the 11 bits that the matrix unit reads. What is no number may become one."""
    bits = values.to(tl.int32, bitcast=True)
    return ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def multiply(a, b, total, RIGHT: tl.constexpr):
    """``total + a b``; in fp32 at most ``TERMS`` terms at a time, as three products of TF32 numbers.

    The small two are added in one order for either side on which the rows of the sequence stand: C, weights, scaled B.

    Args:
        a: ``[rows, terms]``.
        b: ``[terms, columns]``.
        total: fp32 ``[rows, columns]``.
        RIGHT: ``b`` holds the rows of the sequence, else ``a``.
    """
    if a.dtype == tl.float32:
        a_high = _leading(a)
        b_high = _leading(b)
        a_low = a - a_high  # no number where a is none
        b_low = b - b_high
        if RIGHT:
            low = tl.dot(a_high, b_low, input_precision="tf32")
            low = tl.dot(a_low, b_high, low, input_precision="tf32")
        else:
            low = tl.dot(a_low, b_high, input_precision="tf32")
            low = tl.dot(a_high, b_low, low, input_precision="tf32")
        return total + tl.dot(a_high, b_high, low, input_precision="tf32")
    else:
        return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def weights(products, newest, sums, dt):
    """``(C_t B_j) exp(G_t - G_j) dt_j`` in fp32; the sums' rounding must not let an exponent rise above zero."""
    return products * tl.exp(tl.minimum(newest - sums, 0.0)) * dt


@triton.jit
def fold_scale(total, sums, dt):
    """``exp(G_n - G_j) dt_j``."""
    return tl.exp(tl.minimum(total - sums, 0.0)) * dt


@triton.jit
def fold_columns(B, scale, OPERAND: tl.constexpr):
    """B's rows [rows, columns] scaled and rounded."""
    return times(B.to(tl.float32), scale[:, None], OPERAND).to(OPERAND)


@triton.jit
def finished(y, x, D, z, HAS_D: tl.constexpr, HAS_Z: tl.constexpr):
    """``(y + x D) z sigmoid(z)``; x, D and z broadcast to y."""
    if HAS_D:
        y = tl.fma(x.to(tl.float32), D, y)
    if HAS_Z:
        z = z.to(tl.float32)
        y = y * (z * tl.sigmoid(z))
    return y


@triton.jit
def holds_no_number(tile):
    """1 where an element of the tile is NaN or infinite, else 0."""
    finite = tl.abs(tile.to(tl.float32)) < float("inf")
    return tl.max(tl.max(tl.where(finite, 0, 1), 1), 0)
