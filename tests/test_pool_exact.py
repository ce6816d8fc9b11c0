"""Exact layers in a pool: whatever happens to a slot, its outputs have the bits of one scan over its text."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_model import every_tensor

from replayssm.batch_invariant_decode import batch_invariant_decode_buffered_scan
from replayssm.cache import ExactMamba2Layer, GDNLayer, ReplayPool, restore, slot_bytes, snapshot
from replayssm.ssd import chunk_scan

LAYERS = [
    ExactMamba2Layer(nheads=6, headdim=5, dstate=7, ngroups=2, conv_width=4, chunk_size=16),
    ExactMamba2Layer(nheads=3, headdim=8, dstate=9, ngroups=1, conv_width=2, chunk_size=21),
]
SLOTS, MAX_TOKENS, LENGTH = 5, 4, 90


class Text:
    """Inputs of one text for every layer, and what one scan makes of them."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)

        def rand(*shape):
            return torch.randn(*shape, generator=generator)

        self.inputs, self.outputs = [], []
        for layer in LAYERS:
            H, P, N, G = layer.nheads, layer.headdim, layer.dstate, layer.ngroups
            x, dt, B, C = rand(LENGTH, H, P), rand(LENGTH, H), rand(LENGTH, G, N), rand(LENGTH, G, N)
            A, D = -rand(H).exp(), rand(H)
            self.inputs.append((x, dt, B, C, A, D))
            self.outputs.append(chunk_scan(x, dt, A, B, C, layer.chunk_size, D=D, dt_softplus=True))


TEXTS = [Text(seed) for seed in range(3)]


def make_pool():
    return ReplayPool(LAYERS, SLOTS, window=8, max_tokens=MAX_TOKENS)


def prefill(pool, slot, text, tokens):
    for index, layer in enumerate(LAYERS):
        x, dt, B, C, A, D = text.inputs[index]
        state, Q = torch.empty(1, layer.nheads, layer.headdim, layer.dstate), layer.chunk_size
        chunk_scan(x[:tokens], dt[:tokens], A, B[:tokens], C[:tokens], Q, D=D, dt_softplus=True, boundary_states=state)
        rows = slice(tokens - tokens % Q, tokens)
        conv = torch.full((1, layer.conv_channels, layer.conv_width - 1), float(tokens))
        pool.write_state(index, slot, state, conv, (x[None, rows], dt[None, rows], B[None, rows]))


def verify(pool, slots, texts, places, tokens):
    """Score ``tokens`` tokens of each text from its place on, and compare with the scan's outputs."""
    for index in range(len(LAYERS)):
        A, D = TEXTS[0].inputs[index][4:]
        parts = [
            [each[place : place + tokens] for each in text.inputs[index][:4]]
            for text, place in zip(texts, places, strict=True)
        ]
        x, dt, B, C = (torch.stack(each) for each in zip(*parts, strict=True))
        buffers = pool.buffers[index]
        y = batch_invariant_decode_buffered_scan(
            buffers.records, x, None, dt, B, C, A, D, None, torch.tensor(slots), buffers.state
        )
        for lane, (text, place) in enumerate(zip(texts, places, strict=True)):
            if slots[lane] >= 0:
                assert torch.equal(y[lane], text.outputs[index][place : place + tokens])


for text in TEXTS[1:]:  # one model, hence one A and D
    for index, layer in enumerate(LAYERS):
        x, dt, B, C, *_ = text.inputs[index]
        A, D = TEXTS[0].inputs[index][4:]
        text.inputs[index] = (x, dt, B, C, A, D)
        text.outputs[index] = chunk_scan(x, dt, A, B, C, layer.chunk_size, D=D, dt_softplus=True)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_lifecycles(data):
    pool = make_pool()
    for tensor in pool.per_slot().values():  # previous tenants
        tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
    active = {}  # slot -> (text, place)
    for _ in range(data.draw(st.integers(4, 12))):
        action = data.draw(
            st.sampled_from(["prefill", "verify", "verify", "verify", "fork", "preempt", "materialize", "free"])
        )
        if action == "prefill" and pool.num_free:
            [slot] = pool.allocate().tolist()
            text, tokens = data.draw(st.sampled_from(TEXTS)), data.draw(st.integers(1, 45))
            prefill(pool, [slot], text, tokens)
            active[slot] = (text, tokens)
        elif action == "verify" and active:
            slots = data.draw(st.lists(st.sampled_from(sorted(active)), min_size=1, unique=True))
            tokens = data.draw(st.integers(1, MAX_TOKENS))
            slots = [slot for slot in slots if active[slot][1] + tokens <= LENGTH]
            if not slots:
                continue
            accepted = [data.draw(st.integers(0, tokens)) for _ in slots]
            texts, places = zip(*(active[slot] for slot in slots), strict=True)
            verify(pool, [*slots, -1], [*texts, TEXTS[0]], [*places, 3], tokens)
            pool.commit([*slots, -1], [*accepted, 0], tokens)
            rewind = data.draw(st.integers(0, accepted[0]))
            pool.materialize(slots[:1], slots[:1], [rewind])
            for slot, text, place, kept in zip(slots, texts, places, accepted, strict=True):
                active[slot] = (text, place + kept - (rewind if slot == slots[0] else 0))
        elif action == "fork" and active and pool.num_free:
            source = data.draw(st.sampled_from(sorted(active)))
            [slot] = pool.fork([source]).tolist()
            active[slot] = active[source]
        elif action == "preempt" and active:
            slots = data.draw(st.lists(st.sampled_from(sorted(active)), min_size=1, unique=True))
            saved = snapshot(pool, slots)
            pool.free(slots)
            for tensor in pool.per_slot().values():
                tensor[slots] = float("nan") if tensor.is_floating_point() else 1
            others = data.draw(st.permutations(pool.allocate(pool.num_free).tolist()))
            pool.free(others[len(slots) :])
            restore(pool, others[: len(slots)], saved)
            active |= {new: active.pop(old) for old, new in zip(slots, others, strict=False)}
        elif action == "materialize" and len(active) > 1:
            source, target = data.draw(st.permutations(sorted(active)))[:2]
            pool.materialize([source], [target], [0])
            active[target] = active[source]
        elif action == "free" and active:
            slot = data.draw(st.sampled_from(sorted(active)))
            pool.free([slot])
            del active[slot]
    for slot, (text, place) in active.items():
        if place < LENGTH:
            verify(pool, [slot], [text], [place], 1)


def test_outputs_stay_when_slots_are_taken_forked_and_reset():
    """They lie in memory of the records, an entry for each lane of the call, which is nobody's slot."""
    pool = make_pool()
    slots = pool.allocate(3)
    inputs = TEXTS[0].inputs[0]
    x, dt, B, C = (torch.stack([each[:MAX_TOKENS]] * 3) for each in inputs[:4])
    buffers = pool.buffers[0]
    y = batch_invariant_decode_buffered_scan(
        buffers.records, x, None, dt, B, C, *inputs[4:], None, slots, buffers.state
    )
    kept = y.clone()
    assert kept.abs().min() > 0
    pool.commit(slots, [1, 2, 3], MAX_TOKENS)
    pool.free(slots[:2])
    pool.fork(slots[2:])
    pool.reset(pool.allocate(1))
    pool.materialize(slots[2:], slots[2:], [1])
    assert torch.equal(y, kept)


def test_kept_sums_go_with_their_slot():
    """A GPU keeps them, a CPU carries them along: slots have the same fields everywhere."""
    pool = make_pool()
    source, other = pool.allocate(2).tolist()
    prefill(pool, [source], TEXTS[0], 20)
    pool.buffers[0].records.sums.copy_(torch.arange(5.0)[:, None, None, None])
    pool.buffers[0].records.num_summed.copy_(torch.arange(5) + 30)
    pool.commit([source], [3], 3)
    pool.materialize([source], [other], [2])
    [forked] = pool.fork([source]).tolist()
    moved = snapshot(pool, [source])
    pool.reset([source])
    assert not pool.buffers[0].records.sums[source].any() and pool.buffers[0].records.num_summed[source] == 0
    [new] = pool.allocate().tolist()
    restore(pool, [new], moved)
    for slot in (other, forked, new):
        assert pool.buffers[0].records.num_summed[slot] == source + 30
        assert bool((pool.buffers[0].records.sums[slot] == source).all())
    assert pool.buffers[0].records.num_buffered[[other, forked]].tolist() == [20 % 16 + 1, 20 % 16 + 3]
    pool.free([forked])
    [tenant] = pool.allocate().tolist()
    pool.buffers[0].records.num_summed.fill_(30)
    prefill(pool, [tenant], TEXTS[1], 5)
    assert pool.buffers[0].records.num_summed[tenant] == 0


def test_bytes_are_those_allocated():
    pool = make_pool()
    seen = {tensor.data_ptr(): tensor.nbytes for _, tensor in every_tensor(pool)}
    assert pool.bytes() == sum(seen.values()) == SLOTS * pool.bytes_per_slot()
    cost = slot_bytes(LAYERS, window=8, max_tokens=MAX_TOKENS)
    assert cost.total == pool.bytes_per_slot()
    assert cost.state == 4 * (6 * 5 * 7 + 3 * 8 * 9)
    fields = pool.bytes_by_field()
    assert {"records.x", "records.dt", "records.num_buffered", "ring_start", "records.num_summed"} <= set(fields)
    assert fields["records.sums"] == 8 * sum(each.records.dt.numel() for each in pool.buffers)


def test_wrong_arguments():
    pool = make_pool()
    slot = pool.allocate()
    before = [tensor.clone() for _, tensor in every_tensor(pool)]
    state, conv = torch.ones(1, 6, 5, 7), torch.ones(1, 58, 3)
    for call, message in (
        (lambda: pool.write_state(0, slot, state, conv), "rows: expected them for exact layers and no others"),
        (lambda: pool.materialize(slot, slot, [0], [torch.ones(6), None]), r"A\[0\]: expected None for an exact layer"),
        (lambda: ReplayPool(LAYERS, 2, state_dtype=torch.bfloat16), "state_dtype: expected torch.float32 for exact"),
        (lambda: ReplayPool(LAYERS, 2, window=20, max_tokens=17), "max_tokens: expected at most 16 with ExactMamba2"),
        (lambda: ExactMamba2Layer(6, 5, 7, 2, 4, 15), "chunk_size: expected 16..256, got 15"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert all(torch.equal(old, new) for old, (_, new) in zip(before, every_tensor(pool), strict=True))
    mixed = ReplayPool(
        [GDNLayer(value_heads=4, value_dim=7, key_dim=5, key_heads=2, conv_width=3), LAYERS[0]], 2, max_tokens=4
    )
    rows = torch.ones(1, 0, 6, 5), torch.ones(1, 0, 6), torch.ones(1, 0, 2, 7)
    with pytest.raises(ValueError, match="rows: expected them for exact layers and no others, layer 0 is GDNLayer"):
        mixed.write_state(0, mixed.allocate(), torch.ones(1, 4, 7, 5), torch.ones(1, 48, 2), rows)
