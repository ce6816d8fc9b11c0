"""Exact decode on a CUDA device at the sizes of real models, in graphs, and in memory beyond 2^31 elements."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from exact_cases import INPUTS, Decoder
from ssd_cases import int32, random_case

from replayssm.batch_invariant_decode import (
    BatchInvariantDecodeBuffers,
    _mamba_chunk_scan_decode_rows,
    _masked_update_rows,
    batch_invariant_decode_buffered_scan,
)
from replayssm.ssd.kernels.arithmetic import sums

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16
REAL = {"nheads": 16, "headdim": 64, "ngroups": 2, "dstate": 128, "dtype": BF16}


@pytest.fixture(autouse=True)
def _everything_is_made_on_the_device():
    before = torch.get_default_device()
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(before)


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


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [16, 100, 128, 256])
def test_a_row_of_real_size(rows, dtype):
    """Every place in the chunk where tiles of 16, 32 and 64 rows begin or end."""
    case = random_case(rows + 70, rows, **{**REAL, "dtype": dtype})
    whole = case.whole()[0]
    decoder = Decoder(case)
    for prefill in (1, 15, 16, 31, 33, 64, rows - 1, rows):
        decoder.prefill((1, case.tokens(0, prefill)), (2, case.tokens(0, rows - 3)))
        for t in range(4):
            own, other = case.tokens(prefill + t, prefill + t + 1), case.tokens(rows - 3 + t, rows - 2 + t)
            out = decoder.step([2, -1, 1], [other, other, own])
            assert torch.equal(out[2], whole[prefill + t : prefill + t + 1])
            assert torch.equal(out[0], whole[rows - 3 + t : rows - 2 + t])
    assert torch.equal(decoder.state[2], case.tokens(0, rows).whole()[2])


@pytest.mark.parametrize(("rows", "tokens"), [(128, 4), (64, 16), (32, 32)])
def test_verification_of_real_size(rows, tokens):
    case = random_case(3 * rows, rows, **REAL)
    whole = case.whole()[0]
    decoder = Decoder(case, max_tokens=tokens)
    decoder.prefill((3, case.tokens(0, rows - 7)))
    position, round_ = rows - 7, 0
    while position + tokens <= 3 * rows:
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


def test_lanes_and_slots_in_any_order_have_the_same_bits():
    shared = random_case(40, 32, **REAL)
    cases = [
        replace(random_case(40, 32, **REAL, seed=s), A=shared.A, D=shared.D, dt_bias=shared.dt_bias) for s in range(9)
    ]
    order = torch.randperm(9).tolist()
    results = []
    for lanes in (list(range(9)), order):
        decoder = Decoder(shared, slots=20)
        slots = [2 * i + (lanes is order) for i in range(9)]
        decoder.prefill(*((slots[i], cases[i].tokens(0, 20 + i)) for i in lanes))
        for t in range(12):
            named = [cases[i].tokens(20 + i + t, 21 + i + t) for i in lanes]
            out = decoder.step([slots[i] for i in lanes], named)
        results.append(torch.stack([out[lanes.index(i)] for i in range(9)]))
        results.append(decoder.state[slots])
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


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


def test_decode_rows_equals_the_scan():
    case = random_case(64, 32, **REAL, D="element")
    states = torch.randn(3, *case.state_shape)
    initial, out = states.clone(), torch.full((3, 16, 64), 7.0, dtype=BF16)
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
    H, P, N, Q, slots = 8, 256, 256, 16, 4100
    case = random_case(20, Q, nheads=H, headdim=P, ngroups=1, dstate=N, dtype=BF16)
    state = torch.zeros(slots, H, P, N)
    assert state.numel() > 2**31
    buffers = BatchInvariantDecodeBuffers.allocate(65600 * 2, Q, 4, P, 1, 16, torch.device("cuda"), BF16, trimmed=True)
    assert buffers.x.numel() > 2**31
    small = random_case(20, Q, nheads=4, headdim=P, ngroups=1, dstate=16, dtype=BF16)
    check_last_slot(small, buffers, torch.zeros(65600 * 2, 4, P, 16), 65600 * 2 - 1)
    del buffers
    buffers = BatchInvariantDecodeBuffers.allocate(slots, Q, H, P, 1, N, torch.device("cuda"), BF16, trimmed=True)
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
