"""The checkpoint's part of an output: its codes times C, without decoding 8-bit codes where a product can take them."""

import triton
import triton.language as tl

from replayssm.mamba.kernels.rounding import decode


@triton.jit
def state_operand(
    c, C, s_C_t, seq_len, n_in, KIND: tl.constexpr, OPERAND: tl.constexpr, ARCH: tl.constexpr, DIGITS: tl.constexpr
):  # fmt: skip
    """C of the new tokens as the operand that multiplies a state's codes: ``(operand, units)``.

    8-bit codes are multiplied by C over a power of two, the unit: int8 ones by two int8 digits of each element, 16 bits
    below the token's largest, fp8 ones by fp16, in which both are exact. C that is not finite has the unit NaN.

    Args:
        c: the operand for other states, ``[NP, TP]``.
        C: pointer to the first token's row.
        s_C_t: stride of the tokens.
        seq_len: tokens.
        n_in: which columns are the state's own.
        KIND: storage type of the state.
        OPERAND: type of the operands of products.
        ARCH: see ``common.architecture``.
        DIGITS: columns of a token in every product: 2 where int8 codes meet few tokens.
    """
    NP: tl.constexpr = c.shape[0]
    TP: tl.constexpr = c.shape[1]
    INT8: tl.constexpr = KIND == "int8" and tl.bfloat16 == OPERAND and NP >= 32
    FP8: tl.constexpr = KIND == "fp8" and tl.bfloat16 == OPERAND and ARCH >= 89
    if INT8 or FP8:
        # Columns of int8: high and low digit of each token, or the high digits of all tokens and then the low ones.
        PAIRS: tl.constexpr = DIGITS == 2
        column = tl.arange(0, 2 * TP if INT8 and not PAIRS else TP)
        t = column // DIGITS if PAIRS else column % TP
        high = column % DIGITS == 0 if PAIRS else column < TP
        at = t[:, None] * s_C_t + tl.arange(0, NP)[None, :]
        values = tl.load(C + at, mask=(t < seq_len)[:, None] & n_in[None, :], other=0.0).to(tl.float32)
        # The largest magnitude of a token, times `up`, is below 2^LIMIT.
        LIMIT: tl.constexpr = 14 if INT8 else 15
        exponent = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1) >> 23
        exponent = tl.maximum(exponent, LIMIT)
        up = ((253 + LIMIT - exponent) << 23).to(tl.float32, bitcast=True)
        unit = ((exponent + 1 - LIMIT) << 23).to(tl.float32, bitcast=True)
        unit = tl.where(exponent == 255, float("nan"), unit)
        scaled = values * up[:, None]
        if FP8:
            return tl.trans(scaled.to(tl.float16)), unit
        else:
            whole = (scaled + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # to the nearest integer
            low = ((whole + 128) & 255) - 128
            digits = tl.where(high[:, None], (whole - low) >> 8, low)
            return tl.trans(digits.to(tl.int8)), tl.where(high, 256.0 * unit, unit)
    else:
        return c, 1.0


@triton.jit
def read_state(
    codes, operand, units, TP: tl.constexpr, KIND: tl.constexpr, OPERAND: tl.constexpr, ARCH: tl.constexpr,
    DIGITS: tl.constexpr,
):  # fmt: skip
    """Codes ``[rows, NP]`` times what ``state_operand`` returned: fp32 ``[rows, TP]``, before the rows' scale."""
    if operand.dtype == tl.int8:
        y = tl.dot(codes, operand).to(tl.float32) * units[None, :]
        return y if DIGITS == 2 else tl.sum(y.reshape(codes.shape[0], 2, TP), 1)
    elif operand.dtype == tl.float16:
        return tl.dot(codes.to(tl.float8e4nv, bitcast=True).to(tl.float16), operand) * units[None, :]
    else:
        return tl.dot(decode(codes, KIND, ARCH).to(OPERAND), operand, input_precision="tf32x3")
