"""gated_delta_rule_mtp on the CPU against the fp64 token loop; where states go; what may not be touched."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from gdn_cases import WINDOWS, drawn, int32, mtp_call, normal

from replayssm.gdn_decode import gated_delta_rule_mtp
from replayssm.testing import as_bytes, assert_close, output_tolerance, poisoned, state_tolerance, using

BACKENDS = ("simt", "tensor_core")
# (batch, T, H, HV) of FlashInfer's own tests of the verify with windows.
PEER_SHAPES = (
    (1, 4, 2, 8), (1, 8, 2, 8), (2, 4, 2, 8), (4, 8, 2, 8), (17, 4, 2, 6), (256, 8, 1, 2), (257, 4, 1, 2), (2, 3, 2, 8),
    (17, 5, 2, 8), (2, 16, 2, 8), (2, 8, 3, 3),
)  # fmt: skip


def check(call, **changes):
    """Run the call on the CPU and on the reference and compare everything that it writes."""
    actual = call.run(**changes)
    with using("reference"):
        expected = call.run(**changes)
    live = call.live()
    for row in set(range(call.q.shape[0])) - {row for row, _ in live}:
        assert torch.equal(actual.output[row], call.output[row]), "output of padding"
    for row, _ in live:
        tolerance = output_tolerance(actual.output.dtype, call.initial_state.dtype)
        assert_close(f"output {row}", normal(actual.output[row]), normal(expected.output[row]), tolerance)
    tolerance = state_tolerance(call.initial_state.dtype)
    for name in ("initial_state", "intermediate_states_buffer"):
        got, wanted = (getattr(c, name, c.options.get(name)) for c in (actual, expected))
        if got is not None:
            assert torch.equal(got.isnan(), wanted.isnan()), f"{name}: memory that is nobody's"
            assert_close(name, normal(got), normal(wanted), tolerance)
    for name in WINDOWS:
        if call.options.get(name) is not None:
            got, wanted = actual.options[name], expected.options[name]
            assert torch.equal(got[call.live()[0][1] + 1 :], wanted[call.live()[0][1] + 1 :])
            exact = name in WINDOWS[:2]
            assert torch.equal(got, wanted) if exact else torch.allclose(got, wanted, atol=2e-6, rtol=2e-6), name
    return actual


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", PEER_SHAPES)
def test_frozen_with_windows(shape, backend):
    """Inputs and tolerances of FlashInfer's tests."""
    call = mtp_call(*shape, K=128, V=128, dtype=torch.bfloat16, size=0.1).with_windows()
    actual = check(call, backend=backend)
    with using("reference"):
        expected = call.run(output=torch.zeros_like(call.output, dtype=torch.float32))
    assert torch.equal(as_bytes(actual.initial_state), as_bytes(call.initial_state)), "a frozen state was written"
    for row, slot in call.live():
        assert torch.allclose(actual.output[row].float(), expected.output[row], atol=1e-4, rtol=1e-2)
        rawv, rawk, _, _ = actual.windows()
        assert torch.equal(rawv[slot], call.v[row].transpose(0, 1))
        assert torch.equal(rawk[slot], call.k[row].transpose(0, 1))
    untouched = sorted(set(range(call.initial_state.shape[0])) - {slot for _, slot in call.live()})
    for window in actual.windows():
        assert (window[untouched] == 7.0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [2, 4, 8])
def test_the_sizes_of_models(T, backend):
    call = replace(mtp_call(2, T, 16, 32, 128, 128, dtype=torch.bfloat16), scale=1.0)
    check(call, backend=backend)
    check(call, backend=backend, intermediate_states_buffer=poisoned((2, T, 32, 128, 128), torch.float32))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("windows", [True, False])
@pytest.mark.parametrize("T", [1, 2, 8])
def test_variants(T, windows, backend):
    base = mtp_call(3, T, dtype=torch.bfloat16)
    base = base.with_windows() if windows else base
    spread = {name: torch.stack((getattr(base, name),) * 2, -1)[..., 0] for name in ("q", "k", "v")}  # inner stride 2
    spread |= {name: torch.cat((getattr(base, name),) * 2, 2)[:, :, : getattr(base, name).shape[2]] for name in "ab"}
    strided_state = torch.stack((base.initial_state, poisoned(base.initial_state.shape, torch.float32)), 1)[:, 0]
    vectors = {name: torch.stack((getattr(base, name),) * 3, -1)[:, 0] for name in ("A_log", "dt_bias")}
    expected = check(base, backend=backend)
    for changes in (spread, {"initial_state": strided_state}, vectors):
        moved = check(replace(base, **changes), backend=backend)
        assert torch.equal(moved.output, expected.output)
        assert torch.equal(as_bytes(moved.initial_state), as_bytes(expected.initial_state))
    for changes in (
        {"use_qk_l2norm": False, "q": base.q / 4, "k": base.k / 4},
        {"initial_state_indices": base.initial_state_indices.int()},
        {"dt_bias": base.dt_bias.bfloat16()},
        {"a": base.a.float(), "b": base.b.half(), "A_log": base.A_log.half()},
        {"output": base.output.float()},
        {"q": base.q * 0, "k": base.k * 0},
        {"q": base.q * 1e3, "k": base.k * 1e-3},
        {"a": base.a * 0 + 100, "b": base.b * 0 - 100},
        {"a": base.a * 0 - 30, "b": base.b * 0 + 100},
        {"A_log": base.A_log * 0 - torch.inf},
        {"A_log": base.A_log * 0 + 12},
        {"scale": 1.0},
        {"scale": None},
    ):
        check(replace(base, **changes), backend=backend)
    halves = {name: getattr(base, name).half() for name in "qkv"}
    check(replace(base, **halves), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_of_states_and_inputs(dtype, state_dtype, backend):
    call = mtp_call(4, 5, dtype=dtype, state_dtype=state_dtype)
    check(call, backend=backend)
    buffer = poisoned((5, 7, 6, 11, 16), state_dtype)
    check(replace(call, disable_state_update=True), intermediate_states_buffer=buffer, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 5, 7, 3), (5, 5, 1, 256), (3, 6, 256, 2), (2, 14, 33, 65)])
def test_sizes(sizes, backend):
    H, HV, K, V = sizes
    check(mtp_call(3, 6, H, HV, K, V), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_separate_write_slots(backend):
    call = mtp_call(4, 3)  # reads 4, 3, 2 and padding
    call.initial_state[:] = torch.randn_like(call.initial_state)
    after = check(call, output_state_indices=torch.tensor([5, -1, 2, 6]), backend=backend)
    changed = [slot for slot in range(7) if not torch.equal(after.initial_state[slot], call.initial_state[slot])]
    assert changed == [2, 5]  # a negative slot skips the write, and so does padding
    shared = replace(call, initial_state_indices=torch.tensor([4, 4, 4, -3]))
    forked = check(shared, output_state_indices=torch.tensor([0, 1, 6, 5]), backend=backend)
    assert torch.equal(forked.initial_state[[2, 3, 4, 5]], call.initial_state[[2, 3, 4, 5]])


def test_write_slots_mean_nothing_where_nothing_is_written_after_the_last_token():
    call, elsewhere = mtp_call(4, 3), torch.tensor([5, 5, 99, -2])  # slots that no update would take
    scatter = torch.tensor([[5, 4, -1], [-1, 3, 6], [0, -1, 2], [1, 1, 1]])
    for frozen_or_scattered in (call.with_windows(), replace(call, options={"ssm_state_indices": scatter})):
        with_slots, without = frozen_or_scattered.run(output_state_indices=elsewhere), frozen_or_scattered.run()
        for name, memory in without.memory().items():
            assert torch.equal(with_slots.memory()[name], memory), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("batch", "T"), [(1, 2), (3, 4), (5, 8)])
def test_scatter_equals_snapshots_equals_updates(batch, T, backend):
    call = mtp_call(batch, T)
    slots = batch + 3 + batch * T
    pool = poisoned((slots, 6, 11, 16), torch.float32)
    pool[: batch + 3] = call.initial_state
    call = replace(call, initial_state=pool, backend=backend)
    targets = (torch.randperm(batch * T) + batch + 3).view(batch, T)
    targets[0, 0] = call.initial_state_indices[0]  # the slot that is read may be one of them
    targets[-1, 1] = -1
    scattered = check(call, ssm_state_indices=targets.int())
    buffer = poisoned((batch, T, 6, 11, 16), torch.float32)
    snapped = check(call, intermediate_states_buffer=buffer)
    frozen = call.run(intermediate_states_buffer=buffer, disable_state_update=True)
    assert torch.equal(as_bytes(frozen.initial_state), as_bytes(pool))
    for row, slot in call.live():
        states = snapped.options["intermediate_states_buffer"][row]
        for t in range(T):
            if targets[row, t] >= 0:
                assert torch.equal(scattered.initial_state[targets[row, t]], states[t])
            if backend == "simt":
                part = call.tokens(0, t + 1).run()
                assert torch.equal(part.initial_state[slot], states[t])
        assert torch.equal(frozen.options["intermediate_states_buffer"][row], states)
        assert torch.equal(snapped.initial_state[slot], states[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(2, 6, 16, 11), (1, 2, 128, 64), (3, 3, 7, 5), (1, 1, 1, 1), (2, 2, 33, 1)])
def test_every_split_of_the_tokens_has_the_same_bits(sizes, dtype):
    call = mtp_call(3, 16, *sizes, dtype=dtype)
    whole = call.run()
    generator = torch.Generator("cpu").manual_seed(1)
    for _ in range(6):
        cuts = sorted({0, 16, *drawn(torch.randint, 1, 16, (3,), generator=generator).tolist()})
        state, outputs = call.initial_state.clone(), []
        for first, end in pairwise(cuts):
            part = replace(call.tokens(first, end), initial_state=state).run()
            state = part.initial_state
            outputs.append(part.output)
        assert torch.equal(torch.cat(outputs, 1), whole.output)
        assert torch.equal(as_bytes(state), as_bytes(whole.initial_state))


@pytest.mark.parametrize("sizes", [(2, 6, 128, 64), (1, 1, 256, 3)])
def test_simt_has_the_same_bits_on_any_number_of_threads(sizes):
    call = mtp_call(2, 5, *sizes)
    one = call.run()
    try:
        torch.set_num_threads(2)
        two = call.run()
    finally:
        torch.set_num_threads(1)
    assert torch.equal(two.output, one.output)
    assert torch.equal(as_bytes(two.initial_state), as_bytes(one.initial_state))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(2, 6, 16, 11), (1, 3, 65, 33)])
def test_a_request_has_the_same_bits_in_any_batch_order_and_memory(sizes, backend):
    call = replace(mtp_call(6, 5, *sizes), backend=backend)
    whole = call.run()
    for rows in ([0], [3], [2, 4], [4, 3, 2, 1, 0]):
        part = call.rows(rows).run()
        assert torch.equal(part.output, whole.output[rows])
        for slot in call.initial_state_indices[rows].tolist():
            assert torch.equal(part.initial_state[slot], whole.initial_state[slot])
    for shift in (1, 2, 3):
        wide = poisoned((call.initial_state.numel() + shift,), torch.float32)
        state = wide[shift:].view(call.initial_state.shape).copy_(call.initial_state)
        output, _ = gated_delta_rule_mtp(**{**call.arguments(), "initial_state": state, "output": None})
        assert torch.equal(output[:-1], whole.output[:-1]) and not output[-1].any()
        assert torch.equal(as_bytes(state), as_bytes(whole.initial_state))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_one_request_leaves_the_others_alone(backend):
    call = replace(mtp_call(4, 3).with_windows(), backend=backend)
    expected = call.run()
    poison = call.clone()
    poison.initial_state[3] = torch.nan
    poison.v[1] = torch.nan
    poison = poison.run()
    assert poison.output[1].isnan().any()
    assert torch.equal(poison.output[[0, 2, 3]], expected.output[[0, 2, 3]])
    for got, wanted in zip(poison.windows(), expected.windows(), strict=True):
        assert torch.equal(got[[0, 1, 2, 4]], wanted[[0, 1, 2, 4]])


def test_simt_outputs_do_not_see_later_tokens():
    call = mtp_call(2, 4)
    poison = call.clone()
    poison.v[:, 2:], poison.k[:, 3:] = torch.nan, torch.inf
    assert torch.equal(poison.run().output[0, :2], mtp_call(2, 4).run().output[0, :2])


@pytest.mark.parametrize("window_dtype", [torch.bfloat16, torch.float16])
def test_narrow_windows_round_what_is_used(window_dtype):
    """What a later commit reads is what the outputs were computed from."""
    call = mtp_call(3, 4)
    narrow = check(call.with_windows(window_dtype))
    rounded = replace(call, k=call.k.to(window_dtype).float(), v=call.v.to(window_dtype).float())
    assert torch.equal(narrow.output, rounded.with_windows().run().output)
    assert not torch.equal(narrow.output, call.with_windows().run().output)


def test_windows_do_not_change_the_output():
    call = mtp_call(3, 4, dtype=torch.bfloat16)
    assert torch.equal(call.with_windows().run().output, replace(call, disable_state_update=True).run().output)


def test_all_padding_and_no_requests():
    call = replace(mtp_call(2, 3).with_windows(), initial_state_indices=int32([-1, -7]))
    before = call.memory()
    assert all(torch.equal(before[name], after) for name, after in call.run().memory().items())
    empty = mtp_call(2, 3).rows([])
    assert empty.run().output.shape == (0, 3, 6, 11)


def test_output_is_allocated_with_zeros_for_padding():
    call = replace(mtp_call(3, 2, dtype=torch.bfloat16), output=None)
    after = call.run()
    assert after.output.dtype == torch.bfloat16 and not after.output[2].any() and after.output[:2].all()


def test_none_freezes_with_a_warning():
    call = replace(mtp_call(2, 3), disable_state_update=None)
    with pytest.warns(FutureWarning, match="disable_state_update=None means True"):
        after = call.run()
    assert torch.equal(as_bytes(after.initial_state), as_bytes(call.initial_state))
