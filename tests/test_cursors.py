"""The cursor rule against a plain list of rows, at every wrap and on both sides of the flush."""

from dataclasses import fields

import pytest
import torch

from replayssm import cursors as rule
from replayssm.cursors import Cursors

CPU = torch.device("cpu")
WINDOW, RING, CONV = 5, 8, 6


def make(num_slots=4, **values):
    cursors = Cursors.allocate(num_slots, CPU)
    for name, numbers in values.items():
        getattr(cursors, name).copy_(torch.tensor(numbers))
    return cursors


def snapshot(cursors):
    return {each.name: getattr(cursors, each.name).clone() for each in fields(cursors)}


def assert_unchanged(cursors, before):
    for name, tensor in before.items():
        assert torch.equal(getattr(cursors, name), tensor), name


def commit(cursors, slots, seq_len, accepted, dtype=torch.int64, **sizes):
    sizes = {"window": WINDOW, "ring_len": RING, "conv_len": CONV} | sizes
    seq_len = seq_len if isinstance(seq_len, int) else torch.tensor(seq_len, dtype=dtype)
    rule.commit(cursors, torch.tensor(slots, dtype=dtype), seq_len, torch.tensor(accepted, dtype=dtype), **sizes)


class ListModel:
    """The rule without modulo arithmetic on cursors: the ring rows that hold the live tokens, oldest first."""

    def __init__(self, start):
        self.live, self.next_row = [], start

    def step(self, seq_len, accepted):
        if seq_len == 0:
            return
        if len(self.live) + seq_len > WINDOW:
            self.live = []
        written = [(self.next_row + i) % RING for i in range(seq_len)]
        assert not set(written) & set(self.live), "the step overwrote live rows"
        self.live += written[:accepted]
        self.next_row = (self.next_row + accepted) % RING


@pytest.mark.parametrize("start", range(RING))
def test_rule_follows_the_list_of_rows(start):
    generator = torch.Generator().manual_seed(start)
    cursors, model = make(ring_start=[0, 0, start, 0]), ListModel(start)
    conv = 0
    for _ in range(60):
        seq_len = int(torch.randint(0, RING - WINDOW + 1, (), generator=generator))
        accepted = int(torch.randint(0, seq_len + 1, (), generator=generator))
        commit(cursors, [2], seq_len, [accepted])
        model.step(seq_len, accepted)
        conv += accepted
        first, live = int(cursors.ring_start[2]), int(cursors.num_live[2])
        assert [(first + j) % RING for j in range(live)] == model.live
        assert (first + live) % RING == model.next_row
        assert int(cursors.conv_start[2]) == conv % CONV
        if seq_len:
            assert int(cursors.last_accepted[2]) == accepted
    assert all(int(getattr(cursors, each.name)[[0, 1, 3]].sum()) == 0 for each in fields(cursors))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("live, folds", [(2, False), (3, True), (5, True)])
def test_flush_exactly_at_the_edge(live, folds, dtype):
    cursors = make(ring_start=[0, 7, 0, 0], num_live=[0, live, 0, 0])
    commit(cursors, [1], [3], [2], dtype=dtype)
    expected = ((7 + live) % RING, 2) if folds else (7, live + 2)
    assert (int(cursors.ring_start[1]), int(cursors.num_live[1])) == expected


def test_accepting_nothing_keeps_what_was_not_folded():
    cursors = make(ring_start=[6, 6, 0, 0], num_live=[2, 3, 0, 0], conv_start=[5, 4, 0, 0], last_accepted=[2, 1, 0, 0])
    commit(cursors, [0, 1], 3, [0, 0])
    assert cursors.num_live.tolist() == [2, 0, 0, 0]  # slot 1 was folded by the verify, so nothing is live
    assert cursors.ring_start.tolist() == [6, 1, 0, 0]
    assert cursors.conv_start.tolist() == [5, 4, 0, 0]
    assert cursors.last_accepted.tolist() == [0, 0, 0, 0]


def test_length_zero_and_padding_change_nothing():
    cursors = make(ring_start=[3, 1, 2, 0], num_live=[5, 4, 3, 1], conv_start=[1, 2, 3, 4], last_accepted=[3, 2, 1, 0])
    before = snapshot(cursors)
    commit(cursors, [0, 1, 2], 0, [0, 0, 0])
    commit(cursors, [0, 2, 1], [0, 0, 0], [0, 0, 0])
    commit(cursors, [-1, -7], 3, [2, 9])
    assert_unchanged(cursors, before)
    commit(cursors, [2, -1, 0], [1, 3, 0], [1, 3, 0])  # padding must not move slot 0, onto which it is clamped
    assert cursors.num_live.tolist() == [5, 4, 4, 1]
    assert cursors.ring_start.tolist() == [3, 1, 2, 0]


def test_rows_of_a_batch_follow_the_slot_not_the_position():
    one, other = make(), make()
    commit(one, [3, 0, 2], [3, 2, 1], [1, 2, 0])
    commit(other, [2, 3, 0], [1, 3, 2], [0, 1, 2])
    assert one.num_live.tolist() == [2, 0, 0, 1]
    assert_unchanged(other, snapshot(one))


def test_reset_touches_the_named_slots_only():
    cursors = make(ring_start=[3, 1, 2, 7], num_live=[5, 4, 3, 1], conv_start=[1, 2, 3, 4], last_accepted=[3, 2, 1, 1])
    rule.reset(cursors, torch.tensor([1, 3]))
    assert cursors.ring_start.tolist() == [3, 0, 2, 0]
    assert cursors.last_accepted.tolist() == [3, 0, 1, 0]


@pytest.mark.parametrize(
    "slots, seq_len, accepted, message",
    [
        ([1, 2], 4, [0, 0], r"seq_len: expected 0 <= seq_len <= 3 .*got 4"),
        ([1, 2], -1, [0, 0], r"seq_len: .*got -1"),
        ([1, 2], [3, 4], [0, 0], r"seq_len: expected values in 0..3, got 4 at \[1\]"),
        ([1, 2], [3, -1], [0, 0], r"seq_len: .*got -1 at \[1\]"),
        ([1, 2], 2, [0, 3], r"num_accepted: expected values in 0..seq_len=2, got 3 at \[1\]"),
        ([1, 2], 2, [-1, 0], r"num_accepted: .*got -1 at \[0\]"),
        ([1, 2], [2, 0], [0, 1], r"num_accepted: expected values in 0..seq_len=0, got 1 at \[1\]"),
        ([1, 4], 2, [0, 0], r"slots: expected values below slots=4, got 4 at \[1\]"),
        ([2, 2], 2, [0, 0], r"slots: expected distinct slots, got 2 more than once"),
        ([1, 2], 2, [0], r"num_accepted: expected shape \[batch=2\], got \[1\]"),
        ([1, 2], [2], [0, 0], r"seq_len: expected shape \[batch=2\], got \[1\]"),
    ],
)
def test_wrong_values_change_nothing(slots, seq_len, accepted, message):
    cursors = make(ring_start=[3, 1, 2, 0], num_live=[1, 4, 3, 1])
    before = snapshot(cursors)
    with pytest.raises(ValueError, match=message):
        commit(cursors, slots, seq_len, accepted)
    assert_unchanged(cursors, before)


def test_wrong_dtype():
    cursors = make()
    with pytest.raises(ValueError, match=r"num_accepted: expected dtype torch.int32 or torch.int64, got torch.float32"):
        rule.commit(cursors, torch.tensor([0]), 2, torch.tensor([1.0]), window=WINDOW, ring_len=RING, conv_len=CONV)


@pytest.mark.parametrize("name", ["window", "ring_len", "conv_len"])
@pytest.mark.parametrize("wrong", [0, -1, 7.0, None])
def test_wrong_sizes_change_nothing(name, wrong):
    cursors = make(num_live=[1, 4, 3, 1])
    before = snapshot(cursors)
    sizes = {"window": WINDOW, "ring_len": RING, "conv_len": CONV, name: wrong}
    with pytest.raises((TypeError, ValueError), match=f"^{name}: expected .*got {wrong}"):
        rule.commit(cursors, torch.tensor([0]), 2, torch.tensor([1]), **sizes)
    assert_unchanged(cursors, before)


@pytest.mark.parametrize(
    "slots", [None, [1], torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor([4]), torch.tensor([1, -1])]
)
def test_reset_of_wrong_slots_changes_nothing(slots):
    cursors = make(num_live=[1, 4, 3, 1])
    before = snapshot(cursors)
    with pytest.raises((TypeError, ValueError), match=r"^slots: expected "):
        rule.reset(cursors, slots)
    assert_unchanged(cursors, before)


def test_tokens_are_bounded_by_the_window_and_by_the_rest_of_the_ring():
    with pytest.raises(ValueError, match="seq_len: expected 0 <= seq_len <= 2 "):
        commit(make(), [0], 3, [1], window=2, ring_len=20)
    with pytest.raises(ValueError, match="seq_len: expected 0 <= seq_len <= 1 "):
        commit(make(), [0], 2, [1], window=5, ring_len=6)
