"""Commit and materialize on the ``tensor_core`` backend of a CUDA device: error, bits, and what must not be touched."""

import pytest
import torch
from gdn_cases import int32, windows_of_layers
from test_gdn_commit import RECORDS, poison_beyond, run

from replayssm.gdn_decode import gated_delta_rule_replayssm_commit as commit
from replayssm.gdn_decode import gated_delta_rule_replayssm_materialize as materialize
from replayssm.testing import as_bytes, assert_close, state_tolerance, using

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
OURS = {"backend": "tensor_core"}


@pytest.fixture(autouse=True)
def _on_the_device():
    with torch.device("cuda"):
        yield


def windows(layers, slots, T, *sizes, seed=7, **dtypes):
    return windows_of_layers(layers, slots, T, *sizes, seed=seed, **{"dtype": bf16, **dtypes})


def error(actual, expected):
    """The largest relative error (norm) of the state of one head."""
    difference = (actual.double() - expected.double()).flatten(3).norm(dim=3)
    return float((difference / expected.double().flatten(3).norm(dim=3)).max())


def against_reference(tensors, *lists, function=commit, **options):
    """The error; slots that the reference leaves alone must keep their bits."""
    with using("reference"):
        expected = run(function, tensors, *lists, **options)
    actual = run(function, tensors, *lists, **options, **OURS)
    before = tensors["checkpoint_state"]
    for slot in range(before.shape[1]):
        if torch.equal(as_bytes(expected[:, slot]), as_bytes(before[:, slot])):
            assert torch.equal(as_bytes(actual[:, slot]), as_bytes(before[:, slot])), slot
    return error(actual, expected)


@pytest.mark.parametrize(
    ("T", "sizes"),
    [
        (8, (2, 6, 128, 128)), (4, (3, 3, 128, 128)), (16, (2, 6, 64, 96)), (11, (1, 3, 256, 72)), (1, (1, 3, 33, 128)),
        (9, (2, 4, 96, 7)), (2, (5, 5, 1, 256)), (8, (1, 2, 64, 32)), (12, (2, 6, 72, 40)), (7, (2, 6, 100, 90)),
    ],
)  # fmt: skip
def test_states_have_the_error_of_fp32(T, sizes):
    tensors = windows(2, 6, T, *sizes)
    slots, counts = [4, 1, 2, -1], [T, max(1, T // 2), 0, T]
    poison_beyond(tensors, slots[:3], counts[:3])
    assert against_reference(tensors, int32(slots), int32(counts)) < 4e-7


@pytest.mark.parametrize("T", [8, 13])
def test_tracking(T):
    tensors = windows(2, 9, T, 2, 6, 128, 64)
    slots, counts = [4, 1, 2, 0], [T, 3, 0, 1]
    poison_beyond(tensors, slots, counts)
    for places, steps in (([5, 6, 7, 8], [2, 2, 0, 0]), ([5, -1, 7, 8], [T - 1, 1, 0, 1])):
        track = {"track_state_indices": int32(places), "track_steps": int32(steps)}
        assert against_reference(tensors, int32(slots), int32(counts), **track) < 4e-7
    # The last accepted token's state is the committed one, to the bit.
    track = {"track_state_indices": int32([5, 6, 7, 8]), "track_steps": int32([T - 1, 2, 0, 0])}
    after = run(commit, tensors, int32(slots), int32(counts), **track, **OURS)
    assert torch.equal(after[:, [5, 6, 8]], after[:, [4, 1, 0]])


@pytest.mark.parametrize("null_block_id", [-1, 0, 2])
def test_null_block_and_raw_keys(null_block_id):
    tensors = windows(2, 6, 4, 2, 6, 128, 64)
    tensors["rawk_cache"] *= 0.1
    lists, track = (int32([2, 0, 3, 1]), int32([4, 3, 2, 1])), {"track_steps": int32([1, 0, 1, 0])}
    track["track_state_indices"] = int32([4, 5, 0, -1] if null_block_id == 2 else [4, 5, -1, -1])
    options = {"null_block_id": null_block_id, "use_qk_l2norm": False, **track}
    assert against_reference(tensors, *lists, **options) < 4e-7


@pytest.mark.parametrize("state_dtype", [bf16, f16])
def test_types_of_states(state_dtype):
    tensors = windows(2, 6, 5, 2, 6, 128, 64, state_dtype=state_dtype)
    lists = int32([4, 1, -1]), int32([5, 2, 1])
    with using("reference"):
        expected = run(commit, tensors, *lists)
    assert_close("state", run(commit, tensors, *lists, **OURS), expected, state_tolerance(state_dtype))


def test_materialize_has_the_bits_of_a_commit():
    slots, T = 12, 8
    tensors = windows(2, slots, T, 2, 6, 128, 64)
    sources, prefixes, targets = [3, 3, 1, 5, 6, -1, 2], [0, 2, 8, 1, 3, 1, 2], [7, 8, 9, 5, 10, 11, -1]
    for slot in (1, 2, 3, 5, 6):
        poison_beyond(tensors, [slot], [max(p for s, p in zip(sources, prefixes, strict=True) if s == slot)])
    tensors["checkpoint_state"][0, 3, 0, 0, :2] = torch.tensor([-0.0, torch.nan])
    after = run(materialize, tensors, int32(sources), int32(targets), int32(prefixes), **OURS)
    before = tensors["checkpoint_state"]
    assert torch.equal(as_bytes(after[:, 7]), as_bytes(before[:, 3]))
    for source, target, prefix in list(zip(sources, targets, prefixes, strict=True))[2:5]:
        committed = run(commit, tensors, int32([source]), int32([prefix]), **OURS)
        assert torch.equal(after[:, target], committed[:, source])
    rest = [0, 1, 2, 3, 4, 6, 11]
    assert torch.equal(as_bytes(after[:, rest]), as_bytes(before[:, rest]))


def test_rings_and_other_windows_are_applied_token_by_token():
    tensors = windows(2, 6, 6, 2, 6, 128, 64)
    lists = int32([1, 2]), int32([4, 0]), int32([5, 3])
    ring = {"ring_start": int32([4, 0])}
    ours, simt = (run(materialize, tensors, *lists, **ring, backend=name) for name in ("tensor_core", "simt"))
    assert torch.equal(ours, simt)
    wide = {name: t.half() if t.dtype == bf16 else t for name, t in tensors.items()}
    assert torch.equal(*(run(commit, wide, int32([1]), int32([4]), backend=name) for name in ("tensor_core", "simt")))


def test_bits_depend_on_the_request_alone():
    """Batch, order, slot, layers, strides, neighbours and rows beyond the accepted ones change no bit."""
    tensors = windows(3, 140, 8, 2, 6, 128, 128)
    slots = torch.randperm(140)[:130].tolist()
    counts = [1 + row % 8 for row in range(130)]
    whole = run(commit, tensors, int32(slots), int32(counts), **OURS)
    for rows in ([7], [100, 3, 60], list(range(129, 0, -1))):
        here = [slots[row] for row in rows]
        part = run(commit, tensors, int32(here), int32([counts[row] for row in rows]), **OURS)
        assert torch.equal(part[:, here], whole[:, here])
    layer = {name: t[1:2] for name, t in tensors.items()}
    assert torch.equal(run(commit, layer, int32(slots), int32(counts), **OURS), whole[1:2])
    spoilt = {name: t.clone() for name, t in tensors.items()}
    poison_beyond(spoilt, slots, counts)
    spoilt["rawv_cache"][:, slots[5]] = torch.nan
    after = run(commit, spoilt, int32(slots), int32(counts), **OURS)
    others = [slot for slot in range(140) if slot != slots[5]]
    assert after[:, slots[5]].isnan().all() and torch.equal(after[:, others], whole[:, others])
    apart = {}
    for name, tensor in tensors.items():
        wide = tensor.new_full((140, 4, *tensor.shape[2:]), torch.nan)
        apart[name] = wide.transpose(0, 1)[1:].copy_(tensor)
    commit(**apart, state_indices=torch.tensor(slots), accept_lens=torch.tensor(counts), **OURS)
    assert torch.equal(apart["checkpoint_state"], whole)


def test_a_window_of_another_length_changes_no_bit():
    tensors = windows(1, 4, 8, 2, 6, 128, 64)
    shorter = {n: t if n == "checkpoint_state" else t[:, :, :, :5].contiguous() for n, t in tensors.items()}
    lists = int32([2, 1]), int32([4, 5])
    assert torch.equal(run(commit, tensors, *lists, **OURS), run(commit, shorter, *lists, **OURS))


def test_where_memory_starts_does_not_matter():
    tensors = windows(2, 3, 8, 1, 3, 64, 33)
    lists = int32([2]), int32([6])
    expected = run(commit, tensors, *lists, **OURS)
    for shift in (1, 3, 4):
        moved = {}
        for name, tensor in tensors.items():
            wide = tensor.new_full((tensor.numel() + shift,), torch.nan)
            moved[name] = wide[shift:].view(tensor.shape).copy_(tensor)
        commit(**moved, state_indices=lists[0], accept_lens=lists[1], **OURS)
        assert torch.equal(moved["checkpoint_state"], expected), shift


@pytest.mark.parametrize("gate", [0.0, -1e4, -torch.inf])
def test_extreme_gates(gate):
    tensors = windows(1, 4, 8, 2, 6, 128, 64)
    tensors["g_cache"][..., ::3] = gate
    tensors["beta_cache"][..., 1::3] = 1.0
    tensors["rawk_cache"][..., 2, :] = 0
    assert against_reference(tensors, int32([2, 1]), int32([8, 3])) < 1e-6


def test_corrections_that_nearly_cancel():
    """Nearly equal keys, beta near 1, hardly a decay."""
    tensors = windows(1, 4, 8, 2, 6, 128, 64)
    k = tensors["rawk_cache"].float()
    tensors["rawk_cache"] = (k[..., :1, :] + 1e-2 * k).bfloat16()
    tensors["g_cache"] *= 1e-3
    tensors["beta_cache"] = 1 - 0.05 * tensors["beta_cache"]
    assert against_reference(tensors, int32([2, 1]), int32([8, 5])) < 2e-6


def test_chained_rounds_against_fp64():
    """A thousand commits of random counts: the error does not grow."""
    from replayssm.delta_rule.reference import advance, unit

    T, choose = 4, torch.Generator("cpu").manual_seed(3)
    tensors = windows(1, 1, T, 1, 2, 64, 32)
    S = tensors["checkpoint_state"][0, 0].double()
    for round in range(1000):
        fresh = windows(1, 1, T, 1, 2, 64, 32, seed=round)
        for name in RECORDS:
            tensors[name].copy_(fresh[name])
        tensors["g_cache"].mul_(0.05)
        count = int(torch.randint(1, T + 1, (1,), generator=choose, device="cpu"))
        v, k, gate, beta = (tensors[name][0, 0] for name in RECORDS)
        for t in range(count):
            S = advance(S, unit(k[:, t], True), v[:, t], gate[:, t, None], beta[:, t])
        commit(**tensors, state_indices=int32([0]), accept_lens=int32([count]), **OURS)
    assert float((tensors["checkpoint_state"][0, 0].double() - S).norm() / S.norm()) < 1e-6
