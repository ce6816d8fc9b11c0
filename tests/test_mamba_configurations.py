"""The configurations that serving engines use this op with: 64 x 128 states, bf16 activations, windows of 8 and 16."""

from dataclasses import replace

import pytest
import torch

from replayssm.mamba import checkpointing_ssu, replayssm_materialize
from replayssm.rounding import SCALED_DTYPES, decode
from replayssm.testing import (
    STATE_DTYPES,
    as_bytes,
    assert_close,
    output_tolerance,
    random_ssu_call,
    state_tolerance,
    using,
)

SIZES = {"nheads": 4, "headdim": 64, "dstate": 128, "ngroups": 2, "dtype": torch.bfloat16}


def run(call, **options):
    call = call.clone()
    checkpointing_ssu(**{**call.arguments(), **options})
    return call


def against_reference(call, **options):
    actual = run(call, **options)
    with using("reference"):
        expected = run(call, **options)
    tolerance = output_tolerance(torch.bfloat16, call.state.dtype)
    assert_close("out", actual.out, expected.out, tolerance)
    for slot in call.state_batch_indices.tolist():
        states = [
            decode(c.state[slot], None if c.state_scale is None else c.state_scale[slot]) for c in (actual, expected)
        ]
        assert_close(f"state {slot}", *states, state_tolerance(call.state.dtype))
    return actual


def test_window_equal_to_the_step_with_every_number_of_live_rows():
    call = random_ssu_call(live=tuple(range(0, 17, 2)), seq_len=16, window=16, state_dtype=torch.bfloat16, **SIZES)
    against_reference(call)


@pytest.mark.parametrize(("seq_len", "window"), [(4, 8), (10, 16)])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16])
def test_window_longer_than_the_step(seq_len, window, state_dtype):
    live = tuple(range(0, window + 1, 2))
    against_reference(random_ssu_call(live=live, seq_len=seq_len, window=window, state_dtype=state_dtype, **SIZES))


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_mixed_flush_batch(state_dtype):
    call = random_ssu_call(live=(0, 6, 7, 10), seq_len=10, window=16, state_dtype=state_dtype, **SIZES)
    after = against_reference(call)
    kept = [torch.equal(as_bytes(after.state[s]), as_bytes(call.state[s])) for s in call.state_batch_indices.tolist()]
    assert kept == [True, True, False, False]


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize(
    ("lengths", "live", "seq_len"),
    [([3, 1, 4, 2, 4], (0, 5, 10, 12, 8), 4), ([3, 5, 8, 6, 7], (14, 15, 16, 14, 15), 8)],
    ids=["no flush", "all flush"],
)
def test_ragged_batches_equal_padded_ones(lengths, live, seq_len, state_dtype):
    call = random_ssu_call(live=live, seq_len=seq_len, window=16, state_dtype=state_dtype, **SIZES)
    padded = run(call)
    keep = [row * seq_len + i for row, length in enumerate(lengths) for i in range(length)]
    tokens = {name: getattr(call, name).flatten(0, 1)[keep][None] for name in ("x", "B", "C", "z")}
    dt = call.dt[..., :1].flatten(0, 1)[keep][None].expand(1, len(keep), 4, 64)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    ragged = run(replace(call, **tokens, dt=dt), out=None, cu_seqlens=bounds, max_seqlen=seq_len)
    out = checkpointing_ssu(
        **{**replace(call.clone(), **tokens, dt=dt).arguments(), "out": None}, cu_seqlens=bounds, max_seqlen=seq_len
    )
    assert torch.equal(out[0], padded.out.flatten(0, 1)[keep])
    for name in ("state", "state_scale"):
        if getattr(call, name) is not None:
            assert torch.equal(as_bytes(getattr(ragged, name)), as_bytes(getattr(padded, name)))


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_a_seed_changes_nothing_without_a_flush(state_dtype):
    call = random_ssu_call(live=(0, 2, 4), seq_len=4, window=8, state_dtype=state_dtype, **SIZES)
    seeded = run(call, rand_seed=torch.tensor([11]))
    assert torch.equal(as_bytes(seeded.state), as_bytes(call.state))
    assert torch.equal(seeded.out, run(call).out)


@pytest.mark.parametrize(
    ("seq_len", "window", "live"), [(10, 16, 7), (10, 16, 10), (14, 16, 14), (14, 16, 3), (1, 1, 1)]
)
@pytest.mark.parametrize("state_dtype", [d for d in STATE_DTYPES if d != torch.float32])
def test_stochastic_flush_stays_within_one_step_of_the_exact_state(seq_len, window, live, state_dtype):
    call = random_ssu_call(live=(live,), seq_len=seq_len, window=window, state_dtype=state_dtype, **SIZES)
    slot = int(call.state_batch_indices[0])
    seeded = run(call, rand_seed=torch.tensor([3]), philox_rounds=5)
    nearest = run(call)
    assert torch.equal(seeded.out, nearest.out)
    exact_state = torch.full(call.state.shape, torch.nan)
    exact_state[slot] = decode(call.state[slot], None if call.state_scale is None else call.state_scale[slot])
    exact = run(replace(call, state=exact_state, state_scale=None)).state[slot]
    scale = 1.0 if seeded.state_scale is None else seeded.state_scale[slot][..., None]
    if state_dtype in SCALED_DTYPES:
        assert torch.equal(seeded.state_scale[slot], nearest.state_scale[slot])
    error = (seeded.state[slot].float() * scale - exact).abs()
    step = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float8_e4m3fn: 2.0**-3}
    allowed = scale * 1.001 if state_dtype == torch.int8 else exact.abs() * step[state_dtype]
    floor = {torch.float8_e4m3fn: 2.0**-9, torch.float16: 2.0**-24}.get(state_dtype, 1e-6)
    assert (error <= allowed + floor * scale * 1.001).all()
    assert not torch.equal(as_bytes(seeded.state[slot]), as_bytes(nearest.state[slot]))


def test_repeated_calls_have_the_same_bits():
    call = random_ssu_call(live=(4, 12) * 4, seq_len=8, window=16, state_dtype=torch.float16, **SIZES)
    first = run(call, rand_seed=torch.tensor([3])).memory()
    for _ in range(3):
        again = run(call, rand_seed=torch.tensor([3])).memory()
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_thousands_of_requests_copy_in_one_call():
    batch, slots = 8192, 2 * 8192
    state = torch.randn(slots, 2, 3, 4).bfloat16()
    before = state.clone()
    state_ptr = torch.tensor([state.data_ptr()])
    unused, stride = torch.tensor([8]), torch.tensor([24])
    int32 = lambda values: values.to(torch.int32)  # noqa: E731
    order = torch.randperm(slots)
    replayssm_materialize(
        state_ptr, stride, unused, stride, unused, stride, unused, stride, unused, unused * 0, stride,
        int32(order[:batch])[None], int32(order[batch:])[None], torch.zeros(batch, dtype=torch.int32),
        torch.zeros(batch, dtype=torch.int32), int32(torch.arange(batch)), state_dtype=torch.bfloat16,
        input_dtype=torch.bfloat16, matrixA_dtype=torch.float32, dim=3, dstate=4, num_heads=2, heads_per_group=1,
        max_window=8, ring_buffer_len=12,
    )  # fmt: skip
    before[order[batch:]] = before[order[:batch]]
    assert torch.equal(state, before)
