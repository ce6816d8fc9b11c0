"""Triton twins of ``replayssm.rounding``: the same bits from the same words. The definitions are explained there."""

import triton
import triton.language as tl


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1, ROUNDS: tl.constexpr):
    """Four random uint32 words of counters and keys that broadcast, all uint32."""
    for _ in tl.static_range(ROUNDS):
        high0 = tl.umulhi(c0, 0xD2511F53)
        low0 = c0 * 0xD2511F53
        high1 = tl.umulhi(c2, 0xCD9E8D57)
        low1 = c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


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
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = philox4x32(
        zero + slot.to(tl.uint32), zero + head.to(tl.uint32), zero + rows[:, None].to(tl.uint32), zero + calls,
        low, high, ROUNDS,
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
def decode(codes, KIND: tl.constexpr):
    """fp32 values of a state's codes, before the row's scale. fp8 codes come as uint8."""
    if KIND == "int8":
        # An exact int-to-float without the slow conversion unit: 2^23 + (code + 128) is a float's bit pattern.
        pattern = (codes.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint32) | 0x4B000000
        return pattern.to(tl.float32, bitcast=True) - 8388736.0
    elif KIND == "fp8":
        # Exponent and mantissa keep their order in fp32, whose bias is larger by 120. 0x7F (NaN) needs its own line.
        word = codes.to(tl.uint32)
        pattern = ((word & 0x80) << 24) | ((word & 0x7F) << 20)
        value = pattern.to(tl.float32, bitcast=True) * 1.329227995784916e36
        return tl.where((word & 0x7F) == 0x7F, float("nan"), value)
    else:
        return codes.to(tl.float32)


@triton.jit
def decode_operand(codes, KIND: tl.constexpr, OPERAND: tl.constexpr, ASM: tl.constexpr):
    """A state's codes as operands of a matrix product, before the row's scale.

    With PTX at hand 8-bit codes become bf16 four at a time; every code but fp8's NaN is exact there. That one decodes
    to 480, and is told by its row's scale, which is NaN.
    """
    if ASM and tl.bfloat16 == OPERAND and KIND == "int8":
        # low seven bits below 0x43: 128 + low; the sign bit below it: 128 or 256. The difference is the code.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 low, sign, minus, x, y;
            mov.b32 minus, 0xbf80bf80;
            and.b32 low, $2, 0x7f7f7f7f;
            and.b32 sign, $2, 0x80808080;
            prmt.b32 x, low, 0x43434343, 0x4140;
            prmt.b32 y, sign, 0x43434343, 0x4140;
            fma.rn.bf16x2 $0, y, minus, x;
            prmt.b32 x, low, 0x43434343, 0x4342;
            prmt.b32 y, sign, 0x43434343, 0x4342;
            fma.rn.bf16x2 $1, y, minus, x;
            }""",
            "=r,=r,r", [codes], tl.bfloat16, False, 4,
        )  # fmt: skip
    elif ASM and tl.bfloat16 == OPERAND and KIND == "fp8":
        # Exponent and mantissa four places up have bf16's layout with an exponent too small by 120.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 wide, sign, up, zero, x;
            mov.b32 up, 0x7b807b80;
            mov.b32 zero, 0x80008000;
            prmt.b32 wide, $2, 0, 0x1404;
            and.b32 sign, wide, 0x80008000;
            shr.b32 x, wide, 4;
            and.b32 x, x, 0x07f007f0;
            or.b32 x, x, sign;
            fma.rn.bf16x2 $0, x, up, zero;
            prmt.b32 wide, $2, 0, 0x3424;
            and.b32 sign, wide, 0x80008000;
            shr.b32 x, wide, 4;
            and.b32 x, x, 0x07f007f0;
            or.b32 x, x, sign;
            fma.rn.bf16x2 $1, x, up, zero;
            }""",
            "=r,=r,r", [codes], tl.bfloat16, False, 4,
        )  # fmt: skip
    else:
        return decode(codes, KIND).to(OPERAND)


@triton.jit
def encode(values, noise, KIND: tl.constexpr, STOCHASTIC: tl.constexpr):
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
        LARGEST: tl.constexpr = 127.0 if KIND == "int8" else 448.0
        # max drops NaN, so it counts as infinity. The scale of such a row is NaN, and so is what it decodes to.
        amax = tl.max(tl.where(values == values, tl.abs(values), float("inf")), 1)
        one = scale
        factor = tl.div_rn(one, tl.maximum(amax, LARGEST * 6.018531076210112e-36)) * LARGEST
        factor = tl.where(amax == 0, 1.0, factor)
        scale = tl.where(amax == float("inf"), float("nan"), tl.div_rn(one, factor))
        scaled = values * factor[:, None]
        if KIND == "int8":
            if STOCHASTIC:
                rounded = tl.floor(scaled + noise.to(tl.float32) * 1.52587890625e-05)
            else:
                rounded = (scaled + 12582912.0) - 12582912.0  # to nearest even, by the addition's own rounding
            rounded = tl.minimum(tl.maximum(tl.where(rounded == rounded, rounded, 0.0), -LARGEST), LARGEST)
            codes = rounded.to(tl.int32).to(tl.int8)
        else:
            codes = float_codes(scaled, noise, 3, 121, 0x7E, 0x7F, 7, STOCHASTIC).to(tl.uint8)
    return codes, scale
