"""The kernels of the chunk scan and of exact decode under Triton's interpreter: their logic, without a GPU."""

from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: tests/gpu", allow_module_level=True)

from exact_cases import INPUTS, Decoder  # noqa: E402
from ssd_cases import int32, random_case  # noqa: E402

from replayssm.batch_invariant_decode import _mamba_chunk_scan_decode_rows, _masked_update_rows  # noqa: E402
from replayssm.batch_invariant_decode.configs import BatchTile, batch_tile, chunk_rows, step_tile  # noqa: E402
from replayssm.batch_invariant_decode.kernels import launch  # noqa: E402
from replayssm.ssd.configs import ScanTile  # noqa: E402
from replayssm.ssd.kernels import launch as scan_launch  # noqa: E402
from replayssm.testing import Tolerance, assert_close, using  # noqa: E402

SMALL = {"nheads": 3, "headdim": 5, "ngroups": 1, "dstate": 11}


def scanned(case, cu_seqlens, sequences, **options):
    outputs = {"final_states": case.states(sequences), "boundary_states": case.states(sequences)}
    outputs["chunk_states"] = torch.zeros(len(case.x) // case.chunk_size + sequences, *case.state_shape)
    outputs["out"] = torch.zeros_like(case.x)
    case.scan(cu_seqlens=cu_seqlens, **outputs, **options)
    return outputs


@pytest.mark.parametrize(
    ("dtype", "D", "with_z", "with_bias", "ngroups", "limit"),
    [
        (torch.float32, "head", True, True, 1, (0.0, 0.7)),
        (torch.float32, None, False, False, 3, (0.0, float("inf"))),
        (torch.float16, "element", True, True, 1, (0.1, float("inf"))),
    ],
)
def test_the_scan_equals_the_token_loop(dtype, D, with_z, with_bias, ngroups, limit):
    options = {**SMALL, "ngroups": ngroups, "D": D, "with_z": with_z, "with_bias": with_bias}
    case = random_case(41, 16, dtype=dtype, **options)
    bounds, initial = int32(0, 20, 20, 39), torch.randn(3, *case.state_shape)
    results = []
    for module in ("kernels", "reference"):
        with using(module):
            results.append(scanned(case, bounds, 3, initial_states=initial, dt_limit=limit))
    relative, of_largest = (2.0**-22, 2.0**-18) if dtype == torch.float32 else (2.0**-9, 2.0**-9)
    for name, value in results[0].items():
        assert_close(name, value, results[1][name], Tolerance(relative, of_largest))


def in_two_blocks(monkeypatch):
    """Make outputs of a chunk of 32 rows in two blocks, for two heads of a group and then one."""
    monkeypatch.setattr(scan_launch, "scan_tile", lambda *_: ScanTile(16, 16, 16, 2, 4, None, 1))


@pytest.mark.parametrize("chunk_size", [32, 21])
def test_the_scan_in_two_blocks_equals_the_token_loop(chunk_size, monkeypatch):
    in_two_blocks(monkeypatch)
    case = random_case(71, chunk_size, dtype=torch.float16, **SMALL)
    bounds, initial = int32(0, 20, 20, 69), torch.randn(3, *case.state_shape)
    results = []
    for module in ("kernels", "reference"):
        with using(module):
            results.append(scanned(case, bounds, 3, initial_states=initial))
    for name, value in results[0].items():
        assert_close(name, value, results[1][name], Tolerance(2.0**-9, 2.0**-9))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("form", ["one head", "three heads", "two blocks"])
@pytest.mark.parametrize("row", [5, 21])
def test_a_later_x_that_is_no_number_reaches_no_earlier_output(value, form, row, monkeypatch):
    case = random_case(40, **SMALL, dtype=torch.float32 if form == "one head" else torch.float16)
    if form == "two blocks":
        in_two_blocks(monkeypatch)
        case = replace(case, chunk_size=32)
    with using("kernels"):
        expected = case.scan()
        case.x[row : row + 2] = value
        out = case.scan()
    assert torch.equal(out[:row], expected[:row]) and not out[row : row + 2].isfinite().any()


def test_a_sequence_without_new_tokens_is_not_read_beyond_its_end():
    case = random_case(30, **SMALL, dtype=torch.float16)
    with using("kernels"):
        whole, decoder, states = case.scan(), Decoder(case), case.states(2)
        decoder.prefill((2, case.tokens(0, 11)), (1, case.tokens(0, 5)))
        rest = case.tokens(11, 30)
        out = rest.scan(
            initial_states=decoder.state[[2, 1]], batch_indices=int32(2, 1), cu_seqlens=int32(0, 19, 19),
            final_states=states, **decoder.buffers.unfinished(),
        )  # fmt: skip
        final = case.tokens(0, 5).whole()[1]
    assert torch.equal(out, whole[11:]) and torch.equal(states[1], final)


def test_two_sources_and_padding():
    case = random_case(30, **SMALL)
    with using("kernels"):
        whole, final, boundary = case.whole()
        decoder = Decoder(case)
        out = decoder.prefill((2, case.tokens(0, 11)))
        assert torch.equal(out, whole[:11])
        rest, last = case.tokens(11, 30), case.states()
        new = torch.full_like(rest.x, 7.0)
        rest.scan(
            out=new, initial_states=decoder.state[[2, 0]], batch_indices=int32(2, -1), cu_seqlens=int32(0, 17, 19),
            **decoder.buffers.unfinished(),
        )  # fmt: skip
        assert torch.equal(new[:17], whole[11:28]) and bool((new[17:] == 7.0).all())
        states = case.states()
        out = rest.scan(
            initial_states=decoder.state[[2]], batch_indices=int32(2), final_states=last, boundary_states=states,
            **decoder.buffers.unfinished(),
        )  # fmt: skip
    assert torch.equal(out, whole[11:]) and torch.equal(last[0], final) and torch.equal(states[0], boundary)


def test_a_chunk_lies_in_tiles_that_are_right_on_a_card():
    assert [chunk_rows(Q) for Q in (16, 21, 32, 33, 48, 64, 65, 100, 129, 256)] == [16, 32, 32, *[128] * 5, 256, 256]


def test_the_form_follows_from_sizes_alone():
    sizes = (64, 128, 128, 2, 1)
    assert batch_tile(*sizes, 32, 16) is None and batch_tile(*sizes, 4, 128) is None
    assert batch_tile(*sizes, 33, 16) and batch_tile(*sizes, 5, 128)
    assert [batch_tile(64, 128, 128, 4, 1, lanes, 48).apart for lanes in (1, 10, 11)] == [False, False, True]
    assert batch_tile(160, 128, 128, 4, 1, 99, 99) is None
    assert batch_tile(256, 256, 256, 2, 1, 99, 99) is None
    assert [batch_tile(64, N, Q, 2, 1, 99, 99).heads for N, Q in ((128, 128), (256, 128), (128, 256))] == [2, 1, 1]
    assert [step_tile(64, 128, 128, 2, heads).rows for heads in (16, 48, 80)] == [16, 32, 64]


def take(form, monkeypatch):
    """Make steps take so many launches, whatever the size of the batch."""
    tile = None
    if form != "one launch":
        tile = BatchTile(16, 2, 16, None, 2, 16, 16, 2, 1, 4, None, 3, form == "three launches")
    monkeypatch.setattr(launch, "batch_tile", lambda *_: tile)


@pytest.mark.parametrize(
    ("form", "trimmed"),
    [("one launch", False), ("two launches", False), ("two launches", True), ("three launches", True)],
)
def test_decoding_token_by_token(form, trimmed, monkeypatch):
    take(form, monkeypatch)
    case = random_case(34, **SMALL)
    with using("kernels"):
        whole, _, boundary = case.whole()
        decoder = Decoder(case, trimmed=trimmed)
        decoder.prefill((1, case.tokens(0, 13)))
        for t in range(13, 34):
            junk = replace(case, **{name: torch.full_like(getattr(case, name), torch.nan) for name in INPUTS})
            lanes = [(1, case), (-1, junk)][:: 1 if t % 2 else -1]
            out = decoder.step([slot for slot, _ in lanes], [c.tokens(t, t + 1) for _, c in lanes])
            own = 0 if t % 2 else 1
            assert torch.equal(out[own], whole[t : t + 1]) and not out[1 - own].any()
            assert decoder.buffers.chunk_flags[own] == (t % 16 == 15) and decoder.buffers.target_rows[1 - own] == -1
    assert torch.equal(decoder.state[1], boundary) and int(decoder.buffers.num_buffered[1]) == 2
    assert decoder.state[[0, 2, 3]].isnan().all()


@pytest.mark.parametrize(
    ("form", "chunk_size", "max_tokens"),
    [
        ("one launch", 16, 16),
        ("one launch", 21, 5),
        ("two launches", 16, 16),
        ("two launches", 21, 5),
        ("three launches", 21, 5),
    ],
)
def test_a_schedule_of_verifications(form, chunk_size, max_tokens, monkeypatch):
    take(form, monkeypatch)
    case = random_case(70, chunk_size, **SMALL, seed=chunk_size)
    generator = torch.Generator().manual_seed(chunk_size)
    draw = lambda low, high: int(torch.randint(low, high + 1, (1,), generator=generator))  # noqa: E731
    with using("kernels"):
        whole = case.whole()[0]
        decoder = Decoder(case, max_tokens=max_tokens)
        position = draw(0, 20)
        decoder.prefill((3, case.tokens(0, position)))
        while position + max_tokens <= 70:
            if draw(0, 5) == 0:
                length = min(draw(0, 19), 70 - position)
                out = decoder.extend((3, case.tokens(position, position + length)))
                accepted = length
            else:
                tokens = draw(1, max_tokens)
                accepted = draw(0, tokens)
                draft = case.tokens(position, position + tokens)
                changed = {name: getattr(draft, name).clone() for name in INPUTS}
                for value in changed.values():
                    value[accepted:] = torch.nan
                out = decoder.step([3], [replace(draft, **changed)])[0]
                decoder.commit([3, -1], [accepted, 1])
            expected = whole[position : position + accepted]
            if chunk_size == 16:  # the interpreter's products depend on the length of their sums
                assert torch.equal(out[:accepted], expected)
            assert_close("out", out[:accepted], expected, Tolerance(2.0**-20, 2.0**-20))
            position += accepted
    live = int(decoder.buffers.num_buffered[3])
    assert live % chunk_size == position % chunk_size and int(decoder.buffers.ring_start[3]) > 0
    if live < chunk_size:
        with using("kernels"):
            state = case.tokens(0, position).whole()[2]
        assert_close("state", decoder.state[3], state, Tolerance(2.0**-20, 2.0**-20))


def test_a_rounded_copy_of_the_state():
    case = random_case(36, **SMALL, dtype=torch.float16)
    with using("kernels"):
        whole, _, boundary = case.whole()
        decoder = Decoder(case, shadow=True)
        decoder.prefill((1, case.tokens(0, 20)))
        state = decoder.state.clone()
        decoder.state.fill_(torch.nan)
        for t in range(20, 31):
            assert torch.equal(decoder.step([1], [case.tokens(t, t + 1)])[0], whole[t : t + 1])
        decoder.state.copy_(state)
        for t in range(31, 36):
            assert torch.equal(decoder.step([1], [case.tokens(t, t + 1)])[0], whole[t : t + 1])
    assert torch.equal(decoder.state[1], boundary) and torch.equal(decoder.buffers.shadow[1], boundary.half())


def test_rows_are_stored_as_the_cpu_stores_them():
    case = random_case(60, 16, **SMALL)
    results = []
    for module in ("cpu", "kernels"):
        with using(module):
            for max_tokens in (1, 4):
                decoder = Decoder(case, max_tokens=max_tokens)
                named = {name: getattr(case, name) for name in INPUTS}
                decoder.buffers.seed(**named, cu_seqlens=int32(0, 21, 21, 37, 60), batch_indices=int32(2, 0, -1, 3))
                decoder.buffers.extend(**named, cu_seqlens=int32(0, 9, 40), batch_indices=int32(3, 2))
                results.append(decoder.buffers.per_slot())
    for cpu, kernels in ((results[0], results[2]), (results[1], results[3])):
        for name, value in cpu.items():
            assert torch.equal(kernels[name].nan_to_num(9.0), value.nan_to_num(9.0)), name


def test_masked_update_rows():
    states, values = torch.arange(12.0).view(4, 3), torch.full((3, 3), torch.nan)
    values[1] = -1.0
    with using("kernels"):
        _masked_update_rows(states, int32(-1, 2, -4), values)
    assert states.tolist() == [[0, 1, 2], [3, 4, 5], [-1, -1, -1], [9, 10, 11]]


def test_decode_rows():
    case = random_case(32, D="element", **SMALL)
    states = torch.randn(3, *case.state_shape)
    initial, out = states.clone(), torch.full((3, 3, 5), 7.0)
    poisoned = {}
    for name in INPUTS:  # as columns of a wider tensor
        value = getattr(case, name)
        poisoned[name] = torch.cat((value, torch.full_like(value, torch.nan)), 1)[:, : value.shape[1]]
        poisoned[name][5:16] = torch.nan
    starts, slots, rows, flags = torch.stack(
        (int32(16, -16, 0), int32(2, -1, 0), int32(15, -1, 4), int32(1, 1, 0)), 1
    ).T
    named = {**poisoned, "A": case.A, "D": case.D, "dt_bias": case.dt_bias}
    with using("kernels"):
        _mamba_chunk_scan_decode_rows(
            **named, chunk_size=16, chunk_starts=starts, slots=slots, target_rows=rows, chunk_flags=flags,
            initial_states=states, out=out, dt_softplus=True,
        )  # fmt: skip
        second, final, _ = case.tokens(16, 32).whole(initial[2])
        first = case.tokens(0, 16).whole(initial[0])[0]
    assert torch.equal(out[0], second[15]) and torch.equal(out[2], first[4]) and bool((out[1] == 7.0).all())
    assert torch.equal(states[2], final) and torch.equal(states[:2], initial[:2])


def in_a_wider_tensor(value):
    """The same numbers with others between its rows."""
    return torch.cat([value.flatten(1), torch.full_like(value.flatten(1), 3)], 1)[:, : value[0].numel()].unflatten(
        1, value.shape[1:]
    )


def column(values):
    return torch.stack([values, torch.full_like(values, 3)], 1)[:, 0]


def test_rows_and_lists_of_any_strides():
    case, bounds, slots = random_case(30, **SMALL), int32(0, 13, 30), int32(2, 1)
    strided = {name: in_a_wider_tensor(getattr(case, name)) for name in INPUTS}
    named = {name: getattr(case, name) for name in INPUTS}
    results = []
    with using("kernels"):
        for inputs, listed in ((named, lambda values: values), (strided, column)):
            decoder = Decoder(case, max_tokens=3)
            decoder.buffers.seed(**inputs, cu_seqlens=listed(bounds), batch_indices=listed(slots))
            cursors = decoder.buffers.num_buffered.clone()
            decoder.state.zero_()
            unfinished = decoder.buffers.unfinished()
            unfinished |= {name: listed(unfinished[name]) for name in ("num_buffered", "ring_start")}
            scan = {
                "cu_seqlens": listed(bounds),
                "initial_states": decoder.state[[2, 1]],
                "batch_indices": listed(slots),
            }
            y = case.scan(**inputs, **scan, **unfinished)
            states, out = decoder.state.clone(), torch.zeros(2, *case.x.shape[1:])
            _mamba_chunk_scan_decode_rows(
                **inputs, A=case.A, chunk_size=16, chunk_starts=listed(int32(16, 0)), slots=listed(slots),
                target_rows=listed(int32(4, 15)), chunk_flags=listed(int32(0, 1)), initial_states=states, out=out,
            )  # fmt: skip
            results.append((cursors, y, states, out))
    for packed, other in zip(*results, strict=True):
        assert torch.equal(packed, other) and not packed.isnan().any()
    assert results[0][0].tolist() == [0, 1, 13, 0]
