"""Commit and materialize on recorded windows: prefixes, tracking, no-ops, chains, and equality with decoding."""

from dataclasses import replace

import pytest
import torch
from gdn_cases import WINDOWS, drawn, int32, mtp_call, windows_of_layers

from replayssm.gdn_decode import gated_delta_rule_replayssm_commit as commit
from replayssm.gdn_decode import gated_delta_rule_replayssm_materialize as materialize
from replayssm.testing import Tolerance, as_bytes, assert_close, lifecycle, state_tolerance, using

BACKENDS = ("simt", "tensor_core")
FP32 = Tolerance(0.0, 32 * 2.0**-24)
RECORDS = ("rawv_cache", "rawk_cache", "g_cache", "beta_cache")


def run(function, tensors, *args, **options):
    """The op on copies; the copies are returned, the windows must not have changed."""
    copies = {name: t.clone() for name, t in tensors.items()}
    assert function(**copies, **dict(zip(NAMES[function], args, strict=True)), **options) is None
    for name in RECORDS:
        assert torch.equal(as_bytes(copies[name]), as_bytes(tensors[name])), f"{name} was written"
    return copies["checkpoint_state"]


NAMES = {commit: ("state_indices", "accept_lens"), materialize: ("src_slots", "dst_slots", "prefix_lens")}


def poison_beyond(tensors, slots, counts):
    """NaN in every row of a window that was not accepted."""
    for slot, count in zip(slots, counts, strict=True):
        for name in RECORDS:
            tensors[name][:, slot, :, count:] = torch.nan


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("T", [1, 4, 8])
def test_two_rounds_of_every_prefix(T, track, norm, backend):
    slots, layers = 2 * T + 6, 2
    tensors = windows_of_layers(layers, slots, T, H=2, HV=8, K=128, V=64, dtype=torch.bfloat16, size=0.1)
    state_indices = int32([*range(1, T + 2), T + 2, -1])
    accept_lens = int32([*range(T + 1), 0, T])
    options = {"use_qk_l2norm": norm, "backend": backend}
    if track:  # null, out of the prefix, in between, last; accept 0 and null rows never track
        places = [T + 3 + i for i in range(T + 1)]
        steps = [max(0, count - 1 - row % 2) for row, count in enumerate(range(T + 1))]
        places[-1], steps[min(1, T)] = -1, T
        options |= {"track_state_indices": int32([*places, 0, 0]), "track_steps": int32([*steps, 0, 0])}
    expected = {name: t.clone() for name, t in tensors.items()}
    for round in range(2):
        fresh = windows_of_layers(layers, slots, T, H=2, HV=8, K=128, V=64, dtype=torch.bfloat16, size=0.1, seed=round)
        for name in RECORDS:
            tensors[name], expected[name] = fresh[name].clone(), fresh[name]
        poison_beyond(tensors, state_indices.tolist()[:-1], accept_lens.tolist()[:-1])
        before = tensors["checkpoint_state"]
        after = run(commit, tensors, state_indices, accept_lens, **options)
        with using("reference"):
            expected["checkpoint_state"] = run(commit, expected, state_indices, accept_lens, **options)
        assert torch.allclose(after, expected["checkpoint_state"], atol=2e-6, rtol=1e-5)
        changed = {slot for slot in range(slots) if not torch.equal(after[:, slot], before[:, slot])}
        live = {slot for slot, n in zip(state_indices.tolist(), accept_lens.tolist(), strict=True) if slot > 0 and n}
        tracked = set()
        if track:
            rows = zip(places, steps, range(T + 1), strict=True)
            tracked = {place for place, step, count in rows if place >= 0 and step < count}
        assert changed == live | tracked
        tensors["checkpoint_state"] = after


@pytest.mark.parametrize("null_block_id", [-1, 0, 2])
def test_null_block(null_block_id):
    tensors = windows_of_layers(3, 5, 4)
    tensors["checkpoint_state"][:, 4] = torch.nan
    options = {
        "null_block_id": null_block_id,
        "track_state_indices": int32([-1, 0, 4]),
        "track_steps": int32([0, 2, 1]),
    }
    indices, accepts = int32([2, 1, 3]), int32([4, 3, 2])
    after = run(commit, tensors, indices, accepts, **options)
    before = tensors["checkpoint_state"]
    changed = [slot for slot in range(4) if not torch.equal(after[:, slot], before[:, slot])]
    assert changed == {-1: [0, 1, 2, 3], 0: [1, 2, 3], 2: [3]}[null_block_id]
    assert after[:, 4].isfinite().all()


@pytest.mark.parametrize("checked", ["0", "1"])
def test_slots_of_requests_that_accept_nothing_are_not_looked_at(checked, monkeypatch):
    """Twice the slot of a live request, one beyond the pool, tracked ones too."""
    monkeypatch.setenv("REPLAYSSM_CHECK", checked)
    tensors = windows_of_layers(2, 5, 4)
    alone = run(commit, tensors, int32([3]), int32([2]))
    track = {"track_state_indices": int32([9, 3, 0, -1]), "track_steps": int32([0, 0, 0, 0])}
    after = run(commit, tensors, int32([3, 9, 1, 3]), int32([0, 0, 0, 2]), **track)
    assert torch.equal(after, alone)


def test_only_accepted_tokens_are_tracked():
    tensors = windows_of_layers(1, 8, 4)
    track = {"track_state_indices": int32([3, 4, 5, 6]), "track_steps": int32([-1, 1, 2, 3])}
    after = run(commit, tensors, int32([0, 1, 2, 7]), int32([2, 2, 2, 2]), **track)
    before = tensors["checkpoint_state"]
    changed = [slot for slot in range(8) if not torch.equal(after[:, slot], before[:, slot])]
    assert changed == [0, 1, 2, 4, 7]  # of the steps -1, 1, 2, 3 only 1 lies within two tokens
    assert torch.equal(after[:, 4], after[:, 1])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_types_and_strides(backend, state_dtype, index_dtype):
    tensors = windows_of_layers(2, 6, 5, state_dtype=state_dtype, dtype=torch.float16)
    arguments = torch.tensor([3, 1, 5], dtype=index_dtype), torch.tensor([5, 0, 2], dtype=index_dtype)
    after = run(commit, tensors, *arguments, backend=backend)
    with using("reference"):
        expected = run(commit, tensors, *arguments, backend=backend)
    assert_close("state", after, expected, state_tolerance(state_dtype))
    # Layers inside of slots, slots a few elements apart, indices with gaps.
    strided = {}
    for name, tensor in tensors.items():
        wide = tensor.new_full((6, 4, *tensor.shape[2:]), torch.nan)
        strided[name] = wide.transpose(0, 1)[1:3]
        strided[name].copy_(tensor)
    gaps = [torch.stack((index, index + 77), -1)[:, 0] for index in arguments]
    commit(**strided, state_indices=gaps[0], accept_lens=gaps[1], backend=backend)
    assert torch.equal(strided["checkpoint_state"], after)


def test_nothing_to_do():
    tensors = windows_of_layers(2, 3, 4)
    for indices, accepts in (([], []), ([1], [0]), ([-1, -5], [4, 4])):
        assert torch.equal(run(commit, tensors, int32(indices), int32(accepts)), tensors["checkpoint_state"])
    none = int32([])
    assert torch.equal(
        run(commit, tensors, none, none, track_state_indices=none, track_steps=none), tensors["checkpoint_state"]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(2, 6, 16, 11), (1, 2, 64, 128), (1, 3, 5, 1)])
def test_committing_what_verify_computed_is_decoding_token_by_token_bit_for_bit(sizes, dtype):
    call = mtp_call(1, 16, *sizes, dtype=dtype)
    state, position = call.initial_state.clone(), 0
    while position < 12:
        T = (3, 1, 4, 2)[position % 4]
        accepted = min((2, 1, 0 if position == 4 else 3, 2)[position % 4], T) or 1
        part = replace(call.tokens(position, position + T), initial_state=state).with_windows()
        verified = part.run()
        windows = dict(zip(RECORDS, (w[None] for w in verified.windows()), strict=True))
        poison_beyond(windows, [1], [accepted])
        commit(state[None], *windows.values(), int32([1]), int32([accepted]))
        position += accepted
        token_by_token = call.clone().initial_state
        for t in range(position):
            single = replace(call.tokens(t, t + 1), initial_state=token_by_token).run()
            token_by_token = single.initial_state
        assert torch.equal(single.output[:, -1], verified.output[:, accepted - 1])
        assert torch.equal(as_bytes(state), as_bytes(token_by_token))
    assert position >= 12


@pytest.mark.parametrize("backend", BACKENDS)
def test_commit_equals_snapshots(backend):
    """SGLang's check of the fold, K = V = 64: 2.4e-7 from the snapshot of the same token."""
    call = replace(mtp_call(4, 4, 4, 8, 64, 64, size=0.1), backend=backend)
    snapshots = torch.zeros(4, 4, 8, 64, 64)
    expected = call.run(intermediate_states_buffer=snapshots, disable_state_update=True)
    windows = [w[None] for w in call.with_windows().run().windows()]
    state = call.initial_state.clone()
    commit(state[None], *windows, call.initial_state_indices, int32([2, 4, 1, 3]), backend=backend)
    for row, count in enumerate([2, 4, 1]):
        snapshot = expected.options["intermediate_states_buffer"][row, count - 1]
        difference = (state[4 - row] - snapshot).abs().max()
        assert difference == 0.0 if backend == "simt" else difference <= 2.4e-7
    assert torch.equal(as_bytes(state[0]), as_bytes(call.initial_state[0]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_thousand_rounds_of_random_accepts(backend):
    """Against one fp64 recurrence over all accepted tokens: the error of fp32 does not grow."""
    T, sizes = 4, {"H": 1, "HV": 2, "K": 16, "V": 9}
    tensors = windows_of_layers(1, 1, T, **sizes)
    exact = {name: t.clone() for name, t in tensors.items()}
    exact["checkpoint_state"] = S = tensors["checkpoint_state"][0, 0].double()
    from replayssm.delta_rule.reference import advance, unit

    g = torch.Generator("cpu").manual_seed(3)
    for _, accepted in lifecycle(seed=0, rounds=1000, max_tokens=T):
        for name in RECORDS[:2]:
            tensors[name].copy_(drawn(torch.randn, tensors[name].shape, generator=g))
        tensors["g_cache"].copy_(-0.05 * drawn(torch.rand, tensors["g_cache"].shape, generator=g))
        tensors["beta_cache"].copy_(drawn(torch.rand, tensors["beta_cache"].shape, generator=g))
        v, k, gate, beta = (tensors[name][0, 0] for name in RECORDS)
        for t in range(accepted):
            S = advance(S, unit(k[:, t], True), v[:, t], gate[:, t, None], beta[:, t])
        commit(**tensors, state_indices=int32([0]), accept_lens=int32([accepted]), backend=backend)
    assert_close("state", tensors["checkpoint_state"][0, 0], S, FP32)


def test_a_corrupted_key_is_noticed():
    tensors = windows_of_layers(1, 2, 4)
    after = run(commit, tensors, int32([1]), int32([3]))
    tensors["rawk_cache"][0, 1, 0, 1, 3] += 0.5
    assert (run(commit, tensors, int32([1]), int32([3])) - after).abs().max() > 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_and_layers_have_their_bits_alone(backend):
    tensors = windows_of_layers(3, 6, 5)
    indices, accepts = int32([4, 1, 5, 2]), int32([5, 2, 1, 4])
    whole = run(commit, tensors, indices, accepts, backend=backend)
    order = [2, 0, 3, 1]
    assert torch.equal(run(commit, tensors, indices[order], accepts[order], backend=backend), whole)
    alone = run(commit, tensors, indices[1:2], accepts[1:2], backend=backend)
    assert torch.equal(alone[:, 1], whole[:, 1])
    layer = {name: t[1:2] for name, t in tensors.items()}
    assert torch.equal(run(commit, layer, indices, accepts, backend=backend), whole[1:2])
    poison = {name: t.clone() for name, t in tensors.items()}
    poison["rawv_cache"][:, 4] = torch.nan
    after = run(commit, poison, indices, accepts, backend=backend)
    assert after[:, 4].isnan().all() and torch.equal(after[:, [0, 1, 2, 3, 5]], whole[:, [0, 1, 2, 3, 5]])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("accepted", [1, 6, 8])
def test_where_memory_starts_does_not_matter(accepted, backend):
    tensors = windows_of_layers(2, 3, 8, H=1, HV=3, K=65, V=33)
    indices, accepts = int32([2]), int32([accepted])
    expected = run(commit, tensors, indices, accepts, backend=backend)
    for shift in (1, 2, 3, 4):
        moved = {}
        for name, tensor in tensors.items():
            wide = torch.full((tensor.numel() + shift,), torch.nan)
            moved[name] = wide[shift:].view(tensor.shape).copy_(tensor)
        commit(**moved, state_indices=indices, accept_lens=accepts, backend=backend)
        assert torch.equal(moved["checkpoint_state"], expected)


def test_layers_and_slots_beyond_two_gigabytes_of_elements():
    tensors = windows_of_layers(2, 3, 2, H=1, HV=2, K=4, V=3, state_dtype=torch.bfloat16)
    indices, accepts = int32([2, 0]), int32([2, 1])
    expected = run(commit, tensors, indices, accepts)
    memory = torch.empty((1 << 31) + (1 << 30), dtype=torch.bfloat16)  # reserved by the system, not filled
    far = memory.as_strided((2, 3, 2, 3, 4), (1 << 31, 1 << 28, 12, 4, 1)).copy_(tensors["checkpoint_state"])
    commit(**{**tensors, "checkpoint_state": far}, state_indices=indices, accept_lens=accepts)
    assert torch.equal(far, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm", [True, False])
def test_materialize_writes_what_a_commit_would(norm, backend):
    slots, T = 12, 4
    tensors = windows_of_layers(2, slots, T, state_dtype=torch.float32, dtype=torch.bfloat16, size=0.5)
    sources, prefixes = [3, 3, 1, 5, 6, -1, 2], [0, 2, 4, 1, 3, 1, 2]
    targets = [7, 8, 9, 5, 10, 11, -1]  # 5 in place; the last two are skipped
    for slot in (1, 2, 5, 6):
        poison_beyond(tensors, [slot], [max(p for s, p in zip(sources, prefixes, strict=True) if s == slot)])
    for slot in (7, 8, 9, 10):
        tensors["checkpoint_state"][:, slot] = torch.nan
    options = {"use_qk_l2norm": norm, "backend": backend}
    before = tensors["checkpoint_state"]
    after = run(materialize, tensors, int32(sources), int32(targets), int32(prefixes), **options)
    for source, target, prefix in zip(sources[:5], targets[:5], prefixes[:5], strict=True):
        committed = run(commit, tensors, int32([source]), int32([prefix]), **options)
        assert torch.equal(after[:, target], committed[:, source])
    assert torch.equal(after[:, 7], before[:, 3])
    rest = [0, 1, 2, 3, 4, 6, 11]
    assert torch.equal(after[:, rest], before[:, rest])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [5, 80])
def test_materialize_from_a_ring(rows, backend):
    """The same bits wherever the ring starts; rows that are not live hold NaN."""
    tensors = windows_of_layers(2, 5, rows)
    starts, counts = [rows - 2, 1, 0], [4, 3, rows if rows < 80 else 64]
    straight = {name: t.clone() for name, t in tensors.items()}
    for slot, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for name in RECORDS:
            straight[name][:, slot] = tensors[name][:, slot].roll(-start, 2)
            dead = [row for row in range(rows) if (row - start) % rows >= count]
            tensors[name][:, slot, :, dead] = torch.nan
        for name in RECORDS:
            straight[name][:, slot, :, count:] = torch.nan
    lists = int32([0, 1, 2]), int32([3, 1, 4]), int32(counts)
    after = run(materialize, tensors, *lists, ring_start=int32(starts), backend=backend)
    expected = run(materialize, straight, *lists, ring_start=int32([0, 0, 0]), backend=backend)
    assert torch.equal(after, expected) and not torch.equal(after[:, 1], tensors["checkpoint_state"][:, 1])
    with using("reference"):
        exact = run(materialize, tensors, *lists, ring_start=int32(starts))
    assert_close("state", after, exact, FP32)
    if rows <= 16:
        assert torch.equal(run(materialize, straight, *lists, backend=backend), expected)


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16])
def test_materialize_against_the_reference_and_null_block(state_dtype):
    tensors = windows_of_layers(2, 7, 3, state_dtype=state_dtype)
    arguments = int32([1, 0, 2, 4]), int32([5, 6, 0, 3]), int32([3, 2, 1, 0])
    after = run(materialize, tensors, *arguments, null_block_id=0)
    with using("reference"):
        expected = run(materialize, tensors, *arguments, null_block_id=0)
    assert_close("state", after, expected, state_tolerance(state_dtype))
    rest = [0, 1, 2, 4, 6]
    assert torch.equal(after[:, rest], tensors["checkpoint_state"][:, rest])
    assert torch.equal(after[:, 3], tensors["checkpoint_state"][:, 4])


def test_windows_are_those_that_verify_writes():
    call = mtp_call(2, 3).with_windows().run()
    assert [tuple(w.shape[1:]) for w in call.windows()] == [(6, 3, 11), (2, 3, 16), (6, 3), (6, 3)]
    assert set(call.options) == {"cache_replayssm", *WINDOWS}
