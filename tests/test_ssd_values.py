"""``chunk_scan`` against the fp64 token loop: sizes, options, dtypes, packed sequences."""

import pytest
import torch
from ssd_cases import int32, random_case

from replayssm.ssd import chunk_scan
from replayssm.testing import Tolerance, assert_close, using

# A rounding of the weights, of the scaled B and of the state for each product, and sums of many such products.
TOLERANCES = {
    torch.float32: Tolerance(2.0**-23, 32 * 2.0**-24),
    torch.bfloat16: Tolerance(2.0**-7, 2 * 2.0**-8),
    torch.float16: Tolerance(2.0**-10, 2 * 2.0**-11),
}


def compare(case, cu_seqlens=None, initial=None, **options):
    sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    rows = case.x.shape[0] // case.chunk_size + sequences

    def run():
        outputs = {"final_states": case.states(sequences), "boundary_states": case.states(sequences)}
        outputs["chunk_states"] = torch.zeros(rows, *case.state_shape)
        outputs["out"] = torch.zeros_like(case.x, memory_format=torch.contiguous_format)
        returned = case.scan(cu_seqlens=cu_seqlens, initial_states=initial, **outputs, **options)
        assert returned is outputs["out"]
        return outputs

    actual = run()
    with using("reference"):
        expected = run()
    for name, value in actual.items():
        assert_close(name, value, expected[name], TOLERANCES[case.x.dtype])
    return actual


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize(
    ("nheads", "headdim", "ngroups", "dstate", "chunk_size"),
    [
        (6, 5, 2, 11, 16), (3, 64, 1, 128, 32), (4, 80, 4, 37, 20), (2, 33, 1, 256, 64), (2, 7, 2, 16, 256),
        (1, 1, 1, 1, 19),
    ],
)  # fmt: skip
def test_sizes(nheads, headdim, ngroups, dstate, chunk_size, dtype):
    case = random_case(
        2 * chunk_size + 9 if chunk_size < 256 else 300, chunk_size, nheads=nheads, headdim=headdim, ngroups=ngroups,
        dstate=dstate, dtype=dtype,
    )  # fmt: skip
    compare(case, initial=torch.randn(1, *case.state_shape))


@pytest.mark.parametrize("D", ["head", "element", None])
@pytest.mark.parametrize("with_z", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_options(D, with_z, with_bias):
    compare(random_case(37, D=D, with_z=with_z, with_bias=with_bias))


@pytest.mark.parametrize("limits", [(0.0, 0.3), (0.2, float("inf")), (0.4, 0.4)])
def test_limits_of_dt(limits):
    case = random_case(35)
    limited = compare(case, dt_limit=limits)
    assert not torch.equal(limited["out"], case.scan())


def test_without_softplus_a_negative_dt_is_clamped():
    case = random_case(35)
    compare(case, dt_softplus=False)


def test_large_dt_and_strong_decay():
    case = random_case(40)
    case.dt[3], case.dt[20] = 30.0, 80.0  # the identity, and exp overflows on the way
    case.A[0] = -50.0
    out = compare(case)
    assert out["out"].isfinite().all()


def test_weak_decay_over_many_chunks():
    case = random_case(330)
    case.A.mul_(0.01)
    compare(case)


def test_packed_sequences():
    case = random_case(90, ngroups=3, nheads=3)
    cu_seqlens = int32(0, 16, 16, 49, 50, 88)  # a whole chunk, none, two and a rest, a single token, and two unowned
    actual = compare(case, cu_seqlens, torch.randn(5, *case.state_shape))
    assert torch.equal(actual["out"][88:], torch.zeros(2, 3, 5))


def test_the_rows_of_chunk_states():
    case = random_case(90)
    cu_seqlens, initial = int32(0, 40, 55, 90), torch.randn(3, *case.state_shape)
    states = torch.full((90 // 16 + 3, *case.state_shape), torch.nan)
    final, boundary = case.states(3), case.states(3)
    case.scan(
        cu_seqlens=cu_seqlens, initial_states=initial, chunk_states=states, final_states=final, boundary_states=boundary
    )
    for i, (first, end) in enumerate([(0, 40), (40, 55), (55, 90)]):
        count = (end - first) // 16
        for k in range(count):
            alone = case.tokens(first, first + 16 * (k + 1)).whole(initial[i])
            assert torch.equal(states[first // 16 + i + k], alone[1])
            assert torch.equal(alone[1], alone[2])
        expected = states[first // 16 + i + count - 1] if count else initial[i]
        assert torch.equal(boundary[i], expected)
        assert torch.equal(final[i], case.tokens(first, end).whole(initial[i])[1])
    written = [0, 1, 5, 6]
    assert all(bool(states[row].isnan().all()) != (row in written) for row in range(len(states)))


def test_padding_is_neither_read_nor_written():
    case = random_case(50)
    case.x[20:33] = torch.nan
    out, final, initial = torch.full_like(case.x, 7.0), case.states(3), torch.randn(3, *case.state_shape)
    initial[1] = torch.nan
    case.scan(
        cu_seqlens=int32(0, 20, 33, 50), initial_states=initial, out=out, final_states=final,
        batch_indices=torch.tensor([0, -5, 3]),
    )  # fmt: skip
    assert bool((out[20:33] == 7.0).all()) and final[1].isnan().all()
    for i, (first, end) in ((0, (0, 20)), (2, (33, 50))):
        alone = case.tokens(first, end).whole(initial[i])
        assert torch.equal(out[first:end], alone[0]) and torch.equal(final[i], alone[1])


def test_no_tokens_at_all():
    case = random_case(5).tokens(0, 0)
    out, final, boundary = case.whole(torch.ones(case.state_shape))
    assert out.shape == (0, 6, 5) and bool((final == 1).all()) and bool((boundary == 1).all())
    assert case.scan(cu_seqlens=int32(0)).shape == (0, 6, 5)


def test_inputs_are_left_alone():
    case = random_case(40)
    before = {name: value.clone() for name, value in case.arguments().items() if isinstance(value, torch.Tensor)}
    initial = torch.randn(1, *case.state_shape)
    copy = initial.clone()
    case.scan(initial_states=initial, final_states=case.states())
    assert all(torch.equal(value, before[name]) for name, value in case.arguments().items() if name in before)
    assert torch.equal(initial, copy)


def test_gradients_are_not_recorded():
    case = random_case(20)
    out = chunk_scan(**{**case.arguments(), "x": case.x.clone().requires_grad_()})
    assert not out.requires_grad


def test_the_three_roundings():
    """The contract itself, written out with sums in fp64: what is rounded to the dtype of x, and nothing else."""
    case = random_case(32, nheads=2, ngroups=1, D=None, with_z=False, dtype=torch.bfloat16)
    states = torch.zeros(3, *case.state_shape)
    out = case.scan(chunk_states=states)

    def r(value):
        return value.float().bfloat16().double()

    x, B, C = case.x.double(), case.B[:, 0].double(), case.C[:, 0].double()
    dt = torch.nn.functional.softplus(case.dt.float() + case.dt_bias).double()
    state, expected = torch.zeros(case.state_shape, dtype=torch.float64), torch.zeros_like(x)
    for first in (0, 16):
        rows = range(first, first + 16)
        G = (dt[first : first + 16].cumsum(0) * case.A.double()).float().double()
        decay = lambda t, j, G=G, first=first: torch.exp(G[t - first] - G[j - first])  # noqa: E731
        for t in rows:
            expected[t] = torch.exp(G[t - first])[:, None] * (r(state) @ C[t])
            for j in range(first, t + 1):
                expected[t] += r(C[t] @ B[j] * decay(t, j) * dt[j])[:, None] * x[j]
        state = torch.exp(G[15])[:, None, None] * state
        for j in rows:
            state = state + x[j][:, :, None] * r(B[j] * (decay(first + 15, j) * dt[j])[:, None])[:, None, :]
        assert_close("state", states[first // 16], state.float(), Tolerance(2.0**-16, 2.0**-16))
    same = (out == expected.to(torch.bfloat16)).double().mean()
    assert same > 0.98  # the others lie next to a tie of the last rounding
