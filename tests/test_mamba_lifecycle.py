"""Many steps with random acceptance against the plain recurrence over the accepted tokens, which knows no ring."""

from dataclasses import dataclass

import pytest
import torch

from replayssm.cursors import Cursors, commit
from replayssm.mamba import checkpointing_ssu
from replayssm.recurrence import advance, process_dt, read_out
from replayssm.rounding import SCALED_DTYPES, decode, encode
from replayssm.testing import Tolerance, assert_close, lifecycle, output_tolerance, poisoned

H, P, N, G = 4, 6, 10, 2


@dataclass
class Text:
    """The tokens of a request: verified ones beyond the accepted are drafts of their own."""

    seed: int

    def __post_init__(self):
        g = torch.Generator().manual_seed(self.seed)
        self.A = -0.05 - torch.rand(H, generator=g)
        self.D = torch.randn(H, generator=g)
        self.bias = torch.randn(H, generator=g) - 2
        self.generator = g

    def tokens(self, count):
        draw = lambda *shape: torch.randn(1, count, *shape, generator=self.generator)  # noqa: E731
        return {"x": draw(H, P), "dt": draw(H, 1).expand(1, count, H, P), "B": draw(G, N), "C": draw(G, N)}


def pool(window, max_tokens, state_dtype=torch.float32, slots=3):
    ring_len = window + max_tokens
    memory = {
        "state": poisoned((slots, H, P, N), state_dtype),
        "x_cache": poisoned((slots, H, ring_len, P), torch.float32),
        "B_cache": poisoned((slots, G, ring_len, N), torch.float32),
        "dt_cache": poisoned((slots, H, ring_len), torch.float32),
    }
    if state_dtype in SCALED_DTYPES:
        memory["state_scale"] = poisoned((slots, H, P), torch.float32)
    cursors = Cursors.allocate(slots, torch.device("cpu"))
    return memory, cursors, ring_len


def verify(text, memory, cursors, slot, tokens, window, **options):
    return checkpointing_ssu(
        **memory, ring_start=cursors.ring_start, prev_num_accepted_tokens=cursors.num_live, **tokens,
        A=text.A[:, None, None].expand(H, P, N), D=text.D[:, None].expand(H, P), out=None,
        dt_bias=text.bias[:, None].expand(H, P), dt_softplus=True, state_batch_indices=torch.tensor([slot]),
        max_window=window, **options,
    )[0]  # fmt: skip


def expected_outputs(text, S, tokens, kept):
    """Outputs of every token, and the state after the kept ones."""
    outputs, after = [], S
    for t in range(tokens["x"].shape[1]):
        x, B, C = tokens["x"][0, t], tokens["B"][0, t], tokens["C"][0, t]
        dt = process_dt(tokens["dt"][0, t, :, 0], text.bias, True, 0.0, torch.inf).float()
        S = advance(S, x, dt, text.A, B)
        outputs.append(read_out(S, x, C, text.D, None))
        after = S if t < kept else after
    return torch.stack(outputs), after


def live(memory, cursors, text, slot, window, max_tokens, steps):
    ring_len = window + max_tokens
    initial = torch.randn(H, P, N, generator=text.generator)
    memory["state"][slot], scale = encode(initial, memory["state"].dtype)
    if scale is not None:
        memory["state_scale"][slot] = scale
    S = decode(*encode(initial, memory["state"].dtype)).double()
    for seq_len, kept in steps:
        tokens = text.tokens(seq_len)
        expected, S = expected_outputs(text, S, tokens, kept)
        yield verify(text, memory, cursors, slot, tokens, window), expected
        commit(
            cursors, torch.tensor([slot]), seq_len, torch.tensor([kept]), window=window, ring_len=ring_len, conv_len=9
        )


@pytest.mark.parametrize(("window", "max_tokens"), [(16, 4), (4, 4), (9, 8), (1, 1), (40, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_any_acceptance_and_changing_lengths_follow_the_recurrence(window, max_tokens, seed):
    memory, cursors, _ = pool(window, max_tokens)
    steps = lifecycle(seed, 60, max_tokens)
    for step, (actual, expected) in enumerate(live(memory, cursors, Text(seed), 1, window, max_tokens, steps)):
        assert_close(f"step {step}", actual, expected, output_tolerance(torch.float32, torch.float32))


def test_every_accept_count_after_every_other():
    window, T = 6, 3
    steps = [(T, first) for first in range(T + 1)] + [(T, a) for pair in range(16) for a in (pair // 4, pair % 4)]
    memory, cursors, _ = pool(window, T)
    for step, (actual, expected) in enumerate(live(memory, cursors, Text(5), 0, window, T, steps)):
        assert_close(f"step {step}", actual, expected, output_tolerance(torch.float32, torch.float32))


def test_a_slot_is_as_good_as_new_after_a_tenant_full_of_nan():
    window, T = 5, 3
    memory, cursors, _ = pool(window, T)
    for ring in ("x_cache", "B_cache", "dt_cache"):
        memory[ring].fill_(torch.nan)
    cursors.ring_start[2] = 6
    for actual, expected in live(memory, cursors, Text(9), 2, window, T, lifecycle(9, 25, T)):
        assert_close("out", actual, expected, output_tolerance(torch.float32, torch.float32))


def test_no_drift_over_two_thousand_tokens():
    window, T = 16, 4
    memory, cursors, _ = pool(window, T)
    worst = []
    for actual, expected in live(memory, cursors, Text(3), 1, window, T, [(T, T)] * 500):
        worst.append((actual.double() - expected).abs().max().item() / expected.abs().max().item())
    early, late = max(worst[:100]), max(worst[-100:])
    assert max(worst) < 32 * 2.0**-24
    assert late < 3 * early, "errors grow with the number of flushes"


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn])
def test_rounded_states_stay_within_their_own_error(state_dtype):
    """Each flush adds one rounding of the state, and the decay forgets it: the error saturates."""
    window, T = 8, 4
    memory, cursors, _ = pool(window, T, state_dtype)
    step = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.int8: 0.5 / 127, torch.float8_e4m3fn: 2.0**-4}
    tolerance = Tolerance(0.0, 6 * step[state_dtype])
    for actual, expected in live(memory, cursors, Text(4), 1, window, T, lifecycle(4, 150, T)):
        assert_close("out", actual, expected, tolerance)


def test_stochastic_rounding_does_not_reach_the_outputs_of_its_own_step_and_is_fair_over_steps():
    window, T = 4, 4
    base, cursors, ring_len = pool(window, T, torch.bfloat16)
    text = Text(6)
    base["state"][1] = torch.randn(H, P, N, generator=text.generator).bfloat16()
    first, second = text.tokens(T), text.tokens(T)
    verify(text, base, cursors, 1, first, window)
    commit(cursors, torch.tensor([1]), T, torch.tensor([T]), window=window, ring_len=ring_len, conv_len=9)

    def flush(**options):
        memory = {name: tensor.clone() for name, tensor in base.items()}
        out = verify(text, memory, cursors, 1, second, window, **options)
        return out, memory["state"][1].double()

    nearest_out, nearest = flush()
    exact = {name: tensor.clone() for name, tensor in base.items()}
    exact["state"] = exact["state"].float()
    verify(text, exact, cursors, 1, second, window)
    draws = []
    for seed in range(300):
        out, state = flush(rand_seed=torch.tensor([seed]))
        assert torch.equal(out, nearest_out)
        draws.append(state)
    again = flush(rand_seed=torch.tensor([7]))[1]
    assert torch.equal(again, draws[7]) and not torch.equal(again, nearest)
    error = torch.stack(draws).mean(0) - exact["state"][1].double()
    spacing = 2.0**-7 * exact["state"][1].abs().double()
    assert (error.abs() <= 5 * spacing / 2 / 300**0.5 + 1e-9).all()
    bias_of_nearest = (nearest - exact["state"][1].double()).abs().mean()
    assert error.abs().mean() < 0.2 * bias_of_nearest
