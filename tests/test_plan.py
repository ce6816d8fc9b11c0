"""Bytes of slots and of steps, by independent arithmetic and by simulation."""

import math
import random

import pytest
import torch

from replayssm.cache import ExactMamba2Layer, Mamba2Layer, choose_window, slot_bytes, snapshot_bytes, state_traffic

NEMOTRON_H = Mamba2Layer(nheads=128, headdim=64, dstate=128, ngroups=8, conv_width=4)
TINY = Mamba2Layer(nheads=6, headdim=3, dstate=5, ngroups=2, conv_width=3)
WIDE = Mamba2Layer(nheads=4, headdim=7, dstate=2, ngroups=4, conv_width=5)


@pytest.mark.parametrize("activation, limit", [(torch.bfloat16, 1.15), (torch.float32, 1.27)])
def test_memory_of_a_nemotron_h_slot(activation, limit):
    cost = slot_bytes([NEMOTRON_H] * 3, window=16, max_tokens=4, activation_dtype=activation)
    assert cost.state == 3 * 128 * 64 * 128 * 4
    assert 1.0 < cost.total / cost.state <= limit
    assert cost.overhead == cost.total / cost.state


@pytest.mark.parametrize(
    "state, size", [(torch.float32, 4), (torch.float16, 2), (torch.int8, 1), (torch.float8_e4m3fn, 1)]
)
def test_bytes_by_hand(state, size):
    cost = slot_bytes([TINY, WIDE], window=7, max_tokens=4, state_dtype=state, activation_dtype=torch.bfloat16)
    heads_times_rows = 6 * 3 + 4 * 7
    assert cost.state == size * (6 * 3 * 5 + 4 * 7 * 2)
    assert cost.scale == (4 * heads_times_rows if size == 1 else 0)
    assert cost.ring == 11 * ((6 * 3 + 2 * 5) * 2 + 6 * 4 + (4 * 7 + 4 * 2) * 2 + 4 * 4)
    assert cost.conv == 8 * 2 * ((18 + 2 * 10) + (28 + 2 * 8))  # both layers have the rows of the wider one
    assert cost.cursors == 16
    assert cost.total == cost.state + cost.scale + cost.ring + cost.conv + cost.cursors


def test_snapshots_cost_a_state_per_token():
    assert snapshot_bytes([TINY, WIDE], num_tokens=3, state_dtype=torch.int8) == 3 * (146 + 4 * 46)


def simulated_bytes(window, num_tokens, accept, state, row, steps=20000):
    """Mean bytes of a step: count what the rule does with random accept counts."""
    live = moved = accepted_sum = 0
    for _ in range(steps):
        flush = live + num_tokens > window
        moved += state * (1 + flush) + row * (live + num_tokens)
        accepted = accept()
        accepted_sum += accepted
        live = accepted + (0 if flush else live)
    return moved / steps, accepted_sum / steps


@pytest.mark.parametrize(
    "window, num_tokens, low", [(16, 4, 1), (16, 4, 3), (9, 1, 1), (31, 6, 2), (24, 8, 1), (8, 8, 3), (5, 5, 5)]
)
def test_traffic_agrees_with_a_simulation(window, num_tokens, low):
    draw = random.Random(window * num_tokens)
    state, row = 128 * 64 * 128 * 4, (128 * 64 + 8 * 128) * 2 + 128 * 4
    moved, mean = simulated_bytes(window, num_tokens, lambda: draw.randint(low, num_tokens), state, row)
    told = state_traffic(
        [NEMOTRON_H], num_tokens=num_tokens, mean_accepted=mean, window=window, activation_dtype=torch.bfloat16
    )
    assert told.replay == pytest.approx(moved, rel=0.02) and told.flush_rate <= 1
    assert told.ordinary == 2 * state
    assert told.snapshots == (1 + num_tokens) * state
    assert told.per_token()["snapshots"] == pytest.approx(told.snapshots / mean)


@pytest.mark.parametrize("state, size", [(torch.float32, 4), (torch.int8, 1)])
def test_window_without_drafts_has_the_closed_form(state, size):
    row = (128 * 64 + 8 * 128) * 2 + 128 * 4
    bytes_of_state = 128 * 64 * (128 * size + (4 if size == 1 else 0))
    window = choose_window([NEMOTRON_H] * 2, num_tokens=1, mean_accepted=1.0, state_dtype=state,
                           activation_dtype=torch.bfloat16)  # fmt: skip
    assert abs(window - math.sqrt(2 * bytes_of_state / row)) <= 1


def test_window_with_drafts():
    options = {"num_tokens": 4, "mean_accepted": 3.0, "activation_dtype": torch.bfloat16}
    window = choose_window([NEMOTRON_H], **options)
    assert 36 <= window <= 42
    best = state_traffic([NEMOTRON_H], window=window, **options).replay
    for other in (4, 16, window - 1, window + 1, 64):
        assert best <= state_traffic([NEMOTRON_H], window=other, **options).replay


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: slot_bytes([]), "layers: expected at least one layer"),
        (
            lambda: slot_bytes([TINY], window=4, max_tokens=5),
            r"max_tokens: expected 1 <= max_tokens <= window=4 .*got 5",
        ),
        (lambda: slot_bytes([TINY], max_tokens=0), "max_tokens: .*got 0"),
        (lambda: slot_bytes([TINY], state_dtype=torch.float64), "state_dtype: expected .*got torch.float64"),
        (lambda: slot_bytes([TINY], activation_dtype=torch.int8), "activation_dtype: expected .*got torch.int8"),
        (lambda: state_traffic([TINY], num_tokens=17, mean_accepted=2.0), "num_tokens: .*window=16.*got 17"),
        (lambda: state_traffic([TINY], num_tokens=4, mean_accepted=4.5), "mean_accepted: .*num_tokens=4, got 4.5"),
        (lambda: state_traffic([TINY], num_tokens=4, mean_accepted=0.5), "mean_accepted: .*got 0.5"),
        (lambda: choose_window([TINY], num_tokens=65, mean_accepted=1.0), "num_tokens: .*got 65"),
        (lambda: snapshot_bytes([TINY], num_tokens=0), "num_tokens: .*got 0"),
        (lambda: Mamba2Layer(6, 3, 5, 4, 3), "nheads: expected a multiple of ngroups=4, got 6"),
        (lambda: Mamba2Layer(6, 3, 5, 2, 6), "conv_width: expected 2 <= conv_width <= 5, got 6"),
        (
            lambda: state_traffic([ExactMamba2Layer(6, 3, 5, 2, 4, 16)], num_tokens=2, mean_accepted=1.0),
            "layers: expected layers that replay a window, got ExactMamba2Layer",
        ),
        (lambda: Mamba2Layer(6, 0, 5, 2, 4), "headdim: expected 1 <= headdim <= 2147483647, got 0"),
        (lambda: Mamba2Layer(6, 3.0, 5, 2, 4), "headdim: expected an int, got 3.0"),
        (lambda: slot_bytes([TINY], window=65), "window: expected 1 <= window <= 64, got 65"),
        (lambda: snapshot_bytes([TINY], num_tokens=1.5), "num_tokens: expected an int, got 1.5"),
    ],
)
def test_wrong_sizes(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
