"""Pools with Gated DeltaNet layers, alone and beside Mamba-2 layers: what test_pool.py shows for Mamba-2."""

import pytest
import torch
from pool_model import (
    GDN,
    MAMBA2,
    MIXED,
    Decoder,
    as_bytes,
    assert_same_bytes,
    cursor_values,
    every_tensor,
    fill_pool,
    make_pool,
    poison_slot,
    snapshot,
)

from replayssm.cache import GDNLayer, Mamba2Layer, ReplayPool, choose_window, slot_bytes, snapshot_bytes
from replayssm.gdn_decode import gated_delta_rule_replayssm_commit

TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}
QWEN3_NEXT = GDNLayer(value_heads=32, value_dim=128, key_dim=128, key_heads=16, conv_width=4)
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", params=["gdn", "mixed"])
def decoder(request):
    return Decoder({"gdn": GDN, "mixed": MIXED}[request.param])


def verify(decoder, pool, slots, tokens):
    return [decoder.verify(pool, slots, tokens, index=index) for index in range(len(decoder.layers))]


@pytest.mark.parametrize("state_dtype", FLOATS)
def test_bytes_are_what_is_allocated_and_what_the_plan_says(decoder, state_dtype):
    options = {"window": 5, "max_tokens": 3, "state_dtype": state_dtype, "activation_dtype": torch.bfloat16}
    pool = make_pool(decoder, **options)
    cost = slot_bytes(decoder.layers, **options)
    assert pool.bytes() == sum(tensor.untyped_storage().nbytes() for _, tensor in every_tensor(pool)) == 5 * cost.total
    fields = pool.bytes_by_field()
    assert fields["state"] == 5 * cost.state and cost.scale == 0
    assert sum(count for name, count in fields.items() if name.endswith("_cache")) == 5 * cost.ring
    assert snapshot_bytes(decoder.layers, num_tokens=3, state_dtype=state_dtype) == 3 * cost.state


def test_plan_of_a_qwen3_next_layer():
    cost = slot_bytes([QWEN3_NEXT], window=16, max_tokens=4, activation_dtype=torch.bfloat16)
    assert cost.state == 32 * 128 * 128 * 4
    assert cost.ring == 20 * ((32 + 16) * 128 * 2 + 2 * 32 * 4)
    assert cost.conv == (3 + 4) * (2 * 16 + 32) * 128 * 2
    assert 1.1 < cost.overhead < 1.2
    options = {"num_tokens": 1, "mean_accepted": 1.0, "activation_dtype": torch.bfloat16}
    assert choose_window([QWEN3_NEXT], **options) == pytest.approx((2 * cost.state / (cost.ring / 20)) ** 0.5, abs=1)


@pytest.mark.parametrize("state_dtype", FLOATS)
def test_fork_copy_reset_and_reuse_reach_every_field(decoder, state_dtype):
    pool = make_pool(decoder, num_slots=6, state_dtype=state_dtype, activation_dtype=torch.float16)
    pool.allocate(3)
    fill_pool(pool)
    before = snapshot(pool)
    new = pool.fork([2, 0])
    for name, tensor in every_tensor(pool):
        assert torch.equal(as_bytes(tensor)[new], before[name][[2, 0]]), name
    pool.copy([0, 1], [1, 0])
    for name, tensor in every_tensor(pool):
        assert torch.equal(as_bytes(tensor)[[0, 1]], before[name][[1, 0]]), name
    poison_slot(pool, 1)
    pool.free([1])
    pool.reset([2])
    assert pool.allocate().tolist() == [1]
    for name, tensor in every_tensor(pool):
        assert not as_bytes(tensor)[[1, 2]].any(), name


@pytest.mark.parametrize("state_dtype", FLOATS)
@pytest.mark.parametrize("rewind", [0, 1, 2])
def test_materialized_state_has_the_bits_of_a_flush_of_the_same_rows(decoder, state_dtype, rewind):
    pool = make_pool(decoder, state_dtype=state_dtype)
    slot, twin, copy = pool.allocate(3).tolist()
    for index, accepted in ((slot, 2), (twin, 2 - rewind)):
        verify(decoder, pool, torch.tensor([index]), torch.tensor([[1, 2, 3]]))
        pool.commit([index], [3], 3)
        verify(decoder, pool, torch.tensor([index]), torch.tensor([[4, 5]]))
        pool.commit([index], [accepted], 2)
    before = snapshot(pool)
    pool.materialize([slot], [copy], [rewind], decoder.decays)
    assert_same_bytes(pool, before, [slot, twin])
    verify(decoder, pool, torch.tensor([twin]), torch.tensor([[6, 7, 8]]))  # 5 - rewind + 3 rows exceed the window
    for buffers in pool.buffers:
        assert torch.equal(as_bytes(buffers.state)[copy], as_bytes(buffers.state)[twin])
    assert not any(cursor_values(pool, copy).values())
    pool.materialize([slot], [slot], [rewind], decoder.decays)
    for buffers in pool.buffers:
        assert torch.equal(as_bytes(buffers.state)[copy], as_bytes(buffers.state)[slot])


def test_materialized_fp32_state_has_the_bits_of_committing_every_token():
    decoder = Decoder(GDN)
    pool = make_pool(decoder, num_slots=2)
    slot, copy = pool.allocate(2).tolist()
    for tokens, accepted in (([1, 2, 3], 2), ([4, 5], 2)):
        verify(decoder, pool, torch.tensor([slot]), torch.tensor([tokens]))
        pool.commit([slot], [accepted], len(tokens))
    pool.materialize([slot], [copy], [1])
    for buffers in pool.buffers:
        state = torch.zeros_like(buffers.state)[None, :1]
        for row in range(3):
            one = [
                getattr(buffers, f"{name}_cache")[None, slot : slot + 1, :, row : row + 1].contiguous()
                for name in ("v", "k", "g", "beta")
            ]
            gated_delta_rule_replayssm_commit(state, *one, torch.tensor([0]), torch.tensor([1]))
        assert torch.equal(buffers.state[copy], state[0, 0])


def test_decay_rates_belong_to_mamba2_layers():
    layers = [GDN[0], Mamba2Layer(*MAMBA2[0]), GDN[1], Mamba2Layer(*MAMBA2[1])]
    pool, rates = ReplayPool(layers, 2), [-torch.ones(4), -torch.ones(6)]
    pool.allocate(2)
    pool.materialize([0], [1], [0], [None, rates[0], None, rates[1]])
    before = snapshot(pool)
    for A, message in (
        (None, "A: expected a list of one tensor per layer, got NoneType"),
        (rates, "A: expected one tensor per layer, 4, got 2"),
        ([rates[0], rates[0], None, rates[1]], r"A\[0\]: expected None for a GDN layer, whose ring holds the decays"),
        ([None, None, None, rates[1]], r"A\[1\]: expected a torch.Tensor, got NoneType"),
        ([None, rates[1], None, rates[1]], r"A\[1\]: expected shape \[nheads=4\], got \[6\]"),
        ([None, rates[0], None, rates[1].double()], r"A\[3\]: expected dtype torch.float32"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            pool.materialize([0], [1], [0], A)
    assert_same_bytes(pool, before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ReplayPool(GDN, 1, window=20, max_tokens=17), "max_tokens: expected at most 16 with GDNLayer"),
        (lambda: ReplayPool(GDN, 1, state_dtype=torch.int8), "state_dtype: expected .* for GDN layers, got torch.int8"),
        (lambda: ReplayPool(GDN, 1, activation_dtype=torch.float64), "activation_dtype: expected .* GDN layers, got"),
        (
            lambda: ReplayPool(MIXED[1:], 1, state_dtype=torch.bfloat16, stochastic_rounding=True),
            "stochastic_rounding: expected False with GDN layers, which round to the nearest, got True",
        ),
        (lambda: ReplayPool([(4, 3, 5, 2, 3)], 1), "layers: expected Mamba2Layer or .* or GDNLayer, got tuple"),
        (lambda: GDNLayer(6, 3, 5, 4, 3), "value_heads: expected a multiple of key_heads=4, got 6"),
        (lambda: GDNLayer(6, 257, 5, 2, 3), "value_dim: expected 1 <= value_dim <= 256, got 257"),
        (lambda: GDNLayer(6, 3, 257, 2, 3), "key_dim: expected 1 <= key_dim <= 256, got 257"),
        (lambda: GDNLayer(6, 3, 0, 2, 3), "key_dim: expected 1 <= key_dim <= 256, got 0"),
        (lambda: GDNLayer(6, 3, 5.0, 2, 3), "key_dim: expected an int, got 5.0"),
        (lambda: GDNLayer(6, 3, 5, 2, 6), "conv_width: expected 2 <= conv_width <= 5, got 6"),
    ],
)  # fmt: skip
def test_wrong_layers_and_pools(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_write_state_names_the_axes_of_a_gdn_layer():
    pool = ReplayPool(GDN, 2)
    slot, before = pool.allocate(), snapshot(pool)
    window = torch.zeros(1, GDN[0].conv_channels, 3)
    with pytest.raises(ValueError, match=r"state: expected shape \[n=1, value_heads=6, value_dim=3, key_dim=5\], got"):
        pool.write_state(0, slot, torch.zeros(1, 6, 5, 3), window)
    assert_same_bytes(pool, before)
    pool.write_state(0, slot, torch.ones(1, 6, 3, 5), window)
    assert pool.buffers[0].state[slot].sum() == 6 * 3 * 5
