"""What exact decode keeps of dt between calls changes no bit, belongs to its slot, and is good for as long as told."""

import pytest
import torch
from exact_cases import INPUTS, Decoder, check_kept
from ssd_cases import int32, random_case

from replayssm.batch_invariant_decode import batch_invariant_decode_buffered_scan
from replayssm.batch_invariant_decode.configs import batch_tile
from replayssm.batch_invariant_decode.kernels import launch
from replayssm.cache import ExactMamba2Layer, ReplayPool, restore, snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("made_on_the_device"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = {"nheads": 6, "headdim": 48, "ngroups": 2, "dstate": 80, "dtype": torch.bfloat16}


@pytest.fixture(params=["one launch", "two launches"], autouse=True)
def form(request, monkeypatch):
    """Steps take this form, whatever the size of the batch."""
    lanes = 1 if request.param == "one launch" else 1 << 10
    monkeypatch.setattr(launch, "batch_tile", lambda *sizes: batch_tile(*sizes[:5], lanes, sizes[6]))


@pytest.mark.parametrize("rows", [16, 32, 48, 64, 100, 128, 256])
@pytest.mark.parametrize("max_tokens", [1, 5])
def test_kept_equals_derived(rows, max_tokens):
    check_kept(random_case(4 * rows, rows, **SIZES), max_tokens, 30, rows + max_tokens)


def test_kept_equals_derived_in_fp32():
    check_kept(random_case(150, 48, **{**SIZES, "dtype": torch.float32}), 3, 20, 7)


def test_every_place_of_a_chunk():
    """Rows that end a lane of the sum, and those that do not, one after the other over two chunks."""
    case = random_case(300, 128, **SIZES)
    whole, decoder = case.whole()[0], Decoder(case)
    decoder.prefill((2, case.tokens(0, 3)))
    for t in range(3, 300):
        assert torch.equal(decoder.step([2], [case.tokens(t, t + 1)])[0], whole[t : t + 1])


def test_forks_in_the_middle_of_a_chunk():
    case = random_case(120, 64, **SIZES)
    whole, decoder = case.whole()[0], Decoder(case, max_tokens=3)
    decoder.prefill((1, case.tokens(0, 50)))
    for t in range(50, 60, 3):
        decoder.step([1], [case.tokens(t, t + 3)])
        decoder.commit([1], [3])
    decoder.move(1, 3)
    for t in range(62, 118, 3):
        assert torch.equal(decoder.step([3, -1], [case.tokens(t, t + 3)] * 2)[0], whole[t : t + 3])
        decoder.commit([3], [3])


def test_other_parameters_within_a_chunk():
    """Kept numbers belong to A and dt_bias; ``num_summed = 0`` makes the step derive them from the others."""
    case = random_case(40, 64, **SIZES)
    changed = type(case)(**{**case.__dict__, "A": case.A * 2, "dt_bias": case.dt_bias + 1})
    whole, decoder = changed.whole()[0], Decoder(case)
    decoder.prefill((1, case.tokens(0, 20)))
    for t in range(20, 25):
        decoder.step([1], [case.tokens(t, t + 1)])
    decoder.case = changed
    decoder.buffers.num_summed[1] = 0
    for t in range(25, 40):
        assert torch.equal(decoder.step([1], [case.tokens(t, t + 1)])[0], whole[t : t + 1])


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_padding_and_other_slots_are_untouched(max_tokens):
    case = random_case(90, 32, **SIZES)
    decoder = Decoder(case, 6, max_tokens=max_tokens)
    decoder.prefill((1, case.tokens(0, 10)), (4, case.tokens(0, 31)))
    decoder.buffers.num_summed[[0, 2, 3, 5]] = -7
    others = {slot: decoder.slot_bytes(slot) for slot in (0, 2, 3, 5)}
    for _ in range(3):
        decoder.step([-1, 4, 1, -3], [case.tokens(40, 40 + max_tokens)] * 4)
    for slot, before in others.items():
        assert all(torch.equal(before[name], now) for name, now in decoder.slot_bytes(slot).items())


def test_a_dt_that_is_no_number_stays_with_its_lane():
    case = random_case(60, 32, **SIZES)
    whole, decoder = case.whole()[0], Decoder(case)
    decoder.prefill((1, case.tokens(0, 9)), (2, case.tokens(0, 20)))
    bad = {name: getattr(case.tokens(9, 10), name).clone() for name in INPUTS}
    bad["dt"].fill_(torch.nan)
    bad = type(case)(**{**case.__dict__, **bad})
    for t in range(20, 31):
        out = decoder.step([1, 2], [bad, case.tokens(t, t + 1)])
        assert out[0].isnan().all() and torch.equal(out[1], whole[t : t + 1])
        if t == 25:  # the slot's next sequence knows nothing of it
            decoder.prefill((1, case.tokens(0, 9)))
            bad = case.tokens(9, 10)
            break
    assert torch.equal(decoder.step([1], [bad])[0], whole[9:10])
    assert decoder.buffers.num_summed.tolist()[1] == 10 and int32(10).item() == decoder.buffers.num_buffered[1]


def verify(pool, slot, case, place, accepted):
    """Score three tokens from ``place`` on in a pool on any device, keep some, and return the outputs."""
    records, state, device = pool.buffers[0].records, pool.buffers[0].state, pool.device
    named = {name: getattr(case.tokens(place, place + 3), name)[None].to(device) for name in ("x", "dt", "B", "C")}
    parameters = {name: getattr(case, name).to(device) for name in ("A", "D", "dt_bias")}
    out = batch_invariant_decode_buffered_scan(
        records, z=None, **named, **parameters, batch_indices=int32(slot).to(device), ssm_state=state
    )[0].clone()
    live = int(records.num_buffered[slot])
    assert int(records.num_summed[slot]) == (live + 3 if device.type == "cuda" else 0)
    pool.commit([slot], [accepted], 3)
    return out


def test_slots_of_a_pool_in_the_middle_of_a_chunk():
    """Forked, taken back, on the host and back in another pool, and stepped on a CPU in between."""
    layer = ExactMamba2Layer(nheads=6, headdim=48, ngroups=2, dstate=80, conv_width=3, chunk_size=32)
    case = random_case(90, 32, **SIZES, with_z=False)
    whole = case.whole()[0]
    sizes = {"window": 7, "max_tokens": 3, "activation_dtype": torch.bfloat16}
    pools = [ReplayPool([layer], 4, **sizes, device=device) for device in ("cuda", "cuda", "cpu")]
    for each in pools[:2]:
        each.buffers[0].records.sums.fill_(torch.nan)
    [slot], place = pools[0].allocate().tolist(), 0

    def go_on(pool, slot, place, stop):
        while place < stop:
            assert torch.equal(verify(pool, slot, case, place, 2), whole[place : place + 3])
            place += 2
        return place

    place = go_on(pools[0], slot, place, 20)
    [fork] = pools[0].fork([slot]).tolist()
    pools[0].materialize([slot], [slot], [2])
    go_on(pools[0], slot, place - 2, 70)
    assert torch.equal(verify(pools[0], fork, case, place, 3), whole[place : place + 3])
    place += 3
    [other] = pools[1].allocate(2).tolist()[1:]
    restore(pools[1], [other], snapshot(pools[0], [fork]))
    go_on(pools[1], other, place, 50)
    [host] = pools[2].allocate().tolist()
    restore(pools[2], [host], snapshot(pools[0], [fork]))
    verify(pools[2], host, case, place, 2)
    restore(pools[0], [fork], snapshot(pools[2], [host]))
    go_on(pools[0], fork, place + 2, 70)


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_the_checked_mode_knows_parameters_that_changed(max_tokens, monkeypatch):
    monkeypatch.setenv("REPLAYSSM_CHECK", "1")
    case = random_case(150, 128, **SIZES)
    changed = type(case)(**{**case.__dict__, "A": case.A * 1.1})
    decoder = Decoder(case, max_tokens=max_tokens)
    decoder.prefill((2, case.tokens(0, 90)))
    for t in range(90, 144, max_tokens):  # over the end of a chunk; what is kept passes
        decoder.step([2], [case.tokens(t, t + max_tokens)])
        if max_tokens > 1:
            decoder.commit([2], [max_tokens])
    decoder.case, tokens = changed, case.tokens(144, 144 + max_tokens)
    with pytest.raises(ValueError, match=r"buffers\.sums: expected those of this A, dt_bias, dt_softplus"):
        decoder.step([2], [tokens])
    decoder.buffers.num_summed[2] = 0
    decoder.step([2], [tokens])
