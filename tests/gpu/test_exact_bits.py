"""Exact decode on a CUDA device at the sizes of real models, in graphs, and in memory beyond 2^31 elements."""

from dataclasses import replace
from random import Random

import pytest
import torch
import triton
import triton.language as tl
from exact_cases import INPUTS, Decoder
from ssd_cases import int32, random_case
from test_exact_schedule import LENGTH, SLOTS, Schedule

from replayssm.batch_invariant_decode import (
    BatchInvariantDecodeBuffers,
    _mamba_chunk_scan_decode_rows,
    _masked_update_rows,
    batch_invariant_decode_buffered_scan,
)
from replayssm.batch_invariant_decode.configs import batch_tile
from replayssm.batch_invariant_decode.kernels import launch
from replayssm.bench import exact as bench
from replayssm.ssd.kernels.arithmetic import sums
from replayssm.testing import assert_close, output_tolerance, state_tolerance, using

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("made_on_the_device"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16
REAL = {"nheads": 16, "headdim": 64, "ngroups": 2, "dstate": 128, "dtype": BF16}


@triton.jit
def _both_sums(dt, A, ours, theirs, HEADS: tl.constexpr, ROWS: tl.constexpr):
    head, row = tl.arange(0, HEADS), tl.arange(0, ROWS)
    at = head[:, None] * ROWS + row[None, :]
    value, decay = tl.load(dt + at), tl.load(A + head)
    tl.store(ours + at, sums(value, decay))
    value = tl.load(dt + at)
    tl.store(theirs + at, tl.cumsum(value * decay[:, None], 1))


@pytest.mark.parametrize("rows", [16, 32, 64, 128, 256])
def test_sums_are_those_of_cumsum(rows):
    dt, A = torch.rand(8, rows) * torch.exp(4 * torch.randn(8, rows)), -torch.rand(8)
    ours, theirs = torch.zeros(2, 8, rows)
    _both_sums[(1,)](dt, A, ours, theirs, HEADS=8, ROWS=rows, num_warps=4)
    assert torch.equal(ours, theirs)


FP32 = {"nheads": 4, "headdim": 64, "ngroups": 2, "dstate": 128, "dtype": torch.float32}
SIZES = [
    (128, REAL),
    (64, REAL),
    (48, {**REAL, "ngroups": 1}),
    (256, {"nheads": 4, "headdim": 32, "ngroups": 1, "dstate": 32, "dtype": torch.float16, "with_bias": False}),
    (100, {"nheads": 6, "headdim": 80, "ngroups": 2, "dstate": 256, "dtype": BF16, "D": None, "with_z": False}),
    *((rows, FP32) for rows in (16, 32, 48, 64, 100, 128, 256)),
    (32, {"nheads": 16, "headdim": 32, "ngroups": 1, "dstate": 64, "dtype": torch.float32, "with_z": False}),
    (200, {"nheads": 6, "headdim": 80, "ngroups": 2, "dstate": 250, "dtype": torch.float32, "D": "element"}),
]


@pytest.fixture(params=["one launch", "two launches"])
def form(request, monkeypatch):
    """Steps take this form, whatever the size of the batch."""
    two = request.param == "two launches"
    monkeypatch.setattr(launch, "batch_tile", lambda *sizes: batch_tile(*sizes[:5], 1 << 10, sizes[6]) if two else None)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(("rows", "sizes"), SIZES)
def test_a_row_of_real_size(rows, sizes):
    """Every place in the chunk where tiles of 16, 32 and 64 rows begin or end."""
    case = random_case(rows + 70, rows, **sizes)
    whole = case.whole()[0]
    decoder = Decoder(case)
    for prefill in sorted({min(place, rows) for place in (1, 15, 16, 31, 33, 64, rows - 1, rows)}):
        decoder.prefill((1, case.tokens(0, prefill)), (2, case.tokens(0, rows - 3)))
        for t in range(4):
            own, other = case.tokens(prefill + t, prefill + t + 1), case.tokens(rows - 3 + t, rows - 2 + t)
            out = decoder.step([2, -1, 1], [other, other, own])
            assert torch.equal(out[2], whole[prefill + t : prefill + t + 1])
            assert torch.equal(out[0], whole[rows - 3 + t : rows - 2 + t])
    assert torch.equal(decoder.state[2], case.tokens(0, rows).whole()[2])


@pytest.mark.parametrize("rows", [16, 48, 100, 128, 256])
def test_the_errors_of_fp32_are_those_of_fp32(rows):
    """Without softplus, whose log(1 + exp) has an error of its own where dt is small, and with small sums of dt."""
    case = random_case(3 * rows + 5, rows, **FP32, with_bias=False)
    case = replace(case, dt=0.04 * torch.rand_like(case.dt), dt_softplus=False)
    actual = case.whole()
    with using("reference"):
        expected = case.whole()
    assert_close("out", actual[0], expected[0], output_tolerance(torch.float32, torch.float32))
    for index, name in ((1, "final"), (2, "boundary")):
        assert_close(name, actual[index], expected[index], state_tolerance(torch.float32))


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(
    ("rows", "tokens", "sizes"),
    [(128, 4, REAL), (64, 3, REAL), (32, 32, REAL), (256, 12, FP32), (128, 4, FP32), (48, 5, FP32), (32, 32, FP32)],
)
def test_verification_of_real_size(rows, tokens, sizes):
    case = random_case(6 * rows, rows, **sizes)
    whole = case.whole()[0]
    decoder = Decoder(case, max_tokens=tokens)
    decoder.prefill((3, case.tokens(0, rows - 7)))
    position, round_ = rows - 7, 0
    while position + tokens <= 6 * rows:
        draft = case.tokens(position, position + tokens)
        accepted = (tokens, 1, tokens - 1, 0, max(1, tokens // 2))[round_ % 5]
        changed = {name: getattr(draft, name).clone() for name in INPUTS}
        for value in changed.values():
            value[accepted:] = torch.nan
        out = decoder.step([3], [replace(draft, **changed)])[0]
        assert torch.equal(out[:accepted], whole[position : position + accepted])
        decoder.commit([3], [accepted])
        position, round_ = position + accepted, round_ + 1
    assert round_ > 4


def many_cases(count, tokens):
    shared = random_case(tokens, 32, **REAL)
    own = {"A": shared.A, "D": shared.D, "dt_bias": shared.dt_bias}
    return [replace(random_case(tokens, 32, **REAL, seed=seed), **own) for seed in range(count)]


@pytest.mark.parametrize("max_tokens", [1, 3])
@pytest.mark.parametrize("lanes", [9, 36])  # 16 heads each: one launch, and two
def test_any_batch_gives_the_bits_of_one_scan(lanes, max_tokens):
    """Lanes at all places of their chunk, in slots and an order of their own, beside one that is inactive."""
    cases = many_cases(lanes, 56)
    order = torch.randperm(lanes).tolist()
    decoder = Decoder(cases[0], slots=2 * lanes, max_tokens=max_tokens)
    decoder.prefill(*((2 * i + 1, cases[i].tokens(0, 8 + i)) for i in range(lanes)))
    wholes = [case.whole()[0] for case in cases]
    junk = replace(cases[0], **{name: torch.full_like(getattr(cases[0], name), torch.nan) for name in INPUTS})
    for t in range(0, 12, max_tokens):
        named = [cases[i].tokens(8 + i + t, 8 + i + t + max_tokens) for i in order]
        out = decoder.step([2 * i + 1 for i in order] + [-1], [*named, junk.tokens(0, max_tokens)])
        assert not out[-1].any()
        for lane, i in enumerate(order):
            assert torch.equal(out[lane], wholes[i][8 + i + t : 8 + i + t + max_tokens])
        if max_tokens > 1:
            decoder.commit([2 * i + 1 for i in order], [max_tokens] * lanes)
    for i in range(lanes):
        live, length = int(decoder.buffers.num_buffered[2 * i + 1]), 20 + i
        assert live % 32 == length % 32
        if live < 32:
            assert torch.equal(decoder.state[2 * i + 1], cases[i].tokens(0, length).whole()[2])
    assert decoder.state[0].isnan().all()


@pytest.mark.parametrize(("chunk_size", "max_tokens", "dtype", "seed"), [(16, 4, torch.float32, 1), (21, 16, BF16, 2)])
def test_a_random_schedule(chunk_size, max_tokens, dtype, seed):
    case = random_case(LENGTH, chunk_size, dtype=dtype, seed=5)
    own = {"A": case.A, "D": case.D, "dt_bias": case.dt_bias}
    neighbour = replace(random_case(LENGTH, chunk_size, dtype=dtype, seed=6), **own)
    draw = Random(seed)
    for _ in range(12):
        schedule = Schedule(case, max_tokens, neighbour)
        for _ in range(draw.randint(5, 16)):
            kind = draw.choice(("piece", "call", "call", "call", "move"))
            if kind == "piece":
                schedule.piece(draw.choice((0, 1, 2, 15, 16, 17, 40)))
            elif kind == "move":
                schedule.move(draw.randint(0, SLOTS - 1))
            elif schedule.left():
                length = draw.randint(1, max_tokens)
                schedule.call(length, draw.randint(0, length), draw.random() < 0.5, draw.randint(0, 2))
        if schedule.outputs:
            schedule.check()


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_in_a_graph(max_tokens):
    case = random_case(60, 32, **REAL)
    whole = case.whole()[0]
    decoder = Decoder(case, max_tokens=max_tokens)
    decoder.prefill((1, case.tokens(0, 25)))
    tokens = case.tokens(0, max_tokens)
    static = {name: getattr(tokens, name)[None].clone() for name in INPUTS}
    slots, count = int32(1), int32(max_tokens)

    def step():
        out = batch_invariant_decode_buffered_scan(
            decoder.buffers, **static, A=case.A, D=case.D, dt_bias=case.dt_bias, batch_indices=slots,
            ssm_state=decoder.state,
        )  # fmt: skip
        if max_tokens > 1:
            decoder.buffers.commit(slots, count)
        return out

    saved = {name: tensor.clone() for name, tensor in decoder.buffers.per_slot().items()}
    saved_state = decoder.state.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for name, tensor in decoder.buffers.per_slot().items():
        tensor.copy_(saved[name])
    decoder.state.copy_(saved_state)
    for t in range(25, 25 + 10 * max_tokens, max_tokens):
        for name, tensor in static.items():
            tensor.copy_(getattr(case.tokens(t, t + max_tokens), name)[None])
        graph.replay()
        assert torch.equal(out[0], whole[t : t + max_tokens])


@pytest.mark.parametrize("sizes", [REAL, FP32])
def test_decode_rows_equals_the_scan(sizes):
    case = random_case(64, 32, **sizes, D="element")
    states = torch.randn(3, *case.state_shape)
    initial, out = states.clone(), torch.full((3, *case.x.shape[1:]), 7.0, dtype=case.x.dtype)
    later = replace(case, **{name: getattr(case, name).clone() for name in INPUTS})
    for name in INPUTS:  # rows 5..31 of the first chunk: behind the row of lane 2
        getattr(later, name)[5:32] = torch.nan
    _mamba_chunk_scan_decode_rows(
        later.x, later.z, later.dt, case.A, later.B, later.C, 32, int32(32, -32, 0), int32(2, -1, 0), int32(31, -1, 4),
        int32(1, 1, 0), states, out, case.D, case.dt_bias, True,
    )  # fmt: skip
    second, final, _ = case.tokens(32, 64).whole(initial[2])
    first = case.tokens(0, 32).whole(initial[0])[0]
    assert torch.equal(out[0], second[31]) and torch.equal(out[2], first[4])
    assert torch.equal(states[2], final) and torch.equal(states[:2], initial[:2]) and bool((out[1] == 7.0).all())


def test_beyond_two_billion_elements():
    """The last of 2^31 elements and more of x's rows, and as many of the state."""
    slots, sizes = 131200, {"nheads": 4, "headdim": 256, "ngroups": 1, "dstate": 16}
    case = random_case(20, 16, dtype=BF16, **sizes)
    state = torch.zeros(slots, *case.state_shape)
    buffers = BatchInvariantDecodeBuffers.allocate(slots, 16, 4, 256, 1, 16, torch.device("cuda"), BF16, trimmed=True)
    assert state.numel() > 2**31 and buffers.x.numel() > 2**31
    check_last_slot(case, buffers, state, slots - 1)
    del state, buffers
    rows = torch.zeros(2**21 + 3, 1024, dtype=torch.int8)
    _masked_update_rows(rows, int32(2**21 + 2), torch.ones(1, 1024, dtype=torch.int8))
    assert bool((rows[-1] == 1).all()) and not rows[:-1].any()


def check_last_slot(case, buffers, state, slot):
    whole = case.whole()[0]
    boundary, first = case.states(), case.tokens(0, 13)
    named = {name: getattr(first, name) for name in INPUTS}
    cu_seqlens, slots = int32(0, 13), int32(slot)
    case.tokens(0, 13).scan(
        boundary_states=boundary, initial_states=state[-1:], batch_indices=slots, **buffers.unfinished()
    )
    buffers.seed(**named, cu_seqlens=cu_seqlens, batch_indices=slots)
    for t in range(13, 20):
        token = {name: getattr(case, name)[None, t : t + 1] for name in INPUTS}
        out = batch_invariant_decode_buffered_scan(
            buffers, **token, A=case.A, D=case.D, dt_bias=case.dt_bias, batch_indices=slots, ssm_state=state
        )
        assert torch.equal(out[0, 0], whole[t])
    assert torch.equal(state[-1], case.tokens(0, 16).whole()[2]) and not state[0].any()


class Untimed:
    """A timer that only lets the calls run."""

    device, ceiling = torch.device("cuda"), 1.0

    def sets(self, size):
        return 1

    def cached_sets(self, size):
        return 0

    def micros(self, ways):
        for calls in ways.values():
            calls[0]()
        return dict.fromkeys(ways, 1.0)


@pytest.mark.parametrize(("tokens", "batch"), [(1, 2), (1, 40), (4, 2), (4, 40)])
def test_the_benchmark_finds_the_bits_it_looks_for(tokens, batch):
    assert bench._run_decode(bench.Decode(16, 1, 128, tokens, "mix", batch), False, Untimed())["error"] == 0


def test_the_benchmark_of_the_scan():
    assert bench._run_scan(bench.Scan(64, 8, 128, 1024), False, Untimed())["error"] == 0
