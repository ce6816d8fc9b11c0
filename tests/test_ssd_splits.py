"""The bits of ``chunk_scan`` do not depend on the split into calls, the neighbours or the place in memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ssd_cases import int32, random_case

SLOTS = 5


class Unfinished:
    """What a sequence keeps between calls: the state at its last boundary, and the rows since then, in a slot."""

    def __init__(self, case, slot, initial):
        H, P, G, N = case.sizes
        dtype, Q = case.x.dtype, case.chunk_size
        self.case, self.slot, self.state, self.position = case, slot, initial.clone(), 0
        self.x = torch.full((SLOTS, Q, H, P), torch.nan, dtype=dtype)
        self.dt = torch.full((SLOTS, Q, H), torch.nan, dtype=dtype)
        self.B = torch.full((SLOTS, Q, G, N), torch.nan, dtype=dtype)
        self.count = int32(*[-(1 << 20)] * SLOTS)
        self.count[slot] = 0

    def buffers(self):
        return {"x_buffer": self.x, "dt_buffer": self.dt, "B_buffer": self.B, "num_buffered": self.count}

    def extend(self, length, **options):
        case = self.case.tokens(self.position, self.position + length)
        boundary, final = case.states(), case.states()
        out = case.scan(
            initial_states=self.state[None], **self.buffers(), batch_indices=torch.tensor([self.slot]),
            boundary_states=boundary, final_states=final, **options,
        )  # fmt: skip
        self.position += length
        rest = self.position % self.case.chunk_size
        rows = slice(self.position - rest, self.position)
        for buffer in (self.x, self.dt, self.B):
            buffer[self.slot] = torch.nan
        self.x[self.slot, :rest], self.dt[self.slot, :rest] = self.case.x[rows], self.case.dt[rows]
        self.B[self.slot, :rest], self.count[self.slot] = self.case.B[rows], rest
        self.state = boundary[0]
        return out, final[0]


def pieces_equal_whole(case, lengths, slot=3):
    initial = torch.randn(case.state_shape)
    whole, final, boundary = case.whole(initial)
    sequence = Unfinished(case, slot, initial)
    results = [sequence.extend(length) for length in lengths]
    assert torch.equal(torch.cat([out for out, _ in results]), whole)
    assert torch.equal(results[-1][1], final)
    assert torch.equal(sequence.state, boundary)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_split_point(dtype):
    case = random_case(39, dtype=dtype)
    for point in range(40):
        pieces_equal_whole(case, (point, 39 - point))


@pytest.mark.parametrize(
    ("chunk_size", "sizes"),
    [(64, (4, 32, 1, 64)), (128, (2, 64, 2, 128)), (50, (3, 7, 3, 150)), (256, (2, 16, 1, 16))],
)
def test_token_by_token(chunk_size, sizes):
    H, P, G, N = sizes
    length = chunk_size + 5
    case = random_case(length, chunk_size, nheads=H, headdim=P, ngroups=G, dstate=N)
    pieces_equal_whole(case, (3, *(1,) * (length - 3)))


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_any_pieces(data):
    chunk_size = data.draw(st.sampled_from((16, 23, 32)))
    dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16)))
    lengths = data.draw(st.lists(st.sampled_from((0, 1, 2, 5, 15, 16, 17, 40)), min_size=1, max_size=7))
    ngroups, D = data.draw(st.sampled_from((1, 2, 6))), data.draw(st.sampled_from(("head", "element", None)))
    case = random_case(sum(lengths), chunk_size, ngroups=ngroups, D=D, dtype=dtype, with_z=data.draw(st.booleans()))
    pieces_equal_whole(case, lengths, slot=data.draw(st.integers(0, SLOTS - 1)))


def test_a_sequence_in_any_pack():
    case = random_case(100)
    initial = torch.randn(4, *case.state_shape)
    bounds = [(0, 33), (33, 34), (34, 71), (71, 100)]
    alone = [case.tokens(*pair).whole(initial[i]) for i, pair in enumerate(bounds)]
    order = [2, 0, 3, 1]
    parts = [case.tokens(*bounds[i]) for i in order]
    named = {name: torch.cat([getattr(part, name) for part in parts]) for name in ("x", "dt", "B", "C", "z")}
    cu_seqlens = int32(0, *torch.tensor([len(part.x) for part in parts]).cumsum(0).tolist())
    final = case.states(4)
    out = case.scan(**named, cu_seqlens=cu_seqlens, initial_states=initial[order], final_states=final)
    for place, i in enumerate(order):
        assert torch.equal(out[cu_seqlens[place] : cu_seqlens[place + 1]], alone[i][0])
        assert torch.equal(final[place], alone[i][1])


def test_a_neighbour_full_of_nan():
    case = random_case(80)
    expected = case.tokens(40, 80).whole()
    case.x[:40], case.B[:40], case.dt[:40], case.C[:40] = (torch.nan,) * 4
    initial = torch.zeros(2, *case.state_shape)
    initial[0] = torch.nan
    final = case.states(2)
    out = case.scan(cu_seqlens=int32(0, 40, 80), initial_states=initial, final_states=final)
    assert torch.equal(out[40:], expected[0]) and torch.equal(final[1], expected[1])
    assert out[:40].isnan().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["x", "dt", "B", "C"])
def test_later_tokens_reach_no_earlier_output(name, value):
    case = random_case(40)
    expected = case.scan()
    getattr(case, name)[21:23] = value
    out = case.scan()
    assert torch.equal(out[:21], expected[:21])
    assert not torch.equal(out[21:23], expected[21:23])
    if name == "C":
        assert torch.equal(out[23:], expected[23:])


def test_places_in_memory_and_strides():
    case = random_case(45, nheads=4, headdim=3, dstate=7)
    expected = case.whole(torch.ones(case.state_shape))
    moved = {}
    for name in ("x", "dt", "B", "C", "z"):
        value = getattr(case, name)
        wide = torch.full((value.shape[0], 3, *value.shape[1:-1], value.shape[-1] + 1), torch.nan)
        moved[name] = wide[:, 1, ..., 1:]
        moved[name].copy_(value)
    memory = torch.full((5 * expected[1].numel() + 1,), torch.nan)
    initial = memory[1 : 1 + expected[1].numel()].view(1, 7, 4, 3).permute(0, 2, 3, 1).fill_(1.0)
    final = memory[-expected[1].numel() :].view(1, *case.state_shape)
    assert torch.equal(case.scan(**moved, initial_states=initial, final_states=final), expected[0])
    assert torch.equal(final[0], expected[1])


def test_any_number_of_threads_keeps_the_promise():
    case = random_case(70, 64, nheads=8, headdim=32, ngroups=1, dstate=64)
    torch.set_num_threads(2)
    try:
        pieces_equal_whole(case, (20, 1, 1, 30, 1, 17))
    finally:
        torch.set_num_threads(1)


def test_three_runs():
    case = random_case(50, dtype=torch.bfloat16)
    first = case.whole()
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(case.whole(), first, strict=True))
