"""What the GDN kernels promise on one card: the same bits in every op, batch, tile and launch; graphs; far slots."""

from dataclasses import replace

import pytest
import torch
from gdn_cases import int32, lazy_call, mtp_call, windows_of_layers

from replayssm.gdn_decode import gated_delta_rule_checkpointing as checkpointing
from replayssm.gdn_decode import gated_delta_rule_mtp as mtp
from replayssm.gdn_decode import gated_delta_rule_replayssm_commit as commit
from replayssm.gdn_decode import gated_delta_rule_replayssm_materialize as materialize
from replayssm.testing import as_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
f32, bf16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _on_the_device():
    with torch.device("cuda"):
        yield


def decode(call, count):
    """State and outputs after ``count`` tokens, one call each."""
    state, outputs = call.initial_state.clone(), []
    for t in range(count):
        step = replace(call.tokens(t, t + 1), initial_state=state).run()
        state = step.initial_state
        outputs.append(step.output)
    return state, torch.cat(outputs, 1)


@pytest.mark.parametrize(("sizes", "dtype"), [((16, 32, 128, 128), bf16), ((1, 3, 200, 72), f32)])
def test_every_op_applies_a_token_alike(sizes, dtype):
    """Verify, its windows committed and materialized, the lazy ring and its flush: the bits of decoding."""
    H, HV, K, V = sizes
    call = replace(mtp_call(3, 11, H, HV, K, V, dtype=dtype), backend="simt")
    _, outputs = decode(call, 11)
    verified = call.with_windows().run()
    assert torch.equal(verified.output[:2], outputs[:2])
    windows = [w[None].clone() for w in verified.windows()]
    for count in (1, 4, 11):
        wanted, _ = decode(call, count)
        poisoned = [w.clone() for w in windows]
        for window in poisoned:
            window[:, :, :, count:] = torch.nan
        committed = call.initial_state.clone()
        commit(committed[None], *poisoned, call.initial_state_indices, int32([count] * 3), backend="simt")
        assert torch.equal(as_bytes(committed), as_bytes(wanted))
        stored = call.initial_state.clone()
        materialize(stored[None], *poisoned, int32([3, 2]), int32([0, 5]), int32([count, count]), backend="simt")
        assert torch.equal(stored[[0, 5]], wanted[[3, 2]])
    flushed = lazily(call, [(4, 3), (1, 1), (3, 0), (3, 3), (4, 4)], 6)
    assert torch.equal(as_bytes(flushed[0]), as_bytes(decode(call, flushed[1])[0]))
    assert torch.equal(flushed[2], outputs[:2, : flushed[2].shape[1]])


def lazily(call, steps, window):
    """State after the last flush, the tokens in it, and all accepted outputs, of both live requests."""
    slots, HV, V, K = call.initial_state.shape
    H, ring_len, dtype = call.k.shape[2], window + 6, call.k.dtype
    state = call.initial_state.clone()
    rings = [
        torch.full((slots, HV, ring_len, V), torch.nan, dtype=dtype),
        torch.full((slots, H, ring_len, K), torch.nan, dtype=dtype),
        *torch.full((2, slots, HV, ring_len), torch.nan),
    ]
    start, live, at, folded, outputs = 9, 0, 0, 0, []
    for T, accepted in steps:
        part = call.tokens(at, at + T)
        cursors = [torch.full((slots,), number, dtype=torch.int32) for number in (start, live)]
        output = checkpointing(
            state, *rings, *cursors, part.q, part.k, part.v, part.a, part.b, part.A_log, part.dt_bias, scale=call.scale,
            state_batch_indices=call.initial_state_indices, max_window=window, backend="simt",
        )  # fmt: skip
        outputs.append(output[:2, :accepted])
        if live + T > window and live:
            start, folded, live = (start + live) % ring_len, folded + live, 0
        live, at = live + accepted, at + accepted
    return state, folded, torch.cat(outputs, 1).clone()


def test_a_request_has_the_same_bits_in_every_batch():
    """One request of 32 heads and 130 of them take different tiles."""
    call = replace(mtp_call(130, 4, 16, 32, 128, 128, dtype=bf16), backend="simt")
    whole = call.run()
    for rows in ([7], list(range(128, 0, -1))):
        part = call.rows(rows).run()
        slots = call.initial_state_indices[rows]
        assert torch.equal(part.output, whole.output[rows])
        assert torch.equal(as_bytes(part.initial_state[slots]), as_bytes(whole.initial_state[slots]))
    lazy = lazy_call((7, 3, 5, 0, 8) * 26, 3, 8, H=16, HV=32, K=128, V=128, dtype=bf16)
    names = ("q", "k", "v", "a", "b", "output", "state_batch_indices")
    whole = lazy.run()
    for rows in ([4], list(range(129, 0, -1))):
        part = lazy.run(**{name: getattr(lazy, name)[rows] for name in names})
        assert torch.equal(part.output, whole.output[rows])
        slots = lazy.state_batch_indices[rows]
        assert torch.equal(as_bytes(part.state[slots]), as_bytes(whole.state[slots]))


def test_a_long_batch_of_the_ring_has_the_bits_of_a_short_one():
    """Up to 256 requests, programs of their own flush those that come first; a longer batch has none."""
    call = lazy_call((7, 3, 6, 0, 7) * 60, 1, 7, H=2, HV=6, K=64, V=32, dtype=bf16)
    whole, names = call.run(), ("q", "k", "v", "a", "b", "output", "state_batch_indices")
    for rows in ([4], list(range(250, 0, -1))):
        part = call.run(**{name: getattr(call, name)[rows] for name in names})
        slots = call.state_batch_indices[rows]
        assert torch.equal(part.output, whole.output[rows])
        assert torch.equal(as_bytes(part.state[slots]), as_bytes(whole.state[slots]))


@pytest.mark.parametrize("backend", ["simt", "tensor_core"])
def test_graphs_read_indices_and_counts_anew(backend):
    """Two steps in one graph, each verify and commit, replayed with other inputs, slots and accepted counts."""
    call = replace(mtp_call(4, 8, 2, 8, 128, 128, dtype=bf16).with_windows(), backend=backend)
    accepts = int32([0, 1, 4, 8])
    fixed = call.clone()

    def steps(c, counts):
        for _ in range(2):  # the second verify may start while the commit before it ends
            mtp(**c.arguments())
            windows = (w[None] for w in c.windows())
            commit(c.initial_state[None], *windows, c.initial_state_indices, counts, backend=backend)

    steps(call.clone(), accepts)
    graph, counts = torch.cuda.CUDAGraph(), accepts.clone()
    with torch.cuda.graph(graph):
        steps(fixed, counts)
    for round in range(3):
        other = mtp_call(4, 8, 2, 8, 128, 128, dtype=bf16, seed=round)
        eager = replace(
            call, q=other.q, k=other.k, v=other.v, a=other.a, b=other.b,
            initial_state_indices=call.initial_state_indices.roll(round),
        ).clone()  # fmt: skip
        numbers = accepts.roll(-round)
        for name in ("q", "k", "v", "a", "b", "initial_state_indices", "initial_state", "output"):
            getattr(fixed, name).copy_(getattr(eager, name))
        for window, fresh in zip(fixed.windows(), eager.windows(), strict=True):
            window.copy_(fresh)
        counts.copy_(numbers)
        graph.replay()
        steps(eager, numbers)
        assert all(torch.equal(a, b) for a, b in zip(eager.memory().values(), fixed.memory().values(), strict=True))


@pytest.mark.parametrize("backend", ["simt", "tensor_core"])
def test_layers_and_slots_beyond_32_bits(backend):
    """Slots of 2^19 elements in fp32: the last of 36 layers begin beyond 2^31."""
    layers, slots, HV, H, T = 36, 120, 32, 16, 2
    state = torch.empty(layers, slots, HV, 128, 128)  # 9 GB, filled where it is used
    live, spare = int32([119, 3]), int32([118, 0])
    for index in (119, 3, 118, 0):
        state[:, index] = torch.randn(layers, HV, 128, 128)
    rings = [
        torch.randn(layers, slots, HV, T, 128).to(bf16), torch.randn(layers, slots, H, T, 128).to(bf16),
        -torch.rand(layers, slots, HV, T), torch.rand(layers, slots, HV, T),
    ]  # fmt: skip
    near = [t[-1:, [3, 119]].contiguous() for t in (state, *rings)]
    commit(*near, int32([1, 0]), int32([2, 1]), backend=backend)
    materialize(state, *rings, live, spare, int32([2, 1]), backend=backend)
    commit(state, *rings, live, int32([2, 1]), backend=backend)
    assert torch.equal(state[-1, [3, 119]], near[0][0])
    assert torch.equal(state[:, [118, 0]], state[:, [119, 3]])


def test_tiles_that_overhang():
    """Sizes that no tile divides: thousands of heads, whose programs take several blocks, against few at a time."""
    sizes = {"H": 32, "HV": 64, "K": 33, "V": 65}
    tensors = windows_of_layers(8, 10, 3, **sizes)
    slots, counts = int32(list(range(9, 1, -1))), int32([3, 1, 2, 3, 2, 1, 3, 2])
    whole, parts = ({name: t.clone() for name, t in tensors.items()} for _ in range(2))
    commit(**whole, state_indices=slots, accept_lens=counts)
    for row in range(8):
        commit(**parts, state_indices=slots[row : row + 1], accept_lens=counts[row : row + 1])
    assert torch.equal(whole["checkpoint_state"], parts["checkpoint_state"])
    steps = lazy_call((7, 3, 5, 0, 8) * 4, 1, 8, **sizes)
    alone = {name: getattr(steps, name)[4:5] for name in ("q", "k", "v", "a", "b", "output", "state_batch_indices")}
    assert torch.equal(steps.run().output[4:5], steps.run(**alone).output)
