"""Any schedule of pieces, steps, verifications, moves and neighbours gives the bits of one scan."""

from dataclasses import replace

import pytest
import torch
from exact_cases import INPUTS, Decoder
from hypothesis import given, settings
from hypothesis import strategies as st
from ssd_cases import random_case

LENGTH, SLOTS = 90, 4


def draft(case, start, accepted, count, poison):
    """``count`` tokens of which the first ``accepted`` are the sequence's own; the others are noise, perhaps NaN."""
    tokens = random_case(count, case.chunk_size, nheads=6, dtype=case.x.dtype, with_z=case.z is not None, seed=start)
    own = case.tokens(start, start + accepted)
    changed = {}
    for name in INPUTS:
        if getattr(tokens, name) is not None:
            changed[name] = getattr(tokens, name).clone()
            if poison:
                changed[name].fill_(torch.nan)
            changed[name][:accepted] = getattr(own, name)
    return replace(case, **changed)


class Schedule:
    """One sequence on its way through a decoder, with a neighbour that takes part in some calls."""

    def __init__(self, case, max_tokens, neighbour):
        self.case, self.decoder, self.slot, self.position = case, Decoder(case, SLOTS, max_tokens=max_tokens), 1, 0
        self.max_tokens, self.outputs = max_tokens, []
        self.neighbour, self.other = neighbour, 3
        self.decoder.prefill((self.other, neighbour.tokens(0, 7)))
        self.decoder.prefill((self.slot, case.tokens(0, 0)))

    def left(self):
        return LENGTH - self.position

    def advance(self, out):
        self.outputs.append(out)
        self.position += len(out)

    def piece(self, length):
        length = min(length, self.left())
        self.advance(self.decoder.extend((self.slot, self.case.tokens(self.position, self.position + length))))

    def call(self, length, accepted, poison, lane):
        """A step, or with ``max_tokens > 1`` a verification of which some tokens are accepted."""
        accepted = min(accepted, length, self.left())
        tokens = draft(self.case, self.position, accepted, length, poison)
        beside = draft(self.neighbour, 7, 0, length, True)
        slots, cases = [([self.slot], [tokens]), ([self.other, self.slot], [beside, tokens]),
                        ([self.slot, -1], [tokens, beside])][lane]  # fmt: skip
        out = self.decoder.step(slots, cases)[slots.index(self.slot)]
        if self.max_tokens > 1:
            self.decoder.commit(slots, [accepted if slot == self.slot else 0 for slot in slots])
        self.advance(out[:accepted])

    def move(self, target):
        if target not in (self.slot, self.other):
            self.decoder.move(self.slot, target)
            self.slot = target

    def check(self):
        case = self.case.tokens(0, self.position)
        whole, _, boundary = case.whole()
        assert torch.equal(torch.cat(self.outputs), whole)
        live = int(self.decoder.buffers.num_buffered[self.slot])
        assert live % case.chunk_size == self.position % case.chunk_size
        if live < case.chunk_size:
            assert torch.equal(self.decoder.state[self.slot], boundary)


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_any_schedule(data):
    max_tokens = data.draw(st.sampled_from((1, 1, 4, 16)), "max_tokens")
    chunk_size = data.draw(st.sampled_from((16, 21)), "chunk_size")
    dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16)), "dtype")
    with_z = data.draw(st.booleans(), "with_z")
    case = random_case(LENGTH, chunk_size, dtype=dtype, with_z=with_z, seed=5)
    schedule = Schedule(case, max_tokens, replace(random_case(LENGTH, chunk_size, dtype=dtype, with_z=with_z, seed=6),
                                                  A=case.A, D=case.D, dt_bias=case.dt_bias))  # fmt: skip
    for _ in range(data.draw(st.integers(1, 14), "steps")):
        kind = data.draw(st.sampled_from(("piece", "call", "call", "call", "move")), "kind")
        if kind == "piece":
            schedule.piece(data.draw(st.sampled_from((0, 1, 2, 15, 16, 17, 40)), "piece"))
        elif kind == "move":
            schedule.move(data.draw(st.integers(0, SLOTS - 1), "target"))
        elif schedule.left():
            length = data.draw(st.integers(1, max_tokens), "length")
            accepted = 1 if max_tokens == 1 else data.draw(st.integers(0, length), "accepted")
            # A call without verification commits the neighbour's token too, of which there is only one.
            lane = data.draw(st.sampled_from((0, 1, 2) if max_tokens > 1 else (0, 2)), "lane")
            schedule.call(length, accepted, data.draw(st.booleans(), "poison"), lane)
    if schedule.outputs:
        schedule.check()


@pytest.mark.parametrize("tokens", [2, 5, 16])
def test_verification_with_everything_accepted(tokens):
    case = random_case(LENGTH)
    schedule = Schedule(case, tokens, case)
    schedule.piece(11)
    while schedule.left():
        schedule.call(tokens, tokens, True, 0)
    schedule.check()


@pytest.mark.parametrize("accepted", [0, 1, 3, 4, 5, 6])
def test_a_draft_across_a_boundary(accepted):
    case = random_case(LENGTH)
    schedule = Schedule(case, 6, case)
    schedule.piece(13)  # rows 13, 14, 15 | 0, 1, 2
    schedule.call(6, accepted, True, 2)
    before = schedule.decoder.state[1].clone()
    assert torch.equal(before, torch.zeros_like(before))  # nothing is folded before it is known what was accepted
    schedule.call(2, 2, False, 0)
    folded = accepted >= 3
    assert schedule.decoder.buffers.chunk_flags.tolist() == [int(folded), 0, 0, 0]
    assert torch.equal(schedule.decoder.state[1], case.tokens(0, 16).whole()[1]) == folded
    schedule.call(6, 6, False, 0)
    schedule.check()


def test_the_whole_draft_is_scored_whatever_is_accepted_later():
    case = random_case(40)
    schedule = Schedule(replace(case), 8, case)
    schedule.piece(12)
    out = schedule.decoder.step([1], [case.tokens(12, 20)])[0]
    assert torch.equal(out, case.whole()[0][12:20])
    again = schedule.decoder.step([1], [case.tokens(12, 20)])[0]  # nothing was committed
    assert torch.equal(again, out)


def test_a_prefill_piece_after_lazily_folded_decode():
    case = random_case(LENGTH)
    schedule = Schedule(case, 5, case)
    schedule.piece(14)
    schedule.call(5, 5, False, 0)  # 19 live rows: the first chunk is complete and not folded
    assert schedule.decoder.buffers.num_buffered[1] == 19
    schedule.piece(3)
    assert schedule.decoder.buffers.num_buffered[1] == 6 and schedule.decoder.buffers.ring_start[1] == 16
    schedule.piece(30)
    schedule.call(4, 4, False, 0)
    schedule.check()


def test_chunk_states_are_those_that_new_tokens_complete():
    case = random_case(LENGTH)
    schedule = Schedule(case, 5, case)
    schedule.piece(14)
    schedule.call(5, 5, False, 0)  # 19 live rows
    states, decoder = torch.full((31 // 16 + 1, *case.state_shape), torch.nan), schedule.decoder
    case.tokens(19, 50).scan(
        initial_states=decoder.state[[1]], **decoder.buffers.unfinished(), batch_indices=torch.tensor([1]),
        chunk_states=states,
    )  # fmt: skip
    for row, end in enumerate((32, 48)):  # not the one at 16
        assert torch.equal(states[row], case.tokens(0, end).whole()[1])


def test_the_ring_goes_around_many_times():
    case = random_case(LENGTH, dtype=torch.bfloat16)
    schedule = Schedule(case, 3, case)
    for count in (3, 1, 0, 2) * 20:
        if schedule.left():
            schedule.call(3, count, True, 0)
    assert int(schedule.decoder.buffers.ring_start[1]) > 0
    schedule.check()
