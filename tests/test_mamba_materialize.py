"""replayssm_materialize: equal to a flush bit for bit, exact copies, tables over any memory, nothing else touched."""

from dataclasses import replace

import pytest
import torch

from replayssm.mamba import checkpointing_ssu, replayssm_materialize
from replayssm.rounding import SCALED_DTYPES, decode, layer_seed
from replayssm.testing import STATE_DTYPES, as_bytes, assert_close, random_ssu_call, state_tolerance, using

WINDOW, SEQ_LEN = 7, 3


def make_layers(lives, *, layers=2, **options):
    """Calls whose memory plays the layers; every layer has the same cursors, the layers' slots differ."""
    calls = [random_ssu_call(live=lives, seq_len=SEQ_LEN, window=WINDOW, seed=s, **options) for s in range(layers)]
    starts = [int(call.ring_start[call.state_batch_indices[row]]) for call in calls[:1] for row in range(len(lives))]
    # Bring every layer's live rows to the first layer's ring positions.
    for call in calls[1:]:
        for row, slot in enumerate(call.state_batch_indices.tolist()):
            shift = starts[row] - int(call.ring_start[slot])
            for name in ("x_cache", "B_cache", "dt_cache"):
                getattr(call, name)[slot] = getattr(call, name)[slot].roll(shift, 1)
            call.ring_start[slot] = starts[row]
    return calls, starts


def tables(calls):
    columns = []
    for name in ("state", "x_cache", "B_cache", "dt_cache"):
        tensors = [getattr(call, name) for call in calls]
        columns += [[t.data_ptr() for t in tensors], [t.stride(0) for t in tensors]]
    values = [call.A[:, 0, 0].contiguous() for call in calls]
    columns.append([t.data_ptr() for t in values])
    scales = [call.state_scale for call in calls]
    columns += [[0 if t is None else t.data_ptr() for t in scales], [0 if t is None else t.stride(0) for t in scales]]
    return [torch.tensor(column) for column in columns], values


def materialize(calls, starts, prefixes, src, dst, active=None, **options):
    """``src`` and ``dst`` are [layer][request]."""
    pointers, _keep = tables(calls)
    batch, call = len(starts), calls[0]
    active = list(range(batch)) if active is None else active
    int32 = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    sizes = {
        "state_dtype": call.state.dtype, "input_dtype": call.x_cache.dtype, "matrixA_dtype": torch.float32,
        "dim": call.state.shape[2], "dstate": call.state.shape[3], "num_heads": call.state.shape[1],
        "heads_per_group": call.state.shape[1] // call.B_cache.shape[1], "max_window": WINDOW,
        "ring_buffer_len": call.x_cache.shape[2],
    }  # fmt: skip
    assert replayssm_materialize(
        *pointers, int32(src), int32(dst), int32(starts), int32(prefixes), int32(active + [-1] * (batch - len(active))),
        **{**sizes, **options},
    ) is None  # fmt: skip


def slots_of(calls):
    return [call.state_batch_indices.tolist() for call in calls]


def free_slots(calls, count):
    return [[s for s in range(c.state.shape[0]) if s not in set(c.state_batch_indices.tolist())][:count] for c in calls]


def state_of(call, slot):
    scale = None if call.state_scale is None else call.state_scale[slot]
    return call.state[slot], scale


def flushed(call, row, count, seed=None, slot=None):
    """State bytes and scale that checkpointing_ssu stores when it flushes ``count`` live rows of a request."""
    call = call.rows([row])
    slot = int(call.state_batch_indices[0]) if slot is None else slot
    source = int(call.state_batch_indices[0])
    for name in ("state", "state_scale", "x_cache", "B_cache", "dt_cache", "ring_start"):
        tensor = getattr(call, name)
        if tensor is not None:
            tensor[slot] = tensor[source].clone()
    live = call.prev_num_accepted_tokens.clone()
    live[slot] = count
    # A window no longer than the live rows: the new tokens do not fit any more.
    call = replace(
        call, prev_num_accepted_tokens=live, max_window=max(count, SEQ_LEN), state_batch_indices=torch.tensor([slot])
    )
    options = {} if seed is None else {"rand_seed": torch.tensor([seed]), "philox_rounds": 5}
    checkpointing_ssu(**{**call.arguments(), **options})
    return state_of(call, slot)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_equals_a_flush_of_the_same_rows_bit_for_bit(state_dtype, dtype):
    calls, starts = make_layers((7, 4, 6), state_dtype=state_dtype, dtype=dtype)
    prefixes = [7, 1, 5]
    before = [call.memory() for call in calls]
    expected = [[flushed(call, row, count) for row, count in enumerate(prefixes)] for call in calls]
    src, dst = slots_of(calls), free_slots(calls, 3)
    materialize(calls, starts, prefixes, src, dst)
    for layer, call in enumerate(calls):
        for row in range(3):
            state, scale = state_of(call, dst[layer][row])
            assert torch.equal(as_bytes(state), as_bytes(expected[layer][row][0])), (layer, row)
            if scale is not None:
                assert torch.equal(scale, expected[layer][row][1])
            state, _ = state_of(call, src[layer][row])
            assert torch.equal(as_bytes(state).flatten(), before[layer]["state"][src[layer][row]].flatten())
        for name in ("x_cache", "B_cache", "dt_cache"):
            assert torch.equal(call.memory()[name], before[layer][name]), f"{name} was written"


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_matches_the_token_loop(state_dtype):
    calls, starts = make_layers((7, 4), state_dtype=state_dtype, dtype=torch.bfloat16)
    dst = free_slots(calls, 2)
    truth = [call.clone() for call in calls]
    materialize(calls, starts, [6, 2], slots_of(calls), dst)
    with using("reference"):
        materialize(truth, starts, [6, 2], slots_of(calls), dst)
    for layer, slots in enumerate(dst):
        for slot in slots:
            actual, expected = (decode(*state_of(c[layer], slot)) for c in (calls, truth))
            assert_close(f"layer {layer} slot {slot}", actual, expected, state_tolerance(state_dtype))


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("seeded", [False, True])
def test_no_rows_copy_bytes_and_scale_exactly(state_dtype, seeded):
    calls, starts = make_layers((0, 3), state_dtype=state_dtype)
    for call in calls:  # bytes that no rounding would produce
        call.state[call.state_batch_indices[0], 0] = torch.nan if state_dtype.is_floating_point else -128
    src, dst = slots_of(calls), free_slots(calls, 2)
    options = {"rand_seed": torch.tensor([5]), "philox_rounds": 10} if seeded else {}
    materialize(calls, starts, [0, 0], src, dst, **options)
    for layer, call in enumerate(calls):
        for source, target in zip(src[layer], dst[layer], strict=True):
            for a, b in zip(state_of(call, source), state_of(call, target), strict=True):
                assert a is b is None or torch.equal(as_bytes(a), as_bytes(b))


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("prefix", [0, 1, 7])
def test_in_place_equals_out_of_place(state_dtype, prefix):
    calls, starts = make_layers((7,), state_dtype=state_dtype, dtype=torch.bfloat16)
    src, dst = slots_of(calls), free_slots(calls, 1)
    materialize(calls, starts, [prefix], src, dst)
    materialize(calls, starts, [prefix], src, src)
    for layer, call in enumerate(calls):
        for a, b in zip(state_of(call, src[layer][0]), state_of(call, dst[layer][0]), strict=True):
            assert a is b is None or torch.equal(as_bytes(a), as_bytes(b))


@pytest.mark.parametrize("state_dtype", [d for d in STATE_DTYPES if d != torch.float32])
def test_stochastic_layer_l_equals_a_flush_into_dst_with_its_seed(state_dtype):
    calls, starts = make_layers((6, 5), layers=3, state_dtype=state_dtype, dtype=torch.bfloat16)
    src, dst = slots_of(calls), free_slots(calls, 2)
    seed = -1234567890123456789
    expected = [
        [flushed(call, row, 5, layer_seed(seed, layer), dst[layer][row]) for row in range(2)]
        for layer, call in enumerate(calls)
    ]
    nearest = [[flushed(call, row, 5) for row in range(2)] for call in calls]
    materialize(calls, starts, [5, 5], src, dst, rand_seed=torch.tensor([seed]), philox_rounds=5)
    for layer, call in enumerate(calls):
        for row in range(2):
            state, scale = state_of(call, dst[layer][row])
            assert torch.equal(as_bytes(state), as_bytes(expected[layer][row][0]))
            assert not torch.equal(as_bytes(state), as_bytes(nearest[layer][row][0]))
            if scale is not None:
                assert torch.equal(scale, expected[layer][row][1])


def test_fp32_states_ignore_the_seed():
    calls, starts = make_layers((6,))
    src, dst = slots_of(calls), free_slots(calls, 2)
    materialize(calls, starts, [6], src, [d[:1] for d in dst])
    materialize(calls, starts, [6], src, [d[1:] for d in dst], rand_seed=torch.tensor([1]), philox_rounds=10)
    assert all(torch.equal(call.state[d[0]], call.state[d[1]]) for call, d in zip(calls, dst, strict=True))


def test_only_selected_requests_in_any_order_and_the_list_ends_at_the_first_negative():
    calls, starts = make_layers((7, 4, 6, 5))
    src, dst = slots_of(calls), free_slots(calls, 3)
    dst = [[*slots, -1] for slots in dst]
    pointers_before = [call.memory()["state"] for call in calls]
    # Requests 1 and 3 hold metadata that nobody may look at.
    materialize(calls, [starts[0], 999, starts[2], -5], [3, 999, 2, -1], src, dst, active=[2, 0])
    for layer, call in enumerate(calls):
        after = call.memory()["state"]
        for slot in range(call.state.shape[0]):
            changed = not torch.equal(after[slot], pointers_before[layer][slot])
            assert changed == (slot in (dst[layer][0], dst[layer][2])), (layer, slot)
    materialize(calls, [999] * 4, [999] * 4, src, dst, active=[])


@pytest.mark.parametrize(("pad_slot_id", "pad"), [(-1, -1), (-1, -2), (2, 2), (2, -2)])
@pytest.mark.parametrize("side", ["src", "dst"])
def test_padding_skips_one_layer_of_a_request(pad_slot_id, pad, side):
    calls, starts = make_layers((7,), layers=3)
    src, dst = slots_of(calls), free_slots(calls, 1)
    for column in (src, dst):  # keep the pad's number out of the way
        for row in column:
            row[0] = next(s for s in (row[0], 0, 1, 3) if s != pad_slot_id)
    (src if side == "src" else dst)[1][0] = pad
    if pad_slot_id == 2:
        dst[0][0], dst[2][0] = (next(s for s in (0, 1, 3) if s != src[layer][0]) for layer in (0, 2))
    before = [call.memory()["state"] for call in calls]
    materialize(calls, starts, [0], src, dst, pad_slot_id=pad_slot_id)
    assert torch.equal(calls[1].memory()["state"], before[1])
    for layer in (0, 2):
        assert torch.equal(as_bytes(calls[layer].state[dst[layer][0]]), before[layer][src[layer][0]])


@pytest.mark.parametrize("start", range(WINDOW + SEQ_LEN))
def test_every_wrap(start):
    calls, _ = make_layers((7,), layers=1, ring_start=(start,))
    expected = [flushed(calls[0], 0, count)[0] for count in (1, 4, 7)]
    for count, state in zip((1, 4, 7), expected, strict=True):
        dst = free_slots(calls, 1)
        materialize(calls, [start], [count], slots_of(calls), dst)
        assert torch.equal(calls[0].state[dst[0][0]], state)


def test_two_prefixes_in_a_row_reach_the_state_of_their_sum():
    calls, starts = make_layers((7,), layers=1)
    src, dst = slots_of(calls), free_slots(calls, 2)
    once, twice = dst[0]
    materialize(calls, starts, [7], src, [[once]])
    materialize(calls, starts, [3], src, [[twice]])
    call, slot = calls[0], src[0][0]
    for name in ("x_cache", "B_cache", "dt_cache"):
        getattr(call, name)[twice] = getattr(call, name)[slot]
    materialize(calls, [(starts[0] + 3) % 10], [4], [[twice]], [[twice]])
    assert_close("state", call.state[twice], call.state[once].double(), state_tolerance(torch.float32))


def test_nan_of_one_request_stays_with_it():
    calls, starts = make_layers((7, 5))
    src, dst = slots_of(calls), free_slots(calls, 2)
    expected = [flushed(call, 1, 5)[0] for call in calls]
    for call, slots in zip(calls, src, strict=True):
        call.x_cache[slots[0]] = torch.nan
    materialize(calls, starts, [7, 5], src, dst)
    for layer, call in enumerate(calls):
        assert call.state[dst[layer][0]].isnan().any()
        assert torch.equal(call.state[dst[layer][1]], expected[layer])


def test_layers_of_one_allocation_with_free_slot_strides():
    """A pool [layers, slots, ...] whose slots carry everything of a layer: strides that no single tensor would have."""
    calls, starts = make_layers((7,), state_dtype=torch.bfloat16, dtype=torch.bfloat16)
    src, dst = slots_of(calls), free_slots(calls, 1)
    packed = []
    for call in calls:
        slots = call.state.shape[0]
        wide = torch.full((slots, call.state[0].numel() + 13), torch.nan, dtype=torch.bfloat16)
        state = wide[:, 5 : 5 + call.state[0].numel()].view(call.state.shape)
        state.copy_(call.state)
        packed.append(replace(call, state=state))
    materialize(calls, starts, [6], src, dst)
    materialize(packed, starts, [6], src, dst)
    for layer in range(2):
        slot = dst[layer][0]
        assert torch.equal(as_bytes(packed[layer].state[slot]), as_bytes(calls[layer].state[slot]))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.int8])
def test_dependencies_cover_what_is_touched(state_dtype):
    calls, starts = make_layers((7,), state_dtype=state_dtype)
    src, dst = slots_of(calls), free_slots(calls, 1)
    pointers, values = tables(calls)
    outputs = [t for call in calls for t in (call.state, call.state_scale) if t is not None]
    inputs = [t for call in calls for t in (call.x_cache, call.B_cache, call.dt_cache)]

    def call_with(inputs, outputs):
        int32 = lambda v: torch.tensor(v, dtype=torch.int32)  # noqa: E731
        call = calls[0]
        replayssm_materialize(
            *pointers, int32(src), int32(dst), int32(starts), int32([6]), int32([0]), state_dtype=state_dtype,
            input_dtype=torch.float32, matrixA_dtype=torch.float32, dim=5, dstate=11, num_heads=6, heads_per_group=3,
            max_window=WINDOW, ring_buffer_len=call.x_cache.shape[2], dependency_inputs=inputs,
            dependency_outputs=outputs,
        )  # fmt: skip

    before = [call.memory() for call in calls]
    for left_out, name in ((inputs[1], "B_cache_ptrs"), (values[1], "A_ptrs"), (outputs[-1], None)):
        remaining = [t for t in [*inputs, *values] if t is not left_out]
        with pytest.raises(
            ValueError, match=name or ("state_scale_ptrs" if state_dtype in SCALED_DTYPES else "state_ptrs")
        ):
            call_with(remaining, [t for t in outputs if t is not left_out])
    for call, memory in zip(calls, before, strict=True):
        assert all(torch.equal(memory[name], after) for name, after in call.memory().items())
    call_with([*inputs, *values], outputs)
    assert not torch.equal(calls[0].memory()["state"], before[0]["state"])
