"""A decoded row equals, bit for bit, the same row of one scan over the whole sequence, and so do the states."""

from dataclasses import replace

import pytest
import torch
from exact_cases import INPUTS, Decoder
from ssd_cases import int32, random_case

from replayssm.batch_invariant_decode import _mamba_chunk_scan_decode_rows, _masked_update_rows
from replayssm.testing import Tolerance, assert_close, using

BF16 = torch.bfloat16


def decode(decoder, slot, case, first):
    """Tokens ``first..`` one by one, and the outputs."""
    return torch.cat([decoder.step([slot], [case.tokens(t, t + 1)])[0] for t in range(first, len(case.x))])


def check_all(case, prefill, slot=1, **options):
    """Prefill, then every further token alone, against one scan: outputs, and the boundary state at the end."""
    decoder = Decoder(case, **options)
    out = decoder.prefill((slot, case.tokens(0, prefill)))
    whole, _, boundary = case.whole()
    assert torch.equal(torch.cat((out, decode(decoder, slot, case, prefill))), whole)
    assert torch.equal(decoder.state[slot], boundary)
    assert int(decoder.buffers.num_buffered[slot]) == len(case.x) % case.chunk_size


@pytest.mark.parametrize("prefill", [1, 7, 16, 31, 32, 33, 50, 95, 96, 128])
def test_one_token_after_a_prefill(prefill):
    check_all(random_case(prefill + 1, 32, nheads=8, headdim=32, ngroups=1, dstate=16, dtype=BF16), prefill)


@pytest.mark.parametrize("prefill", [0, 20, 32])
def test_many_tokens_over_boundaries(prefill):
    check_all(random_case(prefill + 69, 32, nheads=8, headdim=16, ngroups=1, dtype=BF16), prefill)


def test_weak_decay_shows_a_rounded_carry():
    case = random_case(330, dtype=BF16)
    check_all(replace(case, A=case.A * 0.01), 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize(
    ("chunk_size", "nheads", "headdim", "ngroups", "dstate"),
    [(64, 4, 80, 2, 64), (128, 2, 64, 1, 128), (33, 6, 9, 3, 17), (48, 2, 8, 2, 256)],
)
def test_sizes(chunk_size, nheads, headdim, ngroups, dstate, dtype):
    case = random_case(
        chunk_size + 12, chunk_size, nheads=nheads, headdim=headdim, ngroups=ngroups, dstate=dstate, dtype=dtype
    )
    check_all(case, chunk_size - 9)


def test_the_largest_chunk():
    check_all(random_case(259, 256, nheads=2, headdim=7, dtype=BF16), 252)


@pytest.mark.parametrize("D", ["head", "element", None])
@pytest.mark.parametrize("with_z", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_options(D, with_z, with_bias):
    case = random_case(40, D=D, with_z=with_z, with_bias=with_bias)
    check_all(case, 11, trimmed=not with_z)


def test_large_dt_and_strong_decay():
    case = random_case(40)
    case.dt[5], case.dt[18] = 30.0, 90.0
    case.A[1] = -40.0
    check_all(case, 3)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_against_the_token_loop(dtype):
    case = random_case(45, dtype=dtype)
    tolerance = Tolerance(2.0**-23, 32 * 2.0**-24) if dtype == torch.float32 else Tolerance(2.0**-7, 2 * 2.0**-8)
    results = []
    for module in ("cpu", "reference"):
        with using(module):
            decoder = Decoder(case)
            decoder.prefill((2, case.tokens(0, 9)))
            results.append((decode(decoder, 2, case, 9), decoder.state[2], decoder.buffers.num_buffered[2]))
    assert_close("out", results[0][0], results[1][0], tolerance)
    assert_close("state", results[0][1], results[1][1], tolerance)
    assert results[0][2] == results[1][2]


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_a_rounded_copy_of_the_state_is_all_that_is_read(max_tokens):
    case = random_case(60, 32, dtype=BF16)
    whole, _, boundary = case.whole()
    decoder = Decoder(case, max_tokens=max_tokens, shadow=True)
    decoder.prefill((1, case.tokens(0, 21)), (2, case.tokens(0, 33)))
    assert torch.equal(decoder.buffers.shadow[2], boundary.to(BF16)) and decoder.buffers.shadow[0].isnan().all()
    state = decoder.state.clone()
    decoder.state.fill_(torch.nan)
    out = decoder.step([2, 1], [case.tokens(33, 33 + max_tokens), case.tokens(21, 21 + max_tokens)])
    assert torch.equal(out[0], whole[33 : 33 + max_tokens]) and torch.equal(out[1], whole[21 : 21 + max_tokens])
    decoder.state.copy_(state)
    decoder.move(1, 3)
    for t in range(21 + (max_tokens == 1), 60 - max_tokens, max_tokens):  # a verification did not commit
        out = decoder.step([3], [case.tokens(t, t + max_tokens)])[0]
        assert torch.equal(out, whole[t : t + max_tokens])
        if max_tokens > 1:
            decoder.commit([3], [max_tokens])
    assert torch.equal(decoder.state[3], boundary) and torch.equal(decoder.buffers.shadow[3], boundary.to(BF16))


@pytest.mark.parametrize("module", ["cpu", "reference"])
@pytest.mark.parametrize("max_tokens", [1, 4])
def test_kept_sums_are_forgotten_where_nobody_keeps_them(max_tokens, module):
    case = random_case(40)
    plain, decoder = Decoder(case, max_tokens=max_tokens), Decoder(case, max_tokens=max_tokens, sums=True)
    assert plain.buffers.sums is None and plain.buffers.num_summed is None  # so a CPU's are without a word
    decoder.buffers.num_summed.fill_(16)
    for each in (plain, decoder):
        each.prefill((1, case.tokens(0, 9)), (2, case.tokens(0, 5)))
    assert decoder.buffers.num_summed.tolist() == [16, 0, 0, 16]
    decoder.extend((2, case.tokens(5, 7)))
    plain.extend((2, case.tokens(5, 7)))
    decoder.buffers.num_summed.fill_(16)
    with using(module):
        outs = [each.step([-1, 2], [case.tokens(7, 7 + max_tokens)] * 2) for each in (plain, decoder)]
    assert torch.equal(*outs) and decoder.buffers.num_summed.tolist() == [16, 16, 0, 16]
    decoder.extend((1, case.tokens(9, 10)))
    assert decoder.buffers.num_summed.tolist() == [16, 0, 0, 16] and decoder.buffers.sums.isnan().all()


def test_without_a_copy_there_is_nothing_to_refresh():
    decoder = Decoder(random_case(5))
    decoder.buffers.refresh(decoder.state, int32(1))
    assert decoder.buffers.shadow is None


def test_two_slots_in_one_call_and_in_any_lane():
    cases = [random_case(60, 32, seed=seed) for seed in (1, 2)]
    cases[1] = replace(cases[1], A=cases[0].A, D=cases[0].D, dt_bias=cases[0].dt_bias)
    decoder = Decoder(cases[0])
    decoder.prefill((0, cases[0].tokens(0, 25)), (2, cases[1].tokens(0, 30)))
    for t in range(30):
        order = [0, 1] if t % 3 else [1, 0]
        out = decoder.step([(0, 2)[i] for i in order], [cases[i].tokens(*((25 + t, 26 + t), (30 + t, 31 + t))[i])
                                                        for i in order])  # fmt: skip
        for lane, i in enumerate(order):
            assert torch.equal(out[lane, 0], cases[i].whole()[0][(25, 30)[i] + t])
    for slot, case, length in ((0, cases[0], 55), (2, cases[1], 60)):
        assert torch.equal(decoder.state[slot], case.tokens(0, length).whole()[2])


def test_inactive_lanes():
    case = random_case(58, 32)
    junk = replace(case, **{name: torch.full_like(getattr(case, name), torch.nan) for name in INPUTS})
    decoder = Decoder(case)
    decoder.prefill((0, case.tokens(0, 50)))
    before = [decoder.slot_bytes(slot) for slot in (1, 2, 3)]
    for t in range(50, 58):
        lane = t % 3
        slots, tokens = [-1, -7, -1], [junk.tokens(0, 1)] * 3
        slots[lane], tokens[lane] = 0, case.tokens(t, t + 1)
        out = decoder.step(slots, tokens)
        assert torch.equal(out[lane, 0], case.whole()[0][t])
        inactive = [other for other in range(3) if other != lane]  # each was active in another call
        assert torch.equal(out[inactive], torch.zeros(2, 1, 6, 5))
        assert decoder.buffers.target_rows[:3].tolist() == [t % 32 if other == lane else -1 for other in range(3)]
        assert decoder.buffers.chunk_flags[:3].tolist() == [0, 0, 0]
    for slot, old in zip((1, 2, 3), before, strict=True):
        assert all(torch.equal(new, old[name]) for name, new in decoder.slot_bytes(slot).items())


def test_all_lanes_cross_in_one_call_in_any_order():
    cases = [random_case(37, 16, seed=seed) for seed in range(4)]
    shared = cases[0]
    cases = [replace(case, A=shared.A, D=shared.D, dt_bias=shared.dt_bias) for case in cases]
    results = []
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        decoder = Decoder(shared, slots=6)
        decoder.prefill(*((slot, cases[slot].tokens(0, 30)) for slot in order))
        outs = []
        for t in range(30, 37):
            outs.append(decoder.step(order, [cases[s].tokens(t, t + 1) for s in order]))
            assert decoder.buffers.chunk_flags.tolist() == [int(t == 31)] * 4 + [0, 0]
        results.append((torch.stack([out[[order.index(s) for s in range(4)]] for out in outs]), decoder.state[:4]))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    for slot, case in enumerate(cases):
        assert torch.equal(results[0][0][:, slot, 0], case.whole()[0][30:])


def test_the_token_that_fills_a_chunk():
    case = random_case(16)
    decoder = Decoder(case)
    decoder.prefill((1, case.tokens(0, 15)))
    before = decoder.state.clone()
    decoder.step([1], [case.tokens(15, 16)])
    assert decoder.buffers.chunk_flags.tolist()[0] == 1 and decoder.buffers.target_rows.tolist()[0] == 15
    assert not torch.equal(decoder.state[1], before[1])
    assert torch.equal(decoder.state[1], case.whole()[1])


def test_prefill_in_pieces_then_decode():
    case = random_case(64 + 45 + 4, 32, dtype=BF16)
    for cut in (64, 70, 64 + 20):
        decoder = Decoder(case)
        first = decoder.prefill((3, case.tokens(0, cut)))
        second = decoder.extend((3, case.tokens(cut, 109)))
        whole, _, boundary = case.whole()
        assert torch.equal(torch.cat((first, second, decode(decoder, 3, case, 109))), whole)
        assert torch.equal(decoder.state[3], boundary)


def test_seed_neither_reads_nor_copies_padding():
    case = random_case(34, 32)
    padded = case.tokens(0, 34)
    padded = replace(padded, **{name: getattr(padded, name).clone() for name in INPUTS})
    for name in INPUTS:
        getattr(padded, name)[33] = torch.nan  # one physical row that no sequence owns
    decoder = Decoder(case)
    named = {name: getattr(padded, name) for name in INPUTS}
    decoder.state[1] = case.tokens(0, 33).whole()[2]
    decoder.buffers.seed(**named, cu_seqlens=int32(0, 33), batch_indices=int32(1, -1))
    for name in INPUTS:
        assert getattr(decoder.buffers, name)[1].isfinite().all()
        assert torch.equal(getattr(decoder.buffers, name)[1, 0], getattr(case, name)[32])
    assert torch.equal(decode(decoder, 1, case, 33), case.whole()[0][33:])


def test_seed_skips_sequences_that_are_padding():
    case = random_case(25)
    decoder = Decoder(case)
    before = [decoder.slot_bytes(slot) for slot in range(4)]
    named = {name: getattr(case, name) for name in INPUTS}
    decoder.buffers.seed(**named, cu_seqlens=int32(0, 20, 25), batch_indices=int32(0, -1))
    for slot in (1, 2, 3):
        assert all(torch.equal(new, before[slot][name]) for name, new in decoder.slot_bytes(slot).items())
    assert decoder.buffers.num_buffered.tolist() == [4, 0, 0, 0]


def test_seed_of_an_empty_sequence_empties_the_slot():
    case = random_case(20)
    decoder = Decoder(case)
    decoder.prefill((1, case.tokens(0, 5)))
    decoder.prefill((1, case.tokens(0, 0)))
    assert int(decoder.buffers.num_buffered[1]) == 0
    assert torch.equal(decode(decoder, 1, case, 0), case.whole()[0])


def test_a_poisoned_previous_tenant():
    case = random_case(50)
    bad = replace(case, **{name: torch.full_like(getattr(case, name), torch.nan) for name in INPUTS})
    decoder = Decoder(case)
    decoder.prefill((1, bad.tokens(0, 30)))
    assert decode(decoder, 1, bad.tokens(0, 40), 30).isnan().all()
    out = decoder.prefill((1, case.tokens(0, 19)))
    assert torch.equal(torch.cat((out, decode(decoder, 1, case, 19))), case.whole()[0])


def test_a_neighbour_full_of_nan():
    case = random_case(40)
    bad = replace(case, **{name: torch.full_like(getattr(case, name), torch.nan) for name in INPUTS})
    decoder = Decoder(case)
    decoder.prefill((0, bad.tokens(0, 20)), (2, case.tokens(0, 20)))
    for t in range(20, 40):
        out = decoder.step([0, 2], [bad.tokens(t, t + 1), case.tokens(t, t + 1)])
        assert out[0].isnan().all() and torch.equal(out[1, 0], case.whole()[0][t])


def test_the_output_is_memory_of_the_buffers():
    case = random_case(22)
    decoder = Decoder(case)
    decoder.prefill((1, case.tokens(0, 3)))
    out = decoder.step([1], [case.tokens(3, 4)])
    assert torch.equal(decoder.buffers.out[:1], out[:, 0])
    assert decoder.buffers.out.shape == (4, 6, 5)


def test_three_runs():
    case = random_case(53, 32, dtype=BF16)
    results = []
    for _ in range(3):
        decoder = Decoder(case)
        decoder.prefill((1, case.tokens(0, 50)))
        results.append(decode(decoder, 1, case, 50))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_views_with_strides():
    case = random_case(30)
    moved = {}
    for name in INPUTS:
        wide = torch.full((30, 2, *getattr(case, name).shape[1:]), torch.nan)
        wide[:, 1] = getattr(case, name)
        moved[name] = wide[:, 1]
    decoder = Decoder(case)
    decoder.prefill((1, replace(case, **moved).tokens(0, 10)))
    assert torch.equal(decode(decoder, 1, replace(case, **moved), 10), case.whole()[0][10:])


@pytest.mark.parametrize("offset", [1, 2, 3, 5])
def test_states_anywhere_in_memory(offset, monkeypatch):
    """Where a product is summed in another order off the multiples of 64 bytes, no operand may start there."""
    product, starts = torch.bmm, set()

    def bmm(left, right):
        starts.update((left.data_ptr() % 64, right.data_ptr() % 64))
        return product(left, right)

    monkeypatch.setattr(torch, "bmm", bmm)
    case = random_case(30, nheads=4, headdim=8, dstate=64)
    decoder = Decoder(case)
    memory = torch.full((decoder.state.numel() + 8,), torch.nan)
    decoder.state = memory[offset : offset + decoder.state.numel()].view(decoder.state.shape)
    decoder.prefill((3, case.tokens(0, 20)))
    assert torch.equal(decode(decoder, 3, case, 20), case.whole()[0][20:])
    assert starts == {0}


def test_masked_update_rows():
    states = torch.arange(12.0).view(4, 3)
    values = torch.full((3, 3), torch.nan)
    values[1] = -1.0
    _masked_update_rows(states, int32(-1, 2, -4), values)
    assert states.tolist() == [[0, 1, 2], [3, 4, 5], [-1, -1, -1], [9, 10, 11]]


@pytest.mark.parametrize("module", ["cpu", "reference"])
def test_decode_rows(module):
    case = random_case(32, D="element")
    states = torch.randn(3, *case.state_shape)
    initial, out = states.clone(), torch.full((3, 6, 5), 7.0)
    with using(module):
        _mamba_chunk_scan_decode_rows(
            case.x, case.z, case.dt, case.A, case.B, case.C, 16, int32(16, -16, 0), int32(2, -1, 0), int32(15, -1, 4),
            int32(1, 1, 0), states, out, case.D, case.dt_bias, True,
        )  # fmt: skip
    second, final, _ = case.tokens(16, 32).whole(initial[2])
    first = case.tokens(0, 16).whole(initial[0])[0]
    if module == "cpu":
        assert torch.equal(out[0], second[15]) and torch.equal(out[2], first[4])
        assert torch.equal(states[2], final)
    else:
        assert_close("out", out[[0, 2]], torch.stack((second[15], first[4])), Tolerance(2.0**-20, 2.0**-20))
        assert_close("state", states[2], final, Tolerance(2.0**-20, 2.0**-20))
    assert torch.equal(states[:2], initial[:2]) and bool((out[1] == 7.0).all())
