"""Pieces of the delta rule's kernels: gates, sums over K, and one token applied to rows of a state. fp32.

Every operation here has one possible order, so that a token has the same bits in every kernel, tile and launch:
products that are added are written as ``fma`` (launch with ``enable_fp_fusion=False``, so that no others are formed),
and a sum over K is a chain of sums of two, which a layout can only commute.

A state's rows are held as four tensors ``[L, R, C]``, one for each quarter of the columns: C = KP / 4, KP = K rounded
up to a power of two; row ``r L + l``. L C = 128, so that a warp reads L rows of C columns with one instruction, keys
come as ``[L, 1, C]`` in the layout in which they are used, and R is what a thread holds in registers.
"""

import triton
import triton.language as tl


@triton.jit
def _exp(x):
    """``e^x`` for x <= 88 (cut there) as ``(y + rest) scale scale2``; NaN counts as a number.

    Range reduction and polynomial of S. Moshier's Cephes library.
    """
    clamped = tl.minimum(tl.maximum(x, -104.0), 88.0)
    n = tl.floor(tl.fma(clamped, 1.4426950408889634, 0.5))
    r = tl.fma(n, -0.693359375, clamped)
    r = tl.fma(n, 2.12194440e-4, r)
    p = tl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = tl.fma(p, r, 8.3334519073e-3)
    p = tl.fma(p, r, 4.1665795894e-2)
    p = tl.fma(p, r, 1.6666665459e-1)
    p = tl.fma(p, r, 5.0000001201e-1)
    p = tl.fma(p, r * r, r)
    y = p + 1.0
    whole = n.to(tl.int32)
    half = whole >> 1  # two factors, as 2^n alone may be subnormal
    scale = tl.where(x < -103.98, 0.0, ((half + 127) << 23).to(tl.float32, bitcast=True))
    return y, p - (y - 1.0), scale, ((whole - half + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exp(x):
    """``e^x`` for x <= 88 (cut there), within 0.6 units in the last place: every later state has a decay's error."""
    y, _, scale, scale2 = _exp(x)
    return tl.where(x == x, y * scale * scale2, x)


@triton.jit
def log_decay(A_log, a, dt_bias):
    """``-exp(A_log) softplus(a + dt_bias)``, softplus the identity above 20; see ``delta_rule.gates``.

    The product of a large number keeps what rounding its factors would lose: its exponential is taken next.
    """
    x = a + dt_bias
    part = x - a
    lost = (a - (x - part)) + (dt_bias - part)
    u = exp(tl.minimum(x, 20.0))
    w = 1.0 + u
    # log1p: the quotient corrects what rounding 1 + u lost.
    small = tl.where(w == 1.0, u, tl.log(w) * tl.div_rn(u, tl.where(w == 1.0, 1.0, w - 1.0)))
    softplus = tl.where(x > 20.0, x, tl.where(x == x, small, x))
    y, rest, scale, scale2 = _exp(A_log)
    product = y * softplus
    rest = tl.fma(y, softplus, -product) + tl.fma(rest, softplus, tl.where(x > 20.0, y * lost, 0.0))
    g = -(product + tl.where(rest == rest, rest, 0.0)) * scale * scale2
    return tl.where(A_log == A_log, g, A_log)


@triton.jit
def strength(b):
    """``sigmoid(b)``."""
    return tl.div_rn(1.0, 1.0 + exp(-b))


@triton.jit
def inverse_norm(sum_of_squares):
    """``1 / sqrt(x + 1e-6)``."""
    return tl.div_rn(1.0, tl.sqrt_rn(sum_of_squares + 1e-6))


@triton.jit
def near_inverse_norm(sum_of_squares):
    """The same, not rounded correctly: the hardware's approximation, and a step of Newton's method."""
    x = sum_of_squares + 1e-6
    y = tl.rsqrt(x)
    return y * tl.fma(-0.5 * x * y, y, 1.5)


@triton.jit
def total(x):
    """Sum over the last axis, of up to 256 elements: neighbours first, then pairs of pairs."""
    for _ in tl.static_range(8):
        if x.shape[2] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 2, 2]), 3)
    return tl.reshape(x, [x.shape[0], x.shape[1]])


@triton.jit
def dot(S0, S1, S2, S3, x0, x1, x2, x3):
    """Product of the rows with a vector, ``[L, R]`` of quarters ``[L, R, C]`` and ``[L, 1, C]``."""
    p = tl.fma(S1, x1, S0 * x0)
    p = tl.fma(S2, x2, p)
    return total(tl.fma(S3, x3, p))


@triton.jit
def advance(S0, S1, S2, S3, k0, k1, k2, k3, v, decay, beta):
    """One token: ``S = decay S``, ``u = beta (v - S k)``, ``S = S + u k^T``; v ``[L, R]``, decay and beta numbers."""
    S0, S1, S2, S3 = S0 * decay, S1 * decay, S2 * decay, S3 * decay
    u = (beta * (v - dot(S0, S1, S2, S3, k0, k1, k2, k3)))[:, :, None]
    return tl.fma(u, k0, S0), tl.fma(u, k1, S1), tl.fma(u, k2, S2), tl.fma(u, k3, S3)


@triton.jit
def pick(values, index):
    """Element ``index`` of a vector, whatever the others are. Within a warp this is one exchange between lanes."""
    return tl.sum(tl.gather(values, tl.full([1], index, tl.int32), 0), 0)
