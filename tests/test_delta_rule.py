"""What the gated delta rules share: gates at their limits, and the window in both orders, for both kinds of gate."""

import pytest
import torch

from replayssm.delta_rule import reference, token_order, window
from replayssm.delta_rule.gates import NORM_EPSILON, decay, log_decay, normalised, prepared, strength
from replayssm.testing import Tolerance, assert_close

H, HV, K, V, N, T = 2, 6, 16, 11, 7, 3
TOLERANCE = Tolerance(0.0, 32 * 2.0**-24)


def random_tokens(channels, seed=0, **scales):
    """Raw k, v, g, beta of N tokens, a state and queries of the newest T; g per head or per key channel."""
    g = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    gate = (N, HV, K) if channels else (N, HV)
    raw = [randn(N, H, K) * scales.get("k", 1.0), randn(N, HV, V), -randn(*gate).abs(), torch.sigmoid(randn(N, HV))]
    return raw, randn(HV, V, K), randn(T, H, K)


def truth(raw, state, q):
    """States after every token and outputs of the newest T, token after token in fp64."""
    k, v, g, beta = raw
    S, states, outputs = state.double(), [], []
    for t in range(N):
        gate = g[t] if g.dim() == 3 else g[t, :, None]
        S = reference.advance(S, reference.unit(k[t], True), v[t], gate, beta[t])
        states.append(S)
        if t >= N - T:
            outputs.append(reference.read_out(S, q[t - N + T].double()))
    return torch.stack(states), torch.stack(outputs)


def run(form, raw, state, q, wanted=range(N)):
    out = torch.full((T, HV, V), torch.nan)
    before = state.clone()
    states = form.run(state, prepared(*(x.transpose(0, 1) for x in raw), True), q, out, wanted)
    assert torch.equal(state, before)
    return states, out


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("form", [token_order, window])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e3, 0.0])
def test_against_the_token_loop(form, channels, size):
    raw, state, q = random_tokens(channels, k=size)
    states, out = run(form, raw, state, q)
    expected_states, expected = truth(raw, state, q)
    assert_close("out", out, expected, TOLERANCE)
    assert_close("states", torch.stack(list(states.values())), expected_states, TOLERANCE)


@pytest.mark.parametrize("form", [token_order, window])
def test_a_gate_per_channel_that_is_the_same_in_all_channels_is_a_gate_per_head(form):
    raw, state, q = random_tokens(False)
    spread = [*raw[:2], raw[2][:, :, None].expand(N, HV, K), raw[3]]
    (states, out), (expected_states, expected) = run(form, spread, state, q), run(form, raw, state, q)
    assert_close("out", out, expected, TOLERANCE)
    for t in range(N):
        assert_close("state", states[t], expected_states[t], TOLERANCE)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("form", [token_order, window])
@pytest.mark.parametrize("extreme", [0.0, -1e4, -torch.inf])
def test_decays_of_one_and_of_zero(form, channels, extreme):
    """Sums of log decays would give inf - inf; products of decays do not."""
    raw, state, q = random_tokens(channels)
    raw[2][2] = raw[2][5] = extreme
    states, out = run(form, raw, state, q)
    expected_states, expected = truth(raw, state, q)
    assert_close("out", out, expected, TOLERANCE)
    assert_close("states", torch.stack(list(states.values())), expected_states, TOLERANCE)


@pytest.mark.parametrize("form", [token_order, window])
def test_near_cancelling_corrections(form):
    """Equal keys, beta 1, no decay: every token must undo what the one before stored."""
    raw, state, q = random_tokens(False)
    raw[0][:] = raw[0][:1]
    raw[2][:], raw[3][:] = 0.0, 1.0
    raw[1][1::2] *= 1e-3
    states, out = run(form, raw, state, q)
    expected_states, expected = truth(raw, state, q)
    assert_close("out", out, expected, Tolerance(0.0, 256 * 2.0**-24))
    assert_close("states", torch.stack(list(states.values())), expected_states, Tolerance(0.0, 256 * 2.0**-24))


@pytest.mark.parametrize("channels", [False, True])
def test_the_adjoint_gives_the_same_outputs(channels):
    """Pushing the query back through the tokens reads the raw records alone, and the state once."""
    raw, state, q = random_tokens(channels)
    k, v, g, beta = raw
    z, o = q[-1].double().repeat_interleave(HV // H, 0), torch.zeros(HV, V, dtype=torch.float64)
    for t in reversed(range(N)):
        key = reference.unit(k[t], True).repeat_interleave(HV // H, 0)
        weight = beta[t].double()[:, None] * (key * z).sum(-1, keepdim=True)
        o += weight * v[t].double()
        z = (g[t] if channels else g[t, :, None]).double().exp() * (z - weight * key)
    o += (state.double() * z[:, None, :]).sum(-1)
    assert_close("out", run(window, raw, state, q)[1][-1], o, TOLERANCE)


def test_tokens_have_their_bits_alone():
    """torch rounds some functions differently in the last elements of an array; a split of the tokens must not show."""
    g = torch.Generator().manual_seed(0)
    a, b, A_log, bias = (torch.randn(*s, generator=g) * 4 for s in ((16, 5), (16, 5), (5,), (5,)))
    k, v = torch.randn(16, 3, 9, generator=g), torch.randn(16, 5, 4, generator=g)
    whole = prepared(k, v, log_decay(A_log, a, bias), strength(b), True)
    for first in range(16):
        for end in range(first + 1, 17):
            rows = slice(first, end)
            part = prepared(k[rows], v[rows], log_decay(A_log, a[rows], bias), strength(b[rows]), True)
            assert all(torch.equal(x, y[rows]) for x, y in zip(part, whole, strict=True))


def test_gates_at_their_limits():
    zero = torch.zeros(1)
    a = torch.tensor([-torch.inf, -1e4, -100.0, 0.0, 19.5, 20.5, 100.0, 1e4])
    g = log_decay(zero, a, zero)
    assert torch.allclose(g[:3], zero, atol=1e-40) and g[5:].tolist() == [-20.5, -100.0, -1e4]
    assert g[3].item() == pytest.approx(-0.6931472) and g[4].item() == pytest.approx(-19.5)
    assert decay(torch.tensor([0.0, -1e4, -torch.inf])).tolist() == [1.0, 0.0, 0.0]
    assert strength(torch.tensor([-torch.inf, -1e4, 0.0, 100.0, 1e4])).tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert log_decay(zero, torch.tensor([torch.nan]), zero).isnan().all()


@pytest.mark.parametrize("size", [0.0, 1e-5, 1e-3, 1.0, 1e3])
def test_the_norm_has_epsilon_inside_the_root(size):
    x = torch.zeros(1, 4)
    x[0, 1] = size
    assert normalised(x)[0, 1].item() == pytest.approx(size / (size**2 + NORM_EPSILON) ** 0.5, rel=1e-6)
