"""Rounding: the integer code against exact arithmetic, fairness of stochastic rounding, degenerate rows."""

import math

import pytest
import torch

from replayssm.rounding import FORMATS, decode, encode, float_codes, layer_seed, noise_bits, philox4x32
from replayssm.testing import as_bytes

FLOATS = tuple(FORMATS)
SCALED = (torch.int8, torch.float8_e4m3fn)
LARGEST = {torch.bfloat16: 3.3895e38, torch.float16: 65504.0, torch.float8_e4m3fn: 448.0}
SMALLEST = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float8_e4m3fn: 2.0**-9}


def finite_values(dtype):
    """Every finite number of a format, in ascending order, as fp32."""
    bits = torch.arange(256**dtype.itemsize)
    values = bits.to(torch.int16 if dtype.itemsize == 2 else torch.uint8).view(dtype).float()
    return values[values.isfinite()].unique()


@pytest.mark.parametrize("dtype", FLOATS)
def test_nearest_equals_the_cast_at_every_value_tie_and_neighbour(dtype):
    values = finite_values(dtype)
    between = ((values[1:].double() + values[:-1].double()) / 2).float()
    points = torch.cat((values, between, between.nextafter(torch.tensor(torch.inf)), between.nextafter(-values[-1:])))
    points = torch.cat((points, torch.tensor([-0.0, 1e-45, -1e-45])))
    assert torch.equal(as_bytes(float_codes(points, dtype)), as_bytes(points.to(dtype)))
    assert float_codes(torch.tensor(torch.nan), dtype).isnan()  # which NaN, a cast leaves open


def test_overflow_becomes_infinity_in_16_bits_and_the_largest_number_in_fp8():
    points = torch.tensor([65519.0, 65520.0, -1e9, torch.inf])
    assert float_codes(points, torch.float16).tolist() == [65504.0, math.inf, -math.inf, math.inf]
    assert float_codes(points, torch.float8_e4m3fn).float().tolist() == [448.0, 448.0, -448.0, 448.0]
    assert float_codes(torch.tensor([3.4e38]), torch.bfloat16).item() == math.inf


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("noise", [0, 1, 32768, 65535])
def test_numbers_of_the_format_stay_whatever_the_noise(dtype, noise):
    values = finite_values(dtype)
    rounded = float_codes(values, dtype, torch.full(values.shape, noise))
    assert torch.equal(rounded.float(), values)


@pytest.mark.parametrize("dtype", FLOATS)
def test_stochastic_rounding_goes_up_as_often_as_the_value_is_far_from_the_lower_neighbour(dtype):
    low_exponent = math.log2(SMALLEST[dtype])
    # Normal numbers, the border to the subnormals, subnormals, and less than the smallest of them.
    scales = [1.0, SMALLEST[dtype] * 2 ** FORMATS[dtype].mantissa_bits, SMALLEST[dtype] * 2, SMALLEST[dtype] / 4]
    noise = torch.arange(65536)
    for scale in scales:
        for fraction in (0.3, 0.71, 0.9999, 1.37):
            value = torch.tensor(scale * fraction)
            if value.abs() < 2.0**-149 or low_exponent < -140:
                continue
            rounded = float_codes(value.expand(65536), dtype, noise).double()
            down, up = rounded.min().item(), rounded.max().item()
            assert down <= value.item() <= up
            # All 2^16 noises once each: the mean is off by less than the resolution of the noise.
            assert abs(rounded.mean().item() - value.item()) <= (up - down) * 2.0**-15
            assert len(rounded.unique()) <= 2
            negative = float_codes(-value.expand(65536), dtype, noise).double()
            assert torch.equal(negative, -rounded)


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_infinity_survive_stochastic_rounding(dtype):
    rounded = float_codes(torch.tensor([torch.nan, torch.inf]), dtype, torch.tensor([65535, 65535])).float()
    assert rounded[0].isnan()
    assert rounded[1] == (448.0 if dtype == torch.float8_e4m3fn else math.inf)


@pytest.mark.parametrize("dtype", SCALED)
def test_degenerate_rows_decode_to_what_they_were(dtype):
    rows = torch.zeros(5, 7)
    rows[1, 3], rows[2], rows[3, 0] = 1e-42, 3e-38, -1e38
    rows[4] = torch.tensor([0.0, 1, -2, 3, -4, 5, 6])
    for noise in (None, torch.full(rows.shape, 65535), torch.zeros(rows.shape, dtype=torch.int64)):
        codes, scale = encode(rows, dtype, noise)
        decoded = decode(codes, scale)
        assert decoded.isfinite().all() and scale.isfinite().all() and (scale >= 2.0**-117).all()
        assert scale[0] == 1.0 and not decoded[0].any()
        step = scale / 1.0 if dtype == torch.int8 else scale * 32
        assert ((decoded - rows).abs() <= step[:, None]).all()


@pytest.mark.parametrize("dtype", SCALED)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_decodes_to_nan_and_leaves_the_next_row_alone(dtype, bad):
    rows = torch.randn(2, 9)
    expected = decode(*encode(rows, dtype))[1]
    rows[0, 4] = bad
    decoded = decode(*encode(rows, dtype))
    assert not decoded[0].isfinite().all()
    assert torch.equal(decoded[1], expected)


@pytest.mark.parametrize("dtype", SCALED)
def test_scaled_types_use_their_whole_range_and_round_within_half_a_step(dtype):
    rows = torch.randn(40, 13) * torch.logspace(-6, 6, 40)[:, None]
    codes, scale = encode(rows, dtype)
    assert (codes.float().abs().amax(1) == (127 if dtype == torch.int8 else 448)).all()
    error = (decode(codes, scale) - rows).abs()
    half = 0.501 * scale[:, None] if dtype == torch.int8 else (rows.abs() * 2.0**-4).clamp(min=0.501 * 2.0**-9 * 448)
    assert (error <= (half if dtype == torch.int8 else rows.abs() * 2.0**-4 * 1.001 + scale[:, None] * 2.0**-10)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *SCALED])
def test_stochastic_encoding_of_a_state_is_unbiased(dtype):
    shape, draws = (3, 5, 16), 400
    values = torch.rand(shape) * 2 - 1
    samples = torch.stack([decode(*encode(values, dtype, noise_bits(seed, 2, shape))) for seed in range(draws)])
    down = decode(*encode(values, dtype, torch.zeros(shape, dtype=torch.int64))).double()
    up = decode(*encode(values, dtype, torch.full(shape, 65535))).double()
    error = samples.double().mean(0) - values.double()
    # The variance of a draw, (up - v)(v - down), from the two neighbours that the extreme noises pick.
    standard_error = ((up - values).abs() * (values - down).abs() / draws).sqrt()
    resolution = (up - down).abs() * 2.0**-12 + 1e-7
    assert (error.abs() <= 5 * standard_error + 2 * resolution).all()
    assert abs(error.sum()) <= 4 * standard_error.square().sum().sqrt() + resolution.sum()


def test_philox_known_answers():
    # Known-answer vectors of the generator's authors for 10 rounds.
    ones = torch.tensor(0xFFFFFFFF)
    words = philox4x32((ones, ones, ones, ones), (0xFFFFFFFF, 0xFFFFFFFF))
    assert [hex(word) for word in words] == ["0x408f276d", "0x41c83b0e", "0xa20bc7c6", "0x6d5451fd"]
    pi = [torch.tensor(word) for word in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    words = philox4x32(tuple(pi), (0xA4093822, 0x299F31D0))
    assert [hex(word) for word in words] == ["0xd16cfe09", "0x94fdcceb", "0x5001e420", "0x24126ea1"]


def test_noise_depends_on_every_coordinate_and_not_on_the_shape_around_it():
    noise = noise_bits(7, 3, (4, 6, 20))
    assert noise.shape == (4, 6, 20) and noise.min() >= 0 and noise.max() < 65536
    assert torch.equal(noise_bits(7, 3, (2, 3, 9)), noise[:2, :3, :9])
    assert noise.unique().numel() > 0.98 * noise.numel()
    others = [noise_bits(8, 3, (4, 6, 20)), noise_bits(7, 4, (4, 6, 20)), noise_bits(7 + (1 << 32), 3, (4, 6, 20))]
    others += [noise_bits(-7, 3, (4, 6, 20)), noise_bits(7, 3, (4, 6, 20), rounds=5)]
    assert all((other != noise).float().mean() > 0.99 for other in others)


@pytest.mark.parametrize("rounds", [1, 2, 3, 10])
def test_element_bits_follow_the_documented_counter(rounds):
    slot, head, row, column, seed = 5, 3, 2, 13, (11 << 32) | 9
    counter = tuple(torch.tensor(word) for word in (slot, head, row, column // 8))
    word = philox4x32(counter, (9, 11), rounds)[column % 8 // 2].item()
    expected = word >> 16 if column % 2 else word & 0xFFFF
    assert noise_bits(seed, slot, (4, 3, 14), rounds)[head, row, column] == expected


def test_layer_seed_is_the_finaliser_of_splitmix64():
    # With seed 0 and layer 0 the finaliser sees the generator's first state, whose output is published.
    assert layer_seed(0, 0) % 2**64 == 0xE220A8397B1DCDAF
    seeds = [layer_seed(seed, layer) for seed in (0, 1, -1) for layer in range(50)]
    assert len(set(seeds)) == 150 and all(-(2**63) <= seed < 2**63 for seed in seeds)
