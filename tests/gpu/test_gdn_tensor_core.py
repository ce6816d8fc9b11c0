"""``tensor_core`` verify on a CUDA device: fp32 accuracy on easy and hard data, bits that no batch or tile changes."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from gdn_cases import int32, mtp_call

from replayssm.gdn_decode import gated_delta_rule_mtp as mtp
from replayssm.testing import as_bytes, poisoned, using

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def _on_the_device():
    with torch.device("cuda"):
        yield


def frozen(batch, T, sizes, *, seed=0, **options):
    """A frozen call with fp32 outputs, so that nothing hides an error."""
    H, HV, K, V = sizes
    call = mtp_call(batch, T, H, HV, K, V, dtype=options.pop("dtype", bf16), seed=seed, **options)
    return replace(call, output=call.output.float(), disable_state_update=True, backend="tensor_core")


def error(call, expected=None):
    """Norm of the error of the live outputs over that of the fp64 reference's."""
    actual = call.run()
    if expected is None:
        with using("reference"):
            expected = call.run()
    live = [row for row, _ in call.live()]
    difference = (actual.output[live].double() - expected.output[live].double()).norm()
    return float(difference / expected.output[live].double().norm())


@pytest.mark.parametrize(
    ("T", "sizes"),
    [
        (4, (16, 32, 128, 128)), (8, (16, 32, 128, 128)), (16, (2, 6, 64, 96)), (1, (1, 3, 256, 72)),
        (7, (3, 3, 33, 128)), (9, (2, 4, 96, 7)), (2, (5, 5, 1, 256)),
    ],
)  # fmt: skip
def test_outputs_have_the_error_of_fp32(T, sizes):
    assert error(frozen(3, T, sizes)) < 5e-7


@pytest.mark.parametrize(
    ("T", "dtype", "state_dtype"), [(8, f32, f32), (3, f16, f32), (8, bf16, bf16), (12, f16, f16), (4, f32, f16)]
)
def test_types_of_inputs_and_states(T, dtype, state_dtype):
    call = frozen(3, T, (2, 6, 72, 40), dtype=dtype, state_dtype=state_dtype)
    assert error(call) < 5e-7
    assert error(call.with_windows(bf16)) < 5e-7


def test_one_product_with_the_state():
    """Without a past correction an output is S q: its error is that of the product alone."""
    call = frozen(5, 1, (2, 6, 128, 64))
    call = replace(call, k=call.k * 0, A_log=call.A_log * 0 - torch.inf)
    assert error(call) < 5e-7


@pytest.mark.parametrize("spread", [6.0, 12.0])
def test_states_of_wide_range(spread):
    """Rows and columns of the state, and values, with scales over e^±spread."""
    call = frozen(3, 8, (2, 6, 128, 64))
    rows, columns = (torch.exp(spread * (2 * torch.rand(count) - 1)) for count in (64, 128))
    state = call.initial_state * rows[:, None] * columns
    call = replace(call, initial_state=state, v=(call.v.float() * rows).bfloat16())
    with using("reference"):
        expected = call.run()
    actual = call.run()
    live = [row for row, _ in call.live()]
    # Each row of the state is a problem of its own scale.
    difference = (actual.output[live].double() - expected.output[live].double()).square().sum((0, 1, 2))
    assert (difference / expected.output[live].double().square().sum((0, 1, 2))).max().sqrt() < 2e-6


def test_corrections_that_nearly_cancel():
    """Nearly equal keys, beta near 1, hardly a decay, and a state that predicts the values already."""
    call = frozen(3, 8, (2, 6, 128, 64))
    k = (call.k[:, :1].float() + 1e-2 * call.k.float()).bfloat16()
    call = replace(call, k=k, b=call.b.abs() + 4, a=call.a - 8)
    assert error(call) < 2e-6
    unit = k[:, 0].float() / k[:, 0].float().norm(dim=-1, keepdim=True)
    state = call.initial_state.clone()
    for row, slot in call.live():
        key = unit[row].repeat_interleave(3, 0)
        gap = call.v[row, 0].float() - (state[slot] * key[:, None]).sum(-1)
        state[slot] += gap[:, :, None] * key[:, None]
    assert error(replace(call, initial_state=state)) < 2e-6


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("a", 100.0), ("a", -100.0), ("b", 100.0), ("b", -100.0), ("A_log", -torch.inf), ("A_log", 12.0),
        ("A_log", 88.0), ("q", 0.0), ("k", 0.0),
    ],
)  # fmt: skip
def test_extremes(name, value):
    """g = 0, below -1e4, -inf; beta 0 and 1; keys and queries of norm 0."""
    call = frozen(3, 8, (2, 6, 128, 64))
    call = replace(call, **{name: getattr(call, name) * 0 + value})
    if name != "q":
        assert error(call) < 2e-6
    else:
        assert not call.run().output[:2].any()


@pytest.mark.parametrize("norm", [1e-3, 1e3])
@pytest.mark.parametrize("name", ["q", "k"])
def test_lengths_of_keys_and_queries(name, norm):
    call = frozen(3, 8, (2, 6, 128, 64))
    scaled = getattr(call, name) * (norm / 128**0.5)
    assert error(replace(call, **{name: scaled})) < 2e-6


def test_a_gate_that_forgets_in_the_middle():
    """Decays of 1 and 0 side by side: products of decays, where differences of logarithms would be no numbers."""
    call = frozen(3, 8, (2, 6, 128, 64))
    a = call.a.float()
    a[:, ::3] = 1e30
    a[:, 1::3] = -1e30
    assert error(replace(call, a=a, A_log=call.A_log * 0 + 40)) < 2e-6


@pytest.mark.parametrize("sizes", [(2, 6, 128, 64), (2, 6, 64, 96)])
def test_windows_have_the_bits_of_simt_and_change_no_output(sizes):
    call = frozen(3, 8, sizes)
    with_windows = call.with_windows().run()
    assert torch.equal(with_windows.output, call.run().output)
    for ours, simt in zip(with_windows.windows(), call.with_windows().run(backend="simt").windows(), strict=True):
        assert torch.equal(ours, simt)
    assert torch.equal(as_bytes(with_windows.initial_state), as_bytes(call.initial_state))


@pytest.mark.parametrize("T", [4, 8])
def test_a_request_has_the_same_bits_in_every_batch_and_order(T):
    call = frozen(257, T, (16, 32, 128, 128))
    whole = call.run().output
    for rows in ([7], [200, 3, 60], list(range(40, 20, -1)), list(range(256))):
        assert torch.equal(call.rows(rows).run().output, whole[rows])


@pytest.mark.parametrize("T", [8, 11])
def test_no_tile_changes_a_bit(monkeypatch, T):
    """What is chosen by the size of a batch or the device: reading ahead, and kernels that overlap."""
    from replayssm.gdn_decode.kernels import tensor_core

    call = frozen(3, T, (2, 6, 128, 64)).with_windows()
    chosen = tensor_core.tensor_core_tile
    expected = call.run().memory()
    for ahead, overlaps in product((True, False), (True, False)):
        monkeypatch.setattr(tensor_core, "tensor_core_tile", lambda *a, x=ahead: chosen(*a)._replace(ahead=x))
        monkeypatch.setattr(tensor_core, "overlaps", lambda device, x=overlaps: x)
        for name, memory in call.run().memory().items():
            assert torch.equal(memory, expected[name]), (name, ahead, overlaps)


def test_strides_and_index_types_change_no_bit():
    call = frozen(3, 8, (2, 6, 64, 96))
    expected = call.run().output
    apart = {name: torch.stack((getattr(call, name),) * 2, -1)[..., 0] for name in ("q", "k", "v", "a", "b")}
    apart |= {name: torch.stack((getattr(call, name),) * 3, -1)[:, 0] for name in ("A_log", "dt_bias")}
    pool = torch.stack((call.initial_state, poisoned(call.initial_state.shape, f32)), 1)[:, 0]
    packed = torch.cat((call.q, call.k), 2)  # as projections leave them
    views = {"q": packed[:, :, :2], "k": packed[:, :, 2:]}
    for changes in (apart, {"initial_state": pool}, {"initial_state_indices": call.initial_state_indices.int()}, views):
        actual = replace(call, **changes).run().output
        assert torch.equal(actual, expected), (sorted(changes), float((actual - expected).norm() / expected.norm()))


def test_a_request_full_of_nan_touches_no_other():
    call = frozen(4, 8, (2, 6, 128, 64))
    clean = call.with_windows().run()
    for name in ("q", "k", "v", "a", "b"):
        spoilt = getattr(call, name).clone()
        spoilt[1] = torch.nan
        after = replace(call, **{name: spoilt}).with_windows().run()
        assert torch.equal(after.output[[0, 2, 3]], clean.output[[0, 2, 3]])
        slots = [slot for row, slot in call.live() if row != 1]
        for window, expected in zip(after.windows(), clean.windows(), strict=True):
            assert torch.equal(window[slots], expected[slots])


def test_padding_alone_writes_nothing():
    call = frozen(3, 8, (2, 6, 128, 64))
    call = replace(call, initial_state_indices=int32([-1, -7, -1])).with_windows()
    after = call.run()
    assert all(torch.equal(a, b) for a, b in zip(after.memory().values(), call.memory().values(), strict=True))


def test_graphs_read_inputs_and_slots_anew():
    call = frozen(5, 8, (2, 6, 128, 64)).with_windows()
    call.run()
    fixed = call.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mtp(**fixed.arguments())
        mtp(**fixed.arguments())  # the second call's kernels start while the first call's end
    for seed in range(3):
        other = frozen(5, 8, (2, 6, 128, 64), seed=seed).with_windows()
        other = replace(other, initial_state_indices=other.initial_state_indices.roll(seed))
        for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias", "initial_state_indices", "initial_state", "output"):
            getattr(fixed, name).copy_(getattr(other, name))
        for window, fresh in zip(fixed.windows(), other.windows(), strict=True):
            window.copy_(fresh)
        graph.replay()
        eager = other.run()
        assert all(torch.equal(a, b) for a, b in zip(eager.memory().values(), fixed.memory().values(), strict=True))


def test_chained_calls_see_what_went_before():
    """A verify behind a write of its state and inputs: kernels that start early must not read what was there before."""
    calls = [frozen(64, 4, (16, 32, 128, 128), seed=seed) for seed in range(2)]
    expected = [call.run().output for call in calls]
    shared = frozen(64, 4, (16, 32, 128, 128), seed=2)
    for turn in range(20):
        source = calls[turn % 2]
        for name in ("initial_state", "q", "k", "v", "a", "b", "A_log", "dt_bias"):
            getattr(shared, name).copy_(getattr(source, name))
        mtp(**shared.arguments())
        assert torch.equal(shared.output, expected[turn % 2])


def test_slots_beyond_two_gigabytes_of_elements():
    call = frozen(3, 4, (1, 2, 64, 32), state_dtype=bf16)
    slots = torch.where(call.initial_state_indices < 0, -1, call.initial_state_indices + 2)
    call = replace(call, initial_state=call.initial_state.roll(2, 0), initial_state_indices=slots)
    expected = call.run().output
    memory = torch.empty((1 << 31) + (1 << 30), dtype=bf16)
    far = memory.as_strided(call.initial_state.shape, ((1 << 29) + 8, *call.initial_state.stride()[1:]))
    far.copy_(call.initial_state)
    output, _ = mtp(**replace(call, initial_state=far, output=call.output.clone()).arguments())
    assert torch.equal(output, expected)
