"""Random lives of requests in a pool, compared after every step with the recurrence over a plain list of tokens."""

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool_model import (
    MAMBA2,
    MIXED,
    VOCABULARY,
    Decoder,
    History,
    assert_same_bytes,
    cursor_values,
    poison_dead_rows,
    poison_slot,
    snapshot,
)

from replayssm import cache
from replayssm.cache import GDNLayer, ReplayPool

TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}
MOST_REQUESTS = 3
tokens = st.integers(0, VOCABULARY - 1)


def sizes():
    """Sizes of a layer of either kind, small and odd."""
    groups, width, dim = st.integers(1, 3), st.integers(2, 5), st.integers(1, 7)

    def mamba2(groups, per_group, headdim, dstate, width):
        return (groups * per_group, headdim, dstate, groups, width)

    def gdn(groups, per_group, value_dim, key_dim, width):
        return GDNLayer(groups * per_group, value_dim, key_dim, groups, width)

    return st.builds(mamba2, groups, groups, dim, dim, width) | st.builds(gdn, groups, groups, dim, dim, width)


class Lives(RuleBasedStateMachine):
    """``requests`` maps a slot to its history, ``kept`` to what the last commit kept of it, which can be undone.

    ``aside`` are requests that were preempted: their history, what was kept, and what their slots held.
    """

    @initialize(
        layers=st.sampled_from([MAMBA2, MIXED]) | st.lists(sizes(), min_size=1, max_size=3),
        seed=st.integers(0, 9),
        window=st.integers(2, 6),
        data=st.data(),
        shared=st.booleans(),
    )
    def make(self, layers, seed, window, data, shared):
        self.decoder = Decoder(layers, seed)
        most = data.draw(st.integers(1, window), label="max_tokens")
        # Slots for the requests, and one for every legal rewind of each of them.
        self.pool = ReplayPool(
            self.decoder.layers, MOST_REQUESTS + MOST_REQUESTS * (most + 1), window=window, max_tokens=most
        )
        for slot in range(self.pool.num_slots):
            poison_slot(self.pool, slot)
        self.requests, self.kept, self.aside = {}, {}, []
        if shared:
            self.start([1, 2])

    def draw_slot(self, data):
        return data.draw(st.sampled_from(sorted(self.requests)), label="slot")

    @precondition(lambda self: len(self.requests) < MOST_REQUESTS)
    @rule(prompt=st.lists(tokens, max_size=5))
    def start(self, prompt):
        slot = int(self.pool.allocate())
        history = History(self.decoder).extend(prompt)
        history.prefill(self.pool, slot)
        self.requests[slot], self.kept[slot] = history, 0

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), rounds=st.integers(1, 5))
    def steps(self, data, rounds):
        """Several rounds with the same rows, so that rings fill up, wrap and are folded."""
        slots = data.draw(st.lists(st.sampled_from(sorted(self.requests)), min_size=1, unique=True), label="slots")
        for _ in range(rounds):
            plain, ragged, padded = (data.draw(st.booleans(), label=each) for each in ("plain", "ragged", "padded"))
            self.step(data, slots, plain, ragged, padded)
            self.every_legal_rewind_materializes()

    def step(self, data, slots, plain, ragged, padded):
        most = self.pool.max_tokens
        length = 1 if plain else data.draw(st.integers(1, most), label="T")
        lengths = [data.draw(st.integers(0, most), label="length") if ragged else length for _ in slots]
        drafts = [data.draw(st.lists(tokens, min_size=n, max_size=n), label="tokens") for n in lengths]
        # Rings fill up only when much is accepted.
        counts = [st.just(n) if plain else st.just(n) | st.integers(0, n) for n in lengths]
        accepted = [data.draw(count, label="accepted") for count in counts]
        if padded:
            slots, lengths, drafts, accepted = [-1, *slots], [length, *lengths], [[0] * length, *drafts], [0, *accepted]
        # A verify of no tokens leaves the rows alone that an undo of the commit before it needs.
        poison_dead_rows(self.pool, [slot for slot, n in zip(slots, lengths, strict=True) if slot >= 0 and n])
        idle = [slot for slot in range(self.pool.num_slots) if slot not in slots]
        before = snapshot(self.pool)

        index = torch.tensor(slots)
        expected = {
            slot: self.requests[slot].copy().extend(d) for slot, d in zip(slots, drafts, strict=True) if slot >= 0
        }
        for layer in range(len(self.decoder.layers)):
            if ragged:
                flat = torch.tensor([[t for draft in drafts for t in draft]], dtype=torch.int64)
                out = self.decoder.verify(self.pool, index, flat, index=layer, lengths=lengths)
                rows = out[0].split(lengths)
            else:
                rows = self.decoder.verify(self.pool, index, torch.tensor(drafts), index=layer)
            for slot, row, n in zip(slots, rows, lengths, strict=True):
                if slot >= 0 and n:
                    truth = torch.stack(expected[slot].outputs[layer][-n:])
                    torch.testing.assert_close(row.double(), truth, **TOLERANCE)
        self.pool.commit(index, accepted, torch.tensor(lengths) if ragged else length)

        assert_same_bytes(self.pool, before, idle)
        for slot, draft, n, a in zip(slots, drafts, lengths, accepted, strict=True):
            if slot >= 0 and n:
                self.requests[slot].extend(draft[:a])
                self.kept[slot] = a

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def commit_of_no_tokens(self, data):
        before = snapshot(self.pool)
        self.pool.commit([self.draw_slot(data), -1], [0, 0], 0)
        assert_same_bytes(self.pool, before)

    @precondition(lambda self: self.requests and len(self.requests) < MOST_REQUESTS)
    @rule(data=st.data())
    def fork(self, data):
        slot = self.draw_slot(data)
        new = int(self.pool.fork([slot]))
        assert cursor_values(self.pool, new) == cursor_values(self.pool, slot)
        self.requests[new], self.kept[new] = self.requests[slot].copy(), self.kept[slot]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def preempt(self, data):
        slots = data.draw(st.lists(st.sampled_from(sorted(self.requests)), min_size=1, unique=True), label="slots")
        histories = [(self.requests.pop(slot), self.kept.pop(slot)) for slot in slots]
        self.aside.append((histories, cache.snapshot(self.pool, slots)))
        self.pool.free(slots)
        for slot in slots:
            poison_slot(self.pool, slot)

    @precondition(lambda self: self.aside and len(self.requests) + len(self.aside[0][0]) <= MOST_REQUESTS)
    @rule()
    def resume(self):
        histories, saved = self.aside.pop(0)
        slots = self.pool.allocate(len(histories))
        before = snapshot(self.pool)
        cache.restore(self.pool, slots, saved)
        assert_same_bytes(self.pool, before, [s for s in range(self.pool.num_slots) if s not in slots])
        for slot, (history, kept) in zip(slots.tolist(), histories, strict=True):
            self.requests[slot], self.kept[slot] = history, kept

    @precondition(lambda self: len(self.requests) > 1)
    @rule(data=st.data())
    def copy(self, data):
        source, target = data.draw(st.permutations(sorted(self.requests)), label="source, target")[:2]
        self.pool.copy([source], [target])
        self.requests[target], self.kept[target] = self.requests[source].copy(), self.kept[source]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def take_back(self, data):
        """Undo tokens of the last commit in place."""
        slot = self.draw_slot(data)
        rewind = data.draw(st.integers(0, self.kept[slot]), label="rewind")
        self.pool.materialize([slot], [slot], [rewind], self.decoder.decays)
        history = self.requests[slot]
        history.truncate(len(history.tokens) - rewind)
        self.kept[slot] = 0

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data):
        slot = self.draw_slot(data)
        self.pool.free([slot])
        poison_slot(self.pool, slot)
        del self.requests[slot], self.kept[slot]

    @invariant()
    def every_legal_rewind_materializes(self):
        pairs = [(slot, back) for slot in getattr(self, "requests", ()) for back in range(self.kept[slot] + 1)]
        if not pairs:
            return
        sources = [slot for slot, _ in pairs]
        scratch = self.pool.allocate(len(pairs))
        for slot in scratch.tolist():
            poison_slot(self.pool, slot)
        before = snapshot(self.pool)
        self.pool.materialize(sources, scratch, [back for _, back in pairs], self.decoder.decays)
        assert_same_bytes(self.pool, before, sorted(set(sources)))
        for (slot, back), copy in zip(pairs, scratch.tolist(), strict=True):
            history = self.requests[slot]
            history.assert_slot(self.pool, copy, len(history.tokens) - back, **TOLERANCE)
            assert not any(cursor_values(self.pool, copy).values())
            poison_slot(self.pool, copy)
        self.pool.free(scratch)


Lives.TestCase.settings = settings(
    max_examples=50, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLives = Lives.TestCase
