"""The pool's functions one by one: bytes, slots, copies, rollback at every wrap, and errors that change nothing."""

import itertools

import pytest
import torch
from pool_model import (
    GDN,
    MAMBA2,
    MIXED,
    Decoder,
    History,
    as_bytes,
    assert_same_bytes,
    cursor_values,
    every_tensor,
    fill_pool,
    make_pool,
    poison_dead_rows,
    poison_slot,
    run,
    snapshot,
)

from replayssm.cache import CapacityError, Mamba2Layer, ReplayPool, slot_bytes
from replayssm.rounding import decode

TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}
STATE_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]
NEMOTRON_H = Mamba2Layer(nheads=128, headdim=64, dstate=128, ngroups=8, conv_width=4)


@pytest.fixture(scope="module")
def decoder():
    return Decoder()


@pytest.fixture(scope="module", params=[MAMBA2, GDN, MIXED], ids=["mamba2", "gdn", "mixed"])
def any_decoder(request):
    return Decoder(request.param)


# ---- bytes


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_bytes_are_what_is_allocated_and_what_the_plan_says(decoder, state_dtype):
    options = {"window": 5, "max_tokens": 3, "state_dtype": state_dtype, "activation_dtype": torch.bfloat16}
    pool = make_pool(decoder, **options)
    allocated = sum(tensor.untyped_storage().nbytes() for _, tensor in every_tensor(pool))
    cost = slot_bytes(decoder.layers, **options)
    assert pool.bytes() == allocated == 5 * cost.total
    assert pool.bytes_per_slot() == cost.total
    fields = pool.bytes_by_field()
    assert sum(fields.values()) == pool.bytes()
    assert fields["state"] == 5 * cost.state
    assert fields.get("state_scale", 0) == 5 * cost.scale
    assert fields["x_cache"] + fields["B_cache"] + fields["dt_cache"] == 5 * cost.ring
    assert fields["conv_rows"] == 5 * cost.conv


def test_the_seed_is_counted():
    pool = ReplayPool([NEMOTRON_H], 1, state_dtype=torch.int8, stochastic_rounding=True)
    assert pool.bytes() == pool.bytes_per_slot() + 8
    assert pool.bytes_by_field()["rand_seed"] == 8


@pytest.mark.parametrize("activation, limit", [(torch.bfloat16, 1.15), (torch.float32, 1.27)])
def test_memory_of_a_nemotron_h_pool(activation, limit):
    pool = ReplayPool([NEMOTRON_H], 2, window=16, max_tokens=4, activation_dtype=activation)
    bare = 128 * 64 * 128 * 4
    assert pool.buffers[0].state[0].nbytes == bare
    assert 1.0 < pool.bytes_per_slot() / bare <= limit
    assert pool.bytes() == 2 * pool.bytes_per_slot()


# ---- slots


def test_slots_are_taken_and_given_back(decoder):
    pool = make_pool(decoder)
    first = pool.allocate(3)
    assert first.dtype == torch.int64
    assert sorted(first.tolist()) == [0, 1, 2]
    assert (pool.num_free, pool.can_allocate(2), pool.can_allocate(3)) == (2, True, False)
    pool.free(first[1:2])
    assert pool.num_free == 3
    assert pool.allocate().tolist() == [1]
    assert pool.allocate(0).shape == (0,)


def test_capacity(decoder):
    pool = make_pool(decoder)
    slots = pool.allocate(4)
    before = snapshot(pool)
    for call in (lambda: pool.allocate(2), lambda: pool.fork(slots[:2])):
        with pytest.raises(CapacityError, match="2 required, 1 available") as caught:
            call()
        assert (caught.value.required, caught.value.available) == (2, 1)
    assert pool.num_free == 1
    assert_same_bytes(pool, before)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_a_slot_comes_back_zeroed_after_a_poisoned_tenant(decoder, state_dtype):
    pool = make_pool(decoder, state_dtype=state_dtype)
    slots = pool.allocate(5)
    fill_pool(pool)
    poison_slot(pool, 3)
    pool.free([3])
    before = snapshot(pool)
    assert pool.allocate().tolist() == [3]
    assert_same_bytes(pool, before, [0, 1, 2, 4])
    for name, tensor in every_tensor(pool):
        assert not as_bytes(tensor)[3].any(), name
    fill_pool(pool)
    before = snapshot(pool)
    pool.reset(slots[[1, 4]])
    assert_same_bytes(pool, before, [0, 2, 3])
    for name, tensor in every_tensor(pool):
        assert not as_bytes(tensor)[[1, 4]].any(), name


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_fork_and_copy_carry_every_field(decoder, state_dtype):
    """A beam search that keeps rows 1, 1, 0; then copies that swap two slots."""
    pool = make_pool(decoder, num_slots=7, state_dtype=state_dtype, activation_dtype=torch.float16)
    pool.allocate(3)
    fill_pool(pool)
    before = snapshot(pool)
    new = pool.fork(torch.tensor([1, 1, 0], dtype=torch.int32))
    assert sorted(new.tolist()) == [3, 4, 5]
    assert_same_bytes(pool, before, [0, 1, 2, 6])
    for name, tensor in every_tensor(pool):
        assert torch.equal(as_bytes(tensor)[new], before[name][[1, 1, 0]]), name
    pool.copy([0, 2], [2, 0])
    for name, tensor in every_tensor(pool):
        assert torch.equal(as_bytes(tensor)[[0, 2]], before[name][[2, 0]]), name
    assert_same_bytes(pool, before, [1, 6])


def test_no_field_is_forgotten(decoder):
    """Whatever tensor a record has, the functions above reach it: their loop knows all that ``every_tensor`` finds."""
    pool = make_pool(decoder, state_dtype=torch.int8)
    reached = {tensor.data_ptr() for tensor in pool.per_slot().values()}
    assert reached == {tensor.data_ptr() for _, tensor in every_tensor(pool)}
    assert len(reached) == 2 * 6 + 4


# ---- prefill


def test_a_prefill_that_records_gradients_leaves_none_in_the_pool(decoder):
    pool = make_pool(decoder)
    layer = decoder.layers[0]
    state = torch.ones(1, layer.nheads, layer.headdim, layer.dstate, requires_grad=True)
    window = torch.ones(1, layer.conv_channels, layer.conv_width - 1, requires_grad=True)
    pool.write_state(0, pool.allocate(), state * 2, window * 3)
    assert not pool.buffers[0].state.requires_grad and not pool.buffers[0].conv_rows.requires_grad
    assert pool.buffers[0].state.sum() == 2 * state.numel()


@pytest.mark.parametrize("inside", [True, False])
def test_a_pool_made_in_inference_mode_works_outside_and_the_other_way_round(decoder, inside):
    with torch.inference_mode(inside):
        pool = make_pool(decoder, state_dtype=torch.int8, stochastic_rounding=True)
    with torch.inference_mode(not inside):
        slots = pool.allocate(2)
        decoder.verify(pool, slots, torch.tensor([[1, 2], [3, 4]]), index=0)
        pool.commit(slots, [2, 1], 2)
        pool.copy(slots[:1], slots[1:])
        pool.materialize(slots[:1], slots[:1], [1], decoder.decays)
        pool.reset(slots)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_write_state(decoder, state_dtype, given):
    pool = make_pool(decoder, state_dtype=state_dtype, activation_dtype=torch.bfloat16)
    slots = pool.allocate(4)[[3, 1]]
    layer, buffers = decoder.layers[1], pool.buffers[1]
    state = torch.randn(2, layer.nheads, layer.headdim, layer.dstate).to(given)
    window = torch.randn(2, layer.conv_channels, layer.conv_width - 1).to(given)
    before = snapshot(pool)
    pool.write_state(1, slots, state, window)
    codes = (
        buffers.state[slots] if state_dtype != torch.float8_e4m3fn else torch.stack([buffers.state[s] for s in slots])
    )
    stored = decode(codes, None if buffers.state_scale is None else buffers.state_scale[slots])
    step = {torch.int8: 1 / 127, torch.float8_e4m3fn: 2**-4, torch.bfloat16: 2**-8, torch.float16: 2**-11}
    torch.testing.assert_close(
        stored, state.float(), rtol=0.0, atol=step.get(state_dtype, 0.0) * float(state.abs().max())
    )
    assert torch.equal(buffers.conv_rows[slots, : layer.conv_width - 1], window.transpose(1, 2).bfloat16())
    assert not buffers.conv_rows[slots, layer.conv_width - 1 :].any()
    assert_same_bytes(pool, before, [0, 2, 4])


# ---- commit and materialize


@pytest.mark.parametrize("accepted", range(4))
def test_every_accept_count_at_every_wrap(any_decoder, accepted):
    """The next outputs depend on the accepted tokens only, wherever the rings begin; also after a poisoned tenant."""
    decoder = any_decoder
    pool = make_pool(decoder, num_slots=3)
    slot = 1
    pool.allocate(3)
    for turn in range(pool.ring_len):
        poison_slot(pool, slot)
        pool.reset([slot])
        history = History(decoder).extend([7, turn])
        history.prefill(pool, slot)
        pool.cursors.ring_start[slot] = turn  # any start is as good, when nothing is live
        run(decoder, pool, slot, history, [1, 2, 3], accepted)
        poison_dead_rows(pool, [slot])
        run(decoder, pool, slot, history, [4, 5, 6], 2)
        run(decoder, pool, slot, history, [8], 1)
        run(decoder, pool, slot, history, [9, 10], 0)
        run(decoder, pool, slot, history, [11, 12, 13], 3)


@pytest.mark.parametrize("live, tokens, flushes", [(3, 2, False), (3, 3, True), (5, 1, True), (4, 1, False)])
def test_flush_at_the_edge_and_one_before(decoder, live, tokens, flushes):
    pool = make_pool(decoder)
    slot = int(pool.allocate())
    history = History(decoder)
    for token in range(live):
        run(decoder, pool, slot, history, [token], 1)
    states = [buffers.state[slot].clone() for buffers in pool.buffers]
    run(decoder, pool, slot, history, [20, 21, 22][:tokens], tokens)
    for index, (buffers, state) in enumerate(zip(pool.buffers, states, strict=True)):
        assert torch.equal(buffers.state[slot], state) != flushes
        if flushes:
            torch.testing.assert_close(buffers.state[slot].double(), history.states[index][live], **TOLERANCE)
    assert cursor_values(pool, slot)["num_live"] == (tokens if flushes else live + tokens)


def test_accepting_nothing_leaves_the_state_bit_for_bit(decoder):
    """Undoing a whole round: the checkpoint, what is replayed and the next outputs are those from before it."""
    pool = make_pool(decoder)
    slot = int(pool.allocate())
    history = History(decoder).extend([3, 1, 4])
    history.prefill(pool, slot)
    run(decoder, pool, slot, history, [1, 5], 2)
    twin = int(pool.fork([slot]))
    run(decoder, pool, slot, history, [9, 2, 6], 0)
    for index in range(2):
        one = decoder.verify(pool, torch.tensor([slot]), torch.tensor([[5, 3]]), index=index)
        other = decoder.verify(pool, torch.tensor([twin]), torch.tensor([[5, 3]]), index=index)
        assert torch.equal(one, other)
        assert torch.equal(pool.buffers[index].state[slot], pool.buffers[index].state[twin])


def test_equal_prompts_give_equal_bits_in_every_slot(decoder):
    pool = make_pool(decoder)
    slots = pool.allocate(4)
    tokens = torch.tensor([[3, 1, 4]] * 4)
    for order in ([2, 0, 3, 1], [1, 3, 0, 2], [0, 1, 2, 3]):
        out = decoder.verify(pool, slots[order], tokens, index=0)
        assert all(torch.equal(row, out[0]) for row in out[1:])
        pool.commit(slots[order], [2] * 4, 3)
    assert pool.cursors.num_live.tolist() == [2, 2, 2, 2, 0]  # 2, 4, then folded: 2


def test_counts_follow_the_request_when_rows_move(decoder):
    """Three requests accept 3, 0 and 1; the first leaves, the others change places."""
    pool = make_pool(decoder)
    slots = pool.allocate(3)
    histories = [History(decoder) for _ in range(3)]
    drafts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    for index in range(2):
        decoder.verify(pool, slots, torch.tensor(drafts), index=index)
    pool.commit(slots, [3, 0, 1], 3)
    pool.free(slots[:1])
    histories[2].extend([7])
    moved = slots[[2, 1]]
    for index in range(2):
        out = decoder.verify(pool, moved, torch.tensor([[10], [11]]), index=index)
        for row, history, token in zip(out, (histories[2], histories[1]), (10, 11), strict=True):
            expected = history.copy().extend([token]).outputs[index][-1]
            torch.testing.assert_close(row[0].double(), expected, **TOLERANCE)


def test_more_padding_than_slots(decoder):
    """A captured batch of 8 over a pool of 2 slots."""
    pool = make_pool(decoder, num_slots=2)
    slots = pool.allocate(2)
    padded = torch.full((8,), -1)
    padded[[2, 5]] = slots
    tokens = torch.arange(16).view(8, 2)
    for index in range(2):
        decoder.verify(pool, padded, tokens, index=index)
    pool.commit(padded, torch.tensor([9, 9, 2, 9, 9, 1, 9, 9]), 2)
    for slot, kept in zip(slots.tolist(), ([4, 5], [10]), strict=True):
        pool.materialize([slot], [slot], [0], decoder.decays)
        History(decoder).extend(kept).assert_slot(pool, slot, len(kept), **TOLERANCE)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("rewind", [0, 1])
def test_materialized_state_is_what_a_flush_stores(decoder, state_dtype, rewind):
    pool = make_pool(decoder, state_dtype=state_dtype)
    slot = int(pool.allocate())
    for drafts, accepted in (([1, 2, 3], 3), ([4, 5], 2 - rewind)):
        for index in range(2):
            decoder.verify(pool, torch.tensor([slot]), torch.tensor([drafts]), index=index)
        pool.commit([slot], [accepted], len(drafts))
    twin, copy = int(pool.fork([slot])), int(pool.allocate())
    if rewind:  # the twin has accepted one token more than is materialized
        pool.free([twin])
        twin = int(pool.fork([slot]))
        for index in range(2):
            decoder.verify(pool, torch.tensor([twin]), torch.tensor([[6]]), index=index)
        pool.commit([twin], [1], 1)
        pool.materialize([twin], [copy], [1], decoder.decays)
        pool.materialize([twin], [twin], [1], decoder.decays)
    else:
        pool.materialize([slot], [copy], [0], decoder.decays)
        for index in range(2):
            decoder.verify(pool, torch.tensor([twin]), torch.tensor([[6]]), index=index)
    for index, buffers in enumerate(pool.buffers):
        assert torch.equal(as_bytes(buffers.state)[copy], as_bytes(buffers.state)[twin]), index
        if buffers.state_scale is not None:
            assert torch.equal(buffers.state_scale[copy], buffers.state_scale[twin])
    assert not any(cursor_values(pool, copy).values())


def test_a_block_boundary_inside_an_accepted_run(any_decoder):
    """Block 4: at position 3 a run of 3 is accepted; the states at 4 and at 6 are both to be had, drafts in neither."""
    decoder = any_decoder
    pool = make_pool(decoder)
    slot, block, newest = pool.allocate(3).tolist()
    history = History(decoder).extend([1, 2, 3])
    history.prefill(pool, slot)
    run(decoder, pool, slot, history, [4, 5, 6], 3)
    pool.materialize([slot, slot], [block, newest], torch.tensor([2, 0]), decoder.decays)
    history.assert_slot(pool, block, 4, **TOLERANCE)
    history.assert_slot(pool, newest, 6, **TOLERANCE)
    resumed = History(decoder).extend([1, 2, 3, 4])
    run(decoder, pool, block, resumed, [30, 31], 1)  # the prefix goes on elsewhere, with other tokens
    run(decoder, pool, slot, history, [7], 1)


def test_ring_start_of_a_forked_ring_is_kept(decoder):
    """Handing a slot on in the middle of its ring, then going on in both."""
    pool = make_pool(decoder)
    slot = int(pool.allocate())
    history = History(decoder)
    for step in ([1, 2, 3], [4, 5, 6], [7, 8]):
        run(decoder, pool, slot, history, step, len(step) - 1)
    assert cursor_values(pool, slot)["ring_start"] != 0
    new, other = int(pool.fork([slot])), history.copy()
    run(decoder, pool, slot, history, [9, 10, 11], 3)
    run(decoder, pool, new, other, [12, 13], 2)
    run(decoder, pool, new, other, [14, 15, 16], 1)


def test_the_seed_advances_with_every_commit(decoder):
    pool = make_pool(decoder, state_dtype=torch.float16, stochastic_rounding=True, seed=41)
    slots = pool.allocate(2)
    pool.commit(slots, [0, 1], 2)
    pool.commit(slots, [0, 1], torch.tensor([0, 2]))
    assert pool.rand_seed.tolist() == [43]
    assert make_pool(decoder).rand_seed is None


# ---- elsewhere


def test_a_pool_of_another_device_reads_no_values():
    """On the meta device there are none: bookkeeping by lists works, tensors pass unread."""
    pool = ReplayPool([NEMOTRON_H], 3, device="meta")
    assert pool.bytes() == 3 * slot_bytes([NEMOTRON_H]).total
    slots = pool.allocate(2)
    pool.commit(slots, torch.zeros(2, dtype=torch.int64, device="meta"), 4)
    pool.free([0])
    with pytest.raises(ValueError, match="slots: expected slots in use, got 0"):
        pool.reset([0])


def test_copies_of_all_pairs(decoder):
    pool = make_pool(decoder, num_slots=3)
    pool.allocate(3)
    for source, target in itertools.permutations(range(3), 2):
        fill_pool(pool, seed=3 * source + target)
        before = snapshot(pool)
        pool.copy([source], [target])
        for name, tensor in every_tensor(pool):
            assert torch.equal(as_bytes(tensor)[target], before[name][source])
        assert_same_bytes(pool, before, [s for s in range(3) if s != target])
