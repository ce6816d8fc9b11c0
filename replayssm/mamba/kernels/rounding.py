"""Triton twins of ``replayssm.rounding``: the same bits from the same words. The definitions are explained there."""

import triton
import triton.language as tl


@triton.jit
def layer_seed(seed, layer):
    """The int64 seed of one layer, from the launch's int64 seed: splitmix64's finaliser."""
    word = seed.to(tl.uint64) ^ (0x9E3779B97F4A7C15 * (layer + 1).to(tl.uint64))
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return (word ^ (word >> 31)).to(tl.int64)


@triton.jit
def noise_tile(seed, slot, head, rows, N: tl.constexpr, ROUNDS: tl.constexpr):
    """uint32 ``[rows, N]`` with 16 random bits an element; N is a multiple of 8, ``rows`` an int32 vector."""
    calls = tl.arange(0, N // 8)[None, :].to(tl.uint32)
    zero = calls * 0 + rows[:, None].to(tl.uint32) * 0
    w0, w1, w2, w3 = tl.philox(
        seed, zero + slot.to(tl.uint32), zero + head.to(tl.uint32), zero + rows[:, None].to(tl.uint32), zero + calls,
        ROUNDS,
    )  # fmt: skip
    # join appends the fastest axis: ((w0, w2), (w1, w3)) comes out as w0, w1, w2, w3.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(rows.shape[0], N // 2)
    return tl.join(words & 0xFFFF, words >> 16).reshape(rows.shape[0], N)


@triton.jit
def float_codes(
    values, noise, MANTISSA: tl.constexpr, EXPONENT_MIN: tl.constexpr, INFINITY: tl.constexpr, NAN: tl.constexpr,
    SIGN: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """uint32 codes of a narrow floating-point format; ``noise`` is not read unless STOCHASTIC."""
    bits = values.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    exponent = (magnitude >> 23).to(tl.int32)
    mantissa = (magnitude & 0x7FFFFF) | tl.where(exponent > 0, 0x800000, 0).to(tl.uint32)
    exponent = tl.maximum(exponent, 1)
    shift = 23 - MANTISSA + tl.maximum(EXPONENT_MIN - exponent, 0)
    if STOCHASTIC:
        # noise << (shift - 16) has zeros below the cut, so that cutting the mantissa first changes no carry.
        wide = tl.minimum(tl.maximum(shift - 16, 0), 24).to(tl.uint32)
        narrow = tl.maximum(16 - shift, 0).to(tl.uint32)
        rounded = ((mantissa >> wide) + (noise >> narrow)) >> tl.minimum(shift, 16).to(tl.uint32)
    else:
        # 31 places cut everything: a mantissa has 24 bits.
        cut = tl.minimum(shift, 31).to(tl.uint32)
        rounded = (mantissa + (1 << (cut - 1)).to(tl.uint32) - 1 + ((mantissa >> cut) & 1)) >> cut
    code = (tl.maximum(exponent - EXPONENT_MIN, 0) << MANTISSA).to(tl.uint32) + rounded
    code = tl.minimum(code, INFINITY)
    code = tl.where(magnitude > 0x7F800000, NAN, code)
    return code | ((bits >> 31) << SIGN)


@triton.jit
def decode(codes, KIND: tl.constexpr, ARCH: tl.constexpr = 0):
    """fp32 values of a state's codes, before the row's scale. fp8 codes come as uint8."""
    if KIND == "fp8" and ARCH >= 89:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    elif KIND == "fp8":
        # Exponent and mantissa keep their order in fp32, whose bias is larger by 120. 0x7F (NaN) needs its own line.
        word = codes.to(tl.uint32)
        pattern = ((word & 0x80) << 24) | ((word & 0x7F) << 20)
        value = pattern.to(tl.float32, bitcast=True) * 1.329227995784916e36
        return tl.where((word & 0x7F) == 0x7F, float("nan"), value)
    else:
        return codes.to(tl.float32)


@triton.jit
def decode_words(words, KIND: tl.constexpr, ARCH: tl.constexpr = 0):
    """The values of the codes in each byte of ``words`` (int32), from the low byte on: four tiles."""
    if KIND == "int8":
        first, second, third, fourth = (words << 24) >> 24, (words << 16) >> 24, (words << 8) >> 24, words >> 24
        return first.to(tl.float32), second.to(tl.float32), third.to(tl.float32), fourth.to(tl.float32)
    elif ARCH >= 89:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high, a, b, c, d;
            .reg .b32 ab, cd;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 ab, low;
            cvt.rn.f16x2.e4m3x2 cd, high;
            mov.b32 {a, b}, ab;
            mov.b32 {c, d}, cd;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b;
            cvt.f32.f16 $2, c;
            cvt.f32.f16 $3, d;
            }""",
            "=f,=f,=f,=f,r", [words], (tl.float32, tl.float32, tl.float32, tl.float32), True, 1,
        )  # fmt: skip
    else:
        return decode(words, KIND), decode(words >> 8, KIND), decode(words >> 16, KIND), decode(words >> 24, KIND)


@triton.jit
def encode(values, noise, KIND: tl.constexpr, STOCHASTIC: tl.constexpr, ARCH: tl.constexpr = 0):
    """``(codes, scale)`` of an fp32 tile; ``scale`` has one element a row, 1 for the types without a scale.

    Columns beyond the state's own must hold zero. KIND is "fp32", "bf16", "fp16", "int8" or "fp8" (codes uint8).
    """
    scale = tl.full((values.shape[0],), 1.0, tl.float32)
    if KIND == "fp32":
        codes = values
    elif KIND == "bf16":
        if STOCHASTIC:
            codes = float_codes(values, noise, 7, 1, 0x7F80, 0x7FC0, 15, True)
            codes = codes.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        else:
            codes = values.to(tl.bfloat16)
    elif KIND == "fp16":
        if STOCHASTIC:
            codes = float_codes(values, noise, 10, 113, 0x7C00, 0x7E00, 15, True)
            codes = codes.to(tl.uint16).to(tl.float16, bitcast=True)
        else:
            codes = values.to(tl.float16)
    else:
        # As integers, magnitudes keep their order, and NaN is above infinity.
        scale, factor, finite = _scale(tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), KIND)
        scaled = tl.fma(values, factor[:, None], 0.0)  # rounded before anything is added
        codes = _byte_codes(scaled, noise, finite[:, None], KIND, STOCHASTIC, ARCH)
        codes = codes.to(tl.int8) if KIND == "int8" else codes.to(tl.uint8)
    return codes, scale


@triton.jit
def _scale(largest, KIND: tl.constexpr):
    """``(scale, factor, finite)`` of rows whose largest magnitude has the bits ``largest``.

    The scale of a row that holds infinity or NaN is NaN, and so is what it decodes to.
    """
    LARGEST: tl.constexpr = 127.0 if KIND == "int8" else 448.0
    finite = largest < 0x7F800000
    amax = largest.to(tl.float32, bitcast=True)
    one = tl.full(largest.shape, 1.0, tl.float32)
    factor = tl.div_rn(one, tl.maximum(amax, LARGEST * 6.018531076210112e-36)) * LARGEST
    factor = tl.where(amax == 0, 1.0, factor)
    return tl.where(finite, tl.div_rn(one, factor), float("nan")), tl.where(finite, factor, 0.0), finite


@triton.jit
def _byte_codes(scaled, noise, finite, KIND: tl.constexpr, STOCHASTIC: tl.constexpr, ARCH: tl.constexpr):
    """Integers whose low bytes are the codes of scaled values."""
    if KIND == "fp8":
        if ARCH >= 89 and not STOCHASTIC:
            return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            return float_codes(scaled, noise, 3, 121, 0x7E, 0x7F, 7, STOCHASTIC)
    elif STOCHASTIC:
        rounded = tl.floor(scaled + noise.to(tl.float32) * 1.52587890625e-05)
        return tl.where(finite, tl.minimum(tl.maximum(rounded, -127.0), 127.0).to(tl.int32), 0)
    else:
        # The addition rounds to nearest even, and the sum's low byte is the code: no code exceeds 127.
        return tl.where(finite, (scaled + 12582912.0).to(tl.int32, bitcast=True), 0)


@triton.jit
def _larger(a, b):
    """The larger magnitude, or NaN."""
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def encode_words(values, noise, KIND: tl.constexpr, STOCHASTIC: tl.constexpr, ARCH: tl.constexpr = 0):
    """``encode`` to 8-bit codes, for four tiles of columns at once: ``(words, scale)``, see ``decode_words``."""
    a, b, c, d = values
    largest = _larger(_larger(a, b), _larger(c, d)).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    scale, factor, finite = _scale(tl.max(largest, 1), KIND)
    factor, finite = factor[:, None], finite[:, None]
    a, b, c, d = tl.fma(a, factor, 0.0), tl.fma(b, factor, 0.0), tl.fma(c, factor, 0.0), tl.fma(d, factor, 0.0)
    if KIND == "fp8" and ARCH >= 89 and not STOCHASTIC:
        words = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f", [a, b, c, d], tl.int32, True, 1,
        )  # fmt: skip
    elif KIND == "int8" and ARCH > 0 and not STOCHASTIC:
        # As in `_byte_codes`: the low bytes of these sums are the codes.
        words = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            prmt.b32 low, $1, $2, 0x0040;
            prmt.b32 high, $3, $4, 0x0040;
            prmt.b32 $0, low, high, 0x5410;
            }""",
            "=r,f,f,f,f", [a + 12582912.0, b + 12582912.0, c + 12582912.0, d + 12582912.0], tl.int32, True, 1,
        )  # fmt: skip
        words = tl.where(finite, words, 0)
    else:
        a = _byte_codes(a, noise[0], finite, KIND, STOCHASTIC, 0).to(tl.int32) & 255
        b = _byte_codes(b, noise[1], finite, KIND, STOCHASTIC, 0).to(tl.int32) & 255
        c = _byte_codes(c, noise[2], finite, KIND, STOCHASTIC, 0).to(tl.int32) & 255
        d = _byte_codes(d, noise[3], finite, KIND, STOCHASTIC, 0).to(tl.int32)
        words = a | (b << 8) | (c << 16) | (d << 24)
    return words, scale
