"""Rounding of fp32 states to their storage type: to nearest, or stochastic with counter-based random bits.

The integer code below is the definition. A device that rounds must produce the same bits from the same words, which is
why nothing here depends on a library's random generator, on a program id or on the order of elements.

Random bits. Philox-4x32 maps a counter of four 32-bit words and a key of two to four random words. Element (row,
column) of head ``head`` of slot ``slot`` uses

    counter = (slot, head, row, column // 8),    key = (low, high word of the seed),
    noise   = 16-bit half ``column % 2`` (0 is the low one) of output word ``column % 8 // 2``.

Stochastic rounding adds the noise below the kept bits and truncates, hence rounds up with the probability of the
distance to the lower neighbour, in steps of 2^-16 of the distance between both neighbours.

8-bit types carry one fp32 scale per row: ``value = code * scale``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_COLUMNS_PER_CALL = 8
NOISE_BITS = 16

SCALED_DTYPES = (torch.int8, torch.float8_e4m3fn)
_LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Rows whose largest magnitude is below this times the largest code share one scale: 1 / scale stays finite, and the
# scale itself a normal number.
_SMALLEST_SCALE = 2.0**-117


class FloatFormat(NamedTuple):
    """A binary floating-point format, as far as rounding from fp32 needs it.

    Attributes:
        mantissa_bits: stored mantissa bits.
        exponent_min: fp32's biased exponent of the smallest normal number.
        infinity: code that overflow becomes; for e4m3fn, which has no infinity, the largest number.
        nan: code of NaN.
        bits: an integer type as wide as the format.
    """

    mantissa_bits: int
    exponent_min: int
    infinity: int
    nan: int
    bits: torch.dtype


FORMATS = {
    torch.bfloat16: FloatFormat(7, 1, 0x7F80, 0x7FC0, torch.int16),
    torch.float16: FloatFormat(10, 113, 0x7C00, 0x7E00, torch.int16),
    torch.float8_e4m3fn: FloatFormat(3, 121, 0x7E, 0x7F, torch.int8),
}


def _multiply_32x32(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low word of the product of two 32-bit words held in int64, with no intermediate above 2^49."""
    low = (a & 0xFFFF) * b
    middle = (a >> 16) * b + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor | int, Tensor | int], rounds: int = 10
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox-4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

    Args:
        counter: four int64 tensors of one broadcastable shape, each holding numbers in ``0..2^32-1``.
        key: two words in ``0..2^32-1``, numbers or int64 tensors that broadcast with the counter.
        rounds: rounds of the generator; 10 is the authors' recommendation, 7 the fewest that passes their tests.

    Returns:
        Four int64 tensors of the broadcast shape, each holding a random 32-bit word.

    Example:
        >>> import torch
        >>> zero = torch.zeros(1, dtype=torch.int64)
        >>> [hex(word.item()) for word in philox4x32((zero, zero, zero, zero), (0, 0))]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _multiply_32x32(c0, _PHILOX_MULTIPLIERS[0])
        high1, low1 = _multiply_32x32(c2, _PHILOX_MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + _PHILOX_KEY_STEPS[0]) & WORD
        k1 = (k1 + _PHILOX_KEY_STEPS[1]) & WORD
    return tuple(torch.broadcast_tensors(c0, c1, c2, c3))  # fewer than four rounds do not mix every word into each


def layer_seed(seed: int, layer: int) -> int:
    """The seed that layer ``layer`` of a launch over all layers rounds with.

    It is the finaliser of splitmix64 applied to ``seed XOR 0x9E3779B97F4A7C15 * (layer + 1)``, modulo 2^64.

    Args:
        seed: a signed or unsigned 64-bit number.
        layer: index of the layer, from 0.

    Returns:
        A signed 64-bit number, to be stored in an int64 tensor.

    Example:
        >>> layer_seed(0, 0) != layer_seed(0, 1)
        True
    """
    mask = (1 << 64) - 1
    word = (seed ^ (0x9E3779B97F4A7C15 * (layer + 1))) & mask
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
    word ^= word >> 31
    return word - (1 << 64) if word >> 63 else word


def noise_bits(seed: int, slot: int, shape: tuple[int, int, int], rounds: int = 10) -> Tensor:
    """The 16 random bits of every element of one slot's state.

    Args:
        seed: 64-bit seed.
        slot: index of the slot that is written.
        shape: (nheads, headdim, dstate).
        rounds: Philox rounds, at least 1.

    Returns:
        int64 ``[nheads, headdim, dstate]`` on the CPU, values ``0..65535``.

    Example:
        >>> tuple(noise_bits(seed=1, slot=0, shape=(2, 3, 5)).shape)
        (2, 3, 5)
    """
    nheads, rows, columns = shape
    calls = -(-columns // _COLUMNS_PER_CALL)
    head, row, call = (torch.arange(size, device="cpu") for size in (nheads, rows, calls))
    counter = (torch.tensor(slot, device="cpu"), head.view(-1, 1, 1), row.view(1, -1, 1), call)
    words = torch.stack(philox4x32(counter, (seed & WORD, (seed >> 32) & WORD), rounds), dim=-1)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=-1)
    return halves.view(nheads, rows, calls * _COLUMNS_PER_CALL)[..., :columns]


def float_codes(values: Tensor, dtype: torch.dtype, noise: Tensor | None = None) -> Tensor:
    """Round fp32 to a narrower floating-point type with integer arithmetic alone.

    The magnitude is cut ``shift`` bits above its lowest mantissa bit; below the format's normal range ``shift`` grows
    with every binade, which is what makes subnormals come out right. To nearest, half a unit minus the tie rule is
    added before the cut; stochastically, the noise scaled to the width of the cut.

    Args:
        values: fp32, any shape.
        dtype: one of ``FORMATS``.
        noise: None rounds to the nearest, ties to even; else int64 of the same shape, 16 random bits an element.

    Returns:
        Tensor of ``dtype``. Overflow gives infinity, in fp8 the largest number. NaN stays NaN.

    Example:
        >>> import torch
        >>> float_codes(torch.tensor([1.0 + 2**-9]), torch.bfloat16).item()
        1.0
    """
    form = FORMATS[dtype]
    bits = values.contiguous().view(torch.int32).to(torch.int64) & WORD
    magnitude = bits & 0x7FFFFFFF
    exponent = magnitude >> 23
    mantissa = (magnitude & 0x7FFFFF) | ((exponent > 0).long() << 23)
    exponent = exponent.clamp(min=1)
    below = (form.exponent_min - exponent).clamp(min=0)
    # 40 places are enough: 24 bits of mantissa and 16 of noise cannot carry beyond them.
    shift = (23 - form.mantissa_bits + below).clamp(max=40)
    if noise is None:
        one = torch.ones_like(shift)
        addend = (one << (shift - 1)) - 1 + ((mantissa >> shift) & 1)
    else:
        addend = (noise << (shift - NOISE_BITS).clamp(min=0)) >> (NOISE_BITS - shift).clamp(min=0)
    # The implicit bit is part of the rounded mantissa and adds one to the exponent field of a normal number.
    code = ((exponent - form.exponent_min).clamp(min=0) << form.mantissa_bits) + ((mantissa + addend) >> shift)
    code = code.clamp(max=form.infinity)
    code = torch.where(magnitude > 0x7F800000, form.nan, code)
    sign = (bits >> 31) << (8 * dtype.itemsize - 1)
    return (code | sign).to(form.bits).view(dtype)


def encode(values: Tensor, dtype: torch.dtype, noise: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Round fp32 values to the type that a state is stored in.

    Args:
        values: fp32 ``[..., dstate]``.
        dtype: float32 (returned as it is), bfloat16, float16, int8 or float8_e4m3fn.
        noise: None rounds to the nearest, ties to even; else what ``noise_bits`` returns, of the values' shape. fp32
            ignores it.

    Returns:
        (codes, scale): codes of ``dtype`` and the values' shape; scale None, or for the 8-bit types fp32 ``[...]``, one
        per row: ``1 / (largest code / largest magnitude)``. A row of zeros has scale 1, a row of tiny values the scale
        2^-117. A row that holds NaN or infinity has the scale NaN or infinity and decodes to NaN.

    Example:
        >>> import torch
        >>> codes, scale = encode(torch.tensor([[0.5, -2.0, 0.0]]), torch.int8)
        >>> codes.tolist(), round(scale.item(), 6)
        ([[32, -127, 0]], 0.015748)
    """
    if dtype == torch.float32:
        return values, None
    if dtype not in SCALED_DTYPES:
        # The library's cast rounds to nearest, ties to even, as float_codes(noise=None) does, in one pass.
        return (values.to(dtype) if noise is None else float_codes(values, dtype, noise)), None
    largest = _LARGEST_CODE[dtype]
    amax = values.abs().amax(-1)
    factor = torch.where(amax == 0, 1.0, largest / amax.clamp(min=largest * _SMALLEST_SCALE))
    scaled = values * factor.unsqueeze(-1)
    if dtype == torch.int8:
        rounded = scaled.round() if noise is None else torch.floor(scaled + noise / 2**NOISE_BITS)
        codes = rounded.clamp(-largest, largest).nan_to_num(0.0).to(torch.int8)
    elif noise is None:
        codes = scaled.clamp(-largest, largest).to(dtype)
    else:
        codes = float_codes(scaled, dtype, noise)
    return codes, 1.0 / factor


def decode(codes: Tensor, scale: Tensor | None) -> Tensor:
    """The fp32 values of a stored state: a new tensor, also when the codes are fp32.

    Args:
        codes: ``[..., dstate]``, float32, bfloat16, float16, int8 or float8_e4m3fn.
        scale: fp32 ``[...]`` for the 8-bit types, else None.

    Returns:
        fp32, contiguous, of the codes' shape.

    Example:
        >>> import torch
        >>> decode(torch.tensor([[4, -2]], dtype=torch.int8), torch.tensor([0.5])).tolist()
        [[2.0, -1.0]]
    """
    values = codes.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    return values if scale is None else values.mul_(scale.unsqueeze(-1))
