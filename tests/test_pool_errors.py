"""Wrong use of a pool: messages that name the argument, and nothing that has changed."""

import pytest
import torch
from pool_model import Decoder, assert_same_bytes, fill_pool, make_pool, snapshot


@pytest.fixture(scope="module")
def decoder():
    return Decoder()


def wrong_calls(pool, decoder):
    """(call, message); slots 0, 1, 2 are in use with one live row each, slots 3 and 4 are free."""
    A, state, window = decoder.decays, torch.zeros(1, 4, 3, 5), torch.zeros(1, 32, 2)
    other = torch.zeros(1, dtype=torch.int64, device="meta")
    return [
        (lambda: pool.free([3]), "slots: expected slots in use, got 3, which is free"),
        (lambda: pool.free([1, 1]), "slots: expected distinct slots, got 1 more than once"),
        (lambda: pool.free([0, 5]), "slots: expected 0 <= slots <= 4 .*got 5"),
        (lambda: pool.free([-1]), "slots: .*got -1"),
        (lambda: pool.free(torch.tensor([1.0])), "slots: expected dtype torch.int32 or torch.int64, got torch.float32"),
        (lambda: pool.free(torch.tensor([[1]])), r"slots: expected shape \[n\], got \[1, 1\]"),
        (lambda: pool.free(other), "slots: expected device cpu, got meta"),
        *((lambda wrong=wrong: pool.free(wrong), "slots: expected a tensor or a list of ints, got ")
          for wrong in ([1.0], [True], 1, None, "1", [None])),
        *((lambda wrong=wrong: pool.allocate(wrong), "n: expected an int, got ") for wrong in (1.0, True, None, "1")),
        (lambda: pool.commit([0], [0.5], 1), r"num_accepted: expected a tensor or a list of ints, got \[0.5\]"),
        (lambda: pool.commit([0], 1, 1), "num_accepted: expected a tensor or a list of ints, got 1"),
        (lambda: pool.commit([0], [1], [1.5]), r"seq_len: expected a tensor or a list of ints, got \[1.5\]"),
        (lambda: pool.commit([0], [1], 1.0), "seq_len: expected a tensor or a list of ints, got 1.0"),
        (lambda: pool.commit([0], [1], True), "seq_len: expected an int, got True"),
        (lambda: pool.materialize([0], [1], [0.5], A), r"rewind: expected a tensor or a list of ints, got \[0.5\]"),
        (lambda: pool.materialize([0], [1], 0, A), "rewind: expected a tensor or a list of ints, got 0"),
        (lambda: pool.materialize([0], [1], other, A), "rewind: expected device cpu, got meta"),
        (lambda: pool.materialize([0], [1], [0], None), "A: expected a list of one tensor per layer, got NoneType"),
        (lambda: pool.reset([4]), "slots: expected slots in use, got 4"),
        (lambda: pool.fork([3]), "src_slots: expected slots in use, got 3"),
        (lambda: pool.copy([0], [3]), "dst_slots: expected slots in use, got 3"),
        (lambda: pool.copy([0, 1], [2, 2]), "dst_slots: expected distinct slots, got 2"),
        (lambda: pool.copy([0, 1], [2]), "dst_slots: expected as many as src_slots, 2, got 1"),
        (lambda: pool.allocate(-1), "n: expected 0 <= n <= 2147483647, got -1"),
        (lambda: pool.commit([3], [1], 2), "slots: expected slots in use, got 3"),
        (lambda: pool.commit([0, 1], [3, 1], 2), r"num_accepted: expected values in 0..seq_len=2, got 3 at \[0\]"),
        (lambda: pool.commit([0], [-1], 2), "num_accepted: .*got -1"),
        (lambda: pool.commit([0], [1], 4), "seq_len: expected 0 <= seq_len <= 3 .*got 4"),
        (lambda: pool.commit([0, 1], [1, 1], torch.tensor([1, 4])), r"seq_len: .*got 4 at \[1\]"),
        (lambda: pool.commit([0, 1], [1], 2), r"num_accepted: expected shape \[batch=2\], got \[1\]"),
        (lambda: pool.materialize([0], [1], [2], A), r"rewind: expected 0 <= rewind <= 1 .*slot 0; .*got 2"),
        (lambda: pool.materialize([2], [1], [1], A), r"rewind: expected 0 <= rewind <= 0 .*slot 2; .*got 1"),
        (lambda: pool.materialize([0], [1], [-1], A), "rewind: .*got -1"),
        (lambda: pool.materialize([0], [3], [0], A), "dst_slots: expected slots in use, got 3"),
        (lambda: pool.materialize([0, 1], [1, 2], [0, 0], A), "dst_slots: expected no slot that another .*got 1"),
        (lambda: pool.materialize([1, 1], [1, 2], [0, 0], A), "dst_slots: expected no slot that another .*got 1"),
        (lambda: pool.materialize([0, 1], [2, 2], [0, 0], A), "dst_slots: expected distinct slots, got 2"),
        (lambda: pool.materialize([0], [1], [0, 0], A), r"rewind: expected shape \[n=1\], got \[2\]"),
        (lambda: pool.materialize([0], [1], torch.tensor([0.0]), A), "rewind: expected dtype torch.int32"),
        (lambda: pool.materialize([0], [1], [0], A[:1]), "A: expected one tensor per layer, 2, got 1"),
        (lambda: pool.materialize([0], [1], [0], [A[0], A[0]]), r"A\[1\]: expected shape \[nheads=6\], got \[4\]"),
        (lambda: pool.materialize([0], [1], [0], [A[0], A[1].double()]), r"A\[1\]: expected dtype torch.float32"),
        (lambda: pool.write_state(2, [2], state, window), "layer_index: expected 0 <= layer_index <= 1.*got 2"),
        (lambda: pool.write_state(0, [0], state, window), "slots: expected slots without live rows"),
        (lambda: pool.write_state(0, [4], state, window), "slots: expected slots in use, got 4"),
        (lambda: pool.write_state(0, [2], state[:, :3], window), r"state: expected shape \[n=1, nheads=4, .*\[1, 3"),
        (lambda: pool.write_state(0, [2], state.int(), window), "state: expected dtype .*got torch.int32"),
        (lambda: pool.write_state(0, [2], state, window.mT), r"conv_window: expected shape \[n=1, conv_channels=32, "),
    ]  # fmt: skip


def pool_with_three_tenants(decoder):
    pool = make_pool(decoder)
    pool.allocate(3)
    fill_pool(pool)
    for name, values in {"ring_start": [3, 7, 0], "num_live": [1, 1, 0], "conv_start": [4, 5, 0],
                         "last_accepted": [1, 1, 0]}.items():  # fmt: skip
        getattr(pool.cursors, name)[:3] = torch.tensor(values, dtype=torch.int32)
    return pool


@pytest.mark.parametrize("number", range(56))
def test_wrong_use_changes_nothing(decoder, number):
    pool = pool_with_three_tenants(decoder)
    calls = wrong_calls(pool, decoder)
    assert len(calls) == 56
    call, message = calls[number]
    before = snapshot(pool)
    with pytest.raises((TypeError, ValueError), match=message):
        call()
    assert_same_bytes(pool, before)
    assert pool.num_free == 2
    pool.free([0, 1, 2])  # what was in use still is


def test_use_after_free_and_double_free(decoder):
    pool = make_pool(decoder)
    slots = pool.allocate(2)
    pool.free(slots)
    for call in (
        lambda: pool.free(slots),
        lambda: pool.commit(slots, [1, 1], 1),
        lambda: pool.reset(slots[:1]),
        lambda: pool.fork(slots),
        lambda: pool.materialize(slots[:1], slots[1:], [0], decoder.decays),
    ):
        with pytest.raises(ValueError, match=r"slots: expected slots in use, got \d, which is free"):
            call()
    assert pool.num_free == 5


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_slots": 0}, "num_slots: expected 1 <= num_slots <= 2147483647, got 0"),
        ({"max_tokens": 6}, "max_tokens: expected 1 <= max_tokens <= window=5 .*got 6"),
        ({"state_dtype": torch.float64}, "state_dtype: expected .*got torch.float64"),
        ({"activation_dtype": torch.int8}, "activation_dtype: expected .*got torch.int8"),
        ({"stochastic_rounding": True}, "stochastic_rounding: expected a state_dtype that is rounded"),
        ({"window": 65}, "window: expected 1 <= window <= 64, got 65"),
        (
            {"seed": 1 << 63},
            "seed: expected -9223372036854775808 <= seed <= 9223372036854775807, got 9223372036854775808",
        ),
        ({"num_slots": 2.0}, "num_slots: expected an int, got 2.0"),
        ({"window": 5.0}, "window: expected an int, got 5.0"),
        ({"max_tokens": True}, "max_tokens: expected an int, got True"),
        ({"seed": 1.5}, "seed: expected an int, got 1.5"),
    ],
)
def test_wrong_pools(decoder, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make_pool(decoder, **options)


def test_more_tokens_than_the_pool_was_made_for_are_refused_by_the_ops(decoder):
    """T = 4 in a pool for 3: ring_len - T is smaller than the window, and the convolution's ring too short."""
    pool = make_pool(decoder)
    slot = pool.allocate()
    before = snapshot(pool)
    with pytest.raises(ValueError, match="rows: expected conv_len >= width - 1"):
        decoder.verify(pool, slot, torch.tensor([[1, 2, 3, 4]]), index=1)
    assert_same_bytes(pool, before)


def test_a_slot_whose_live_rows_were_all_folded_is_not_fresh(decoder):
    """Its convolution's history begins elsewhere, so a prompt's result would be read from the wrong rows."""
    pool = make_pool(decoder)
    slot = pool.allocate()
    pool.commit(slot, [3], 3)
    pool.commit(slot, [0], 3)
    assert pool.cursors.num_live[slot] == 0 and pool.cursors.conv_start[slot] != 0
    before = snapshot(pool)
    with pytest.raises(ValueError, match="slots: expected slots without live rows"):
        pool.write_state(0, slot, torch.zeros(1, 4, 3, 5), torch.zeros(1, 32, 2))
    assert_same_bytes(pool, before)
