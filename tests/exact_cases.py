"""An exact decoder over a ``Case``: prefill by ``chunk_scan``, then steps, in slots full of NaN."""

from __future__ import annotations

from random import Random

import torch
from ssd_cases import int32

from replayssm.batch_invariant_decode import BatchInvariantDecodeBuffers, batch_invariant_decode_buffered_scan

INPUTS = ("x", "z", "dt", "B", "C")


class Decoder:
    """Slots that hold sequences; ``case`` gives what they share, the parameters."""

    def __init__(self, case, slots=4, *, max_tokens=1, trimmed=False, shadow=False, sums=None):
        H, P, G, N = case.sizes
        self.case = case
        self.buffers = BatchInvariantDecodeBuffers.allocate(
            slots, case.chunk_size, H, P, G, N, case.x.device, case.x.dtype, max_tokens=max_tokens,
            trimmed=trimmed, shadow=shadow, sums=sums,
        )  # fmt: skip
        for tensor in self.buffers.per_slot().values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        self.state = torch.full((slots, H, P, N), torch.nan)

    def prefill(self, *pieces):
        """Scan pieces (slot, case), each from its sequence's first token, in one packed call; the outputs."""
        slots = torch.tensor([slot for slot, _ in pieces])
        named = {name: pack([case for _, case in pieces], name) for name in INPUTS}
        cu_seqlens = bounds([case for _, case in pieces])
        boundary = self.case.states(len(pieces))
        out = self.case.scan(**named, cu_seqlens=cu_seqlens, boundary_states=boundary)
        self.buffers.seed(**named, cu_seqlens=cu_seqlens, batch_indices=slots)
        self.state[slots] = boundary
        self.buffers.refresh(self.state, slots)
        return out

    def extend(self, *pieces):
        """Scan further pieces (slot, case) from wherever their sequences are."""
        slots = torch.tensor([slot for slot, _ in pieces])
        named = {name: pack([case for _, case in pieces], name) for name in INPUTS}
        cu_seqlens = bounds([case for _, case in pieces])
        boundary = self.case.states(len(pieces))
        out = self.case.scan(
            **named, cu_seqlens=cu_seqlens, initial_states=self.state[slots], boundary_states=boundary,
            batch_indices=slots, **self.buffers.unfinished(),
        )  # fmt: skip
        self.buffers.extend(**named, cu_seqlens=cu_seqlens, batch_indices=slots)
        self.state[slots] = boundary
        self.buffers.refresh(self.state, slots)
        return out

    def step(self, slots, cases):
        """One call with the tokens of each lane's case, all of one length; a copy of the output."""
        named = {name: None if cases[0].z is None and name == "z" else torch.stack([getattr(c, name) for c in cases])
                 for name in INPUTS}  # fmt: skip
        out = batch_invariant_decode_buffered_scan(
            self.buffers, **named, A=self.case.A, D=self.case.D, dt_bias=self.case.dt_bias,
            batch_indices=torch.tensor(slots), ssm_state=self.state,
        )  # fmt: skip
        return out.clone()

    def commit(self, slots, counts):
        self.buffers.commit(torch.tensor(slots), torch.tensor(counts))

    def move(self, src, dst):
        """Preemption and return: everything of a slot elsewhere, the old one poisoned."""
        for tensor in (*self.buffers.per_slot().values(), self.state):
            tensor[dst] = tensor[src]
            tensor[src] = torch.nan if tensor.is_floating_point() else -(1 << 20)

    def slot_bytes(self, slot):
        tensors = {**self.buffers.per_slot(), "state": self.state}
        return {name: tensor[slot].contiguous().flatten().view(torch.uint8).clone() for name, tensor in tensors.items()}


def pack(cases, name):
    values = [getattr(case, name) for case in cases]
    return None if values[0] is None else torch.cat(values)


def bounds(cases):
    return int32(0, *torch.tensor([len(case.x) for case in cases]).cumsum(0).tolist())


def kept_and_derived(case, max_tokens, rounds, seed):
    """Play one random schedule with kept sums, without, and with sums that are forgotten now and then.

    Each round yields the three decoders, their outputs, and the slots that were stepped.
    """
    random = Random(seed)
    decoders = [Decoder(case, 5, max_tokens=max_tokens, sums=kept) for kept in (True, False, True)]
    place = {}
    for number in range(rounds):
        slot = random.choice([1, 2, 4])
        if slot not in place or random.random() < 0.2:  # a sequence begins in a slot that held another
            place[slot] = random.randrange(1, 2 * case.chunk_size)
            for decoder in decoders:
                decoder.prefill((slot, case.tokens(0, place[slot])))
        count = random.randint(1, max_tokens)
        ready = [each for each in place if place[each] + count <= len(case.x)]
        random.shuffle(ready)
        if not ready:
            place.clear()
            continue
        lanes = [-1, *ready]
        tokens = [case.tokens(place[max(each, ready[0])], place[max(each, ready[0])] + count) for each in lanes]
        if number % 3 == 0:
            decoders[2].buffers.num_summed.zero_()
        outs = [decoder.step(lanes, tokens) for decoder in decoders]
        yield decoders, outs, ready
        kept = count if max_tokens == 1 else random.randint(0, count)
        for each in ready:
            place[each] += kept
        if max_tokens > 1:
            for decoder in decoders:
                decoder.commit(lanes, [0, *[kept] * len(ready)])


def check_kept(case, max_tokens, rounds, seed):
    """Play such a schedule and compare outputs, states, and what is kept, of live rows and of those written ahead."""
    for (kept, derived, forgetful), outs, slots in kept_and_derived(case, max_tokens, rounds, seed):
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
        known, live = kept.buffers.num_summed.tolist(), kept.buffers.num_buffered.tolist()
        for slot in slots:
            assert known[slot] == live[slot] + (0 if max_tokens == 1 else outs[0].shape[1])
            assert torch.equal(derived.state[slot], kept.state[slot])
            start = 0 if max_tokens == 1 else int(kept.buffers.ring_start[slot])
            rows = torch.arange(start, start + known[slot]) % kept.buffers.x.shape[1]
            assert torch.equal(kept.buffers.sums[slot][:, rows], forgetful.buffers.sums[slot][:, rows])
            assert kept.buffers.sums[slot][:, rows].isfinite().all()
        assert kept.buffers.sums[[0, 3]].isnan().all()  # nobody's
