"""The GDN kernels under Triton's interpreter: their logic, on a machine without a GPU. ``tests/gpu`` has the bits."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: tests/gpu", allow_module_level=True)
from gdn_cases import RINGS, int32, lazy_call, mtp_call, normal, windows_of_layers

from replayssm.gdn_decode import gated_delta_rule_replayssm_commit as commit
from replayssm.gdn_decode import gated_delta_rule_replayssm_materialize as materialize
from replayssm.gdn_decode.configs import Tile
from replayssm.gdn_decode.kernels import lazy, recorded, simt
from replayssm.testing import (
    as_bytes,
    assert_close,
    output_tolerance,
    poisoned,
    state_tolerance,
    using,
)

f32, f16 = torch.float32, torch.float16
RECORDS = ("rawv_cache", "rawk_cache", "g_cache", "beta_cache")


def check(call, **changes):
    with using("kernels"):
        actual = call.run(**changes)
    with using("reference"):
        expected = call.run(**changes)
    live = [row for row, _ in call.live()]
    tolerance = output_tolerance(actual.output.dtype, call.initial_state.dtype)
    assert_close("output", normal(actual.output[live]), normal(expected.output[live]), tolerance)
    padding = [row for row in range(call.q.shape[0]) if row not in live]
    assert torch.equal(actual.output[padding], call.output[padding])
    for name in ("initial_state", "intermediate_states_buffer"):
        got, wanted = (getattr(c, name, c.options.get(name)) for c in (actual, expected))
        if got is not None:
            assert torch.equal(got.isnan(), wanted.isnan()), f"{name}: memory that is nobody's"
            assert_close(name, normal(got), normal(wanted), state_tolerance(call.initial_state.dtype))
    return actual, expected


@pytest.mark.parametrize(("T", "K", "V", "dtype", "state_dtype"), [(1, 5, 3, f32, f16), (3, 16, 33, f16, f32)])
def test_updates_write_slots_scatter_and_snapshots(T, K, V, dtype, state_dtype):
    call = mtp_call(3, T, 1, 2, K, V, dtype=dtype, state_dtype=state_dtype)
    updated, _ = check(call)
    apart, _ = check(call, output_state_indices=torch.tensor([0, -1, 2]))
    assert torch.equal(apart.initial_state[0], updated.initial_state[3])
    buffer = poisoned((3, T + 1, 2, V, K), state_dtype)
    snapped, _ = check(call, intermediate_states_buffer=buffer, disable_state_update=True)
    assert torch.equal(as_bytes(snapped.initial_state), as_bytes(call.initial_state))
    targets = torch.tensor([[4, 5, 0][:T], [2, -1, 1][:T], [0, 0, 0][:T]])
    scattered, _ = check(call, ssm_state_indices=targets)
    for t in range(T):
        assert torch.equal(scattered.initial_state[targets[0, t]], snapped.options["intermediate_states_buffer"][0, t])


@pytest.mark.parametrize("window_dtype", [f32, f16])
def test_frozen_with_windows(window_dtype):
    call = mtp_call(3, 3, 1, 3, 7, 5).with_windows(window_dtype)
    actual, expected = check(call)
    for got, wanted in zip(actual.windows()[:2], expected.windows()[:2], strict=True):
        assert torch.equal(got, wanted)
    for got, wanted in zip(actual.windows()[2:], expected.windows()[2:], strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_qk_l2norm": False},
        {"A_log": torch.tensor([-torch.inf, 12.0])},
        {"dt_bias": torch.tensor([100.0, -1e4])},
    ],
)
def test_gates_and_norms(changes):
    check(replace(mtp_call(2, 2, 2, 2, 4, 6), **changes))


def run(function, tensors, *lists, **options):
    copies = {name: t.clone() for name, t in tensors.items()}
    function(*copies.values(), *lists, **options)
    for name in RECORDS:
        assert torch.equal(as_bytes(copies[name]), as_bytes(tensors[name])), f"{name} was written"
    return copies["checkpoint_state"]


@pytest.mark.parametrize("backend", ["simt", "tensor_core"])
@pytest.mark.parametrize("state_dtype", [f32, f16])
def test_commit_with_tracking(state_dtype, backend):
    tensors = windows_of_layers(2, 7, 3, 1, 2, 6, 5, state_dtype=state_dtype)
    slots, accepts = int32([2, 1, -1, 4]), torch.tensor([3, 2, 3, 0])
    for slot, count in ((2, 3), (1, 2), (4, 0)):
        for name in RECORDS:
            tensors[name][:, slot, :, count:] = torch.nan
    track = {"track_state_indices": int32([5, 3, 6, 0]), "track_steps": int32([1, 2, 0, 0])}
    with using("kernels"):
        actual = run(commit, tensors, slots, accepts, **track, backend=backend)
    with using("reference"):
        expected = run(commit, tensors, slots, accepts, **track)
    before = tensors["checkpoint_state"]
    assert [s for s in range(7) if not torch.equal(actual[:, s], before[:, s])] == [1, 2, 5]
    assert_close("state", actual, expected, state_tolerance(state_dtype))


def test_the_window_form_of_commit_and_materialize():
    """Sixteen tokens' tiles, sizes that no tile divides, raw keys; a materialized prefix, in place and copied."""
    tensors = windows_of_layers(1, 4, 11, 2, 2, 21, 18)
    lists, options = (int32([2, 0]), int32([10, 3])), {"use_qk_l2norm": False}
    tensors["rawk_cache"] *= 0.2
    for slot, count in ((2, 10), (0, 3)):
        for name in RECORDS:
            tensors[name][:, slot, :, count:] = torch.nan
    with using("kernels"):
        committed = run(commit, tensors, *lists, **options, backend="tensor_core")
        copied = run(
            materialize, tensors, int32([2, 0]), int32([1, 0]), int32([10, 0]), **options, backend="tensor_core"
        )
    with using("reference"):
        expected = run(commit, tensors, *lists, **options)
    assert_close("state", committed, expected, state_tolerance(f32))
    assert torch.equal(copied[:, 1], committed[:, 2])
    assert torch.equal(copied[:, [0, 2, 3]], tensors["checkpoint_state"][:, [0, 2, 3]])


def test_materialize_from_a_ring():
    tensors = windows_of_layers(1, 5, 20, 1, 2, 9, 4)
    arguments = int32([0, 1, 2, 0]), int32([3, 1, 4, 0]), int32([18, 2, 0, 3])
    options = {"ring_start": int32([5, 19, 0, 0]), "null_block_id": 0}
    with using("kernels"):
        actual = run(materialize, tensors, *arguments, **options)
    with using("reference"):
        expected = run(materialize, tensors, *arguments, **options)
    assert torch.equal(actual[:, [0, 2, 3]], expected[:, [0, 2, 3]]) and torch.equal(actual[:, 4], expected[:, 2])
    assert_close("state", actual, expected, state_tolerance(f32))


def test_verify_and_commit_equal_decoding_bit_for_bit():
    call = mtp_call(1, 4, 1, 2, 6, 3)
    with using("kernels"):
        verified = call.with_windows().run()
        windows = dict(zip(RECORDS, (w[None].clone() for w in verified.windows()), strict=True))
        for window in windows.values():
            window[:, 1, :, 3:] = torch.nan
        state = call.initial_state.clone()
        commit(state[None], *windows.values(), int32([1]), int32([3]))
        single, outputs = call.clone().initial_state, []
        for t in range(3):
            step = replace(call.tokens(t, t + 1), initial_state=single).run()
            single = step.initial_state
            outputs.append(step.output)
    assert torch.equal(torch.cat(outputs, 1), verified.output[:, :3])
    assert torch.equal(as_bytes(state), as_bytes(single))


def check_lazy(call, backend):
    with using("kernels"):
        actual = call.run(backend=backend)
    with using("reference"):
        expected = call.run()
    assert torch.equal(actual.state.isnan(), expected.state.isnan())
    assert_close("state", normal(actual.state), normal(expected.state), state_tolerance(call.state.dtype))
    live = call.state_batch_indices >= 0
    assert torch.equal(actual.output[~live], call.output[~live])
    tolerance = output_tolerance(call.output.dtype, call.state.dtype)
    assert_close("output", actual.output[live], expected.output[live], tolerance)
    for name in RINGS:
        got, wanted = getattr(actual, name), getattr(expected, name)
        torch.testing.assert_close(got, wanted, atol=1e-38, rtol=2e-6, equal_nan=True)


@pytest.mark.parametrize("backend", ["simt", "tensor_core"])
@pytest.mark.parametrize(("T", "state_dtype", "ring_dtype"), [(1, f32, f32), (2, f16, f32), (2, f32, f16)])
def test_lazy_steps(T, state_dtype, ring_dtype, backend):
    window = 5
    call = lazy_call(
        (0, 3, -1, window - T, window), T, window, H=1, HV=2, K=6, V=3, spare=1, ring_dtype=ring_dtype,
        state_dtype=state_dtype,
    )  # fmt: skip
    check_lazy(call, backend)


@pytest.mark.parametrize(
    ("T", "window", "live", "K", "V"), [(1, 64, 63, 17, 9), (5, 40, 34, 6, 3), (7, 9, 2, 3, 5), (16, 16, 16, 2, 33)]
)
def test_long_windows_and_groups_of_queries(T, window, live, K, V):
    """Records in several portions, queries in several programs, and a flush of 16 records."""
    check_lazy(lazy_call((live,), T, window, H=1, HV=2, K=K, V=V, spare=1, dtype=f16), "tensor_core")


@pytest.mark.parametrize(("folders", "T"), [(0, 1), (1, 1), (2, 3)])
def test_who_flushes_changes_nothing(monkeypatch, folders, T):
    """One of the requests that flush is left to the programs that do nothing else, the other to its own."""
    monkeypatch.setattr(lazy, "_FOLDERS", folders)
    check_lazy(lazy_call((6, 2, 6), T, 6, H=1, HV=2, K=5, V=3, spare=1), "tensor_core")


@pytest.mark.parametrize("backend", ["simt", "tensor_core"])
def test_tiles_change_nothing(monkeypatch, backend):
    """Two blocks of rows in one program, the second cut off by V, against a program each."""
    call = mtp_call(1, 2, 1, 1, 9, 40)
    steps = lazy_call((5, 2), 1, 5, H=1, HV=1, K=9, V=40)
    tensors = windows_of_layers(1, 2, 3, 1, 1, 9, 40)
    results = []
    for blocks in (1, 2):
        for module, name in ((simt, "verify_tile"), (recorded, "records_tile")):
            monkeypatch.setattr(module, name, lambda *_: Tile(4, 32, blocks))  # noqa: B023
        monkeypatch.setattr(lazy, "lazy_tile", lambda *_: Tile(4, 32 * blocks, 1))  # noqa: B023
        with using("kernels"):
            updated = call.run(backend=backend)
            step = steps.run(backend=backend)
            committed = run(commit, tensors, int32([1]), int32([3]))
        states = updated.initial_state[1], step.state[steps.state_batch_indices], committed
        results.append([updated.output, step.output, *states])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)
