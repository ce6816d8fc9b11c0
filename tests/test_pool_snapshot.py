"""Slots outside of their pool: they come back anywhere with the bits they had, or not at all."""

import pytest
import torch
from pool_model import MIXED, Decoder, History, assert_same_bytes, fill_pool, make_pool, poison_slot, snapshot

from replayssm import cache
from replayssm.cache import ExactMamba2Layer, ReplayPool

DECODER = Decoder(MIXED)
EXACT = [ExactMamba2Layer(nheads=6, headdim=3, dstate=5, ngroups=2, conv_width=3, chunk_size=16)]
POOLS = {
    "fp32": lambda: make_pool(DECODER),
    "bf16": lambda: make_pool(DECODER, state_dtype=torch.bfloat16, activation_dtype=torch.float16),
    "int8": lambda: make_pool(Decoder(), state_dtype=torch.int8, stochastic_rounding=True, seed=3),
    "fp8": lambda: make_pool(Decoder(), state_dtype=torch.float8_e4m3fn),
    "exact": lambda: ReplayPool(EXACT, 5, window=5, max_tokens=3, activation_dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", POOLS)
def test_every_byte_comes_back_in_other_slots_of_another_pool(kind):
    pool, other = POOLS[kind](), POOLS[kind]()
    pool.allocate(5)
    fill_pool(pool)
    before = snapshot(pool)
    saved = cache.snapshot(pool, [3, 0])
    assert_same_bytes(pool, before)
    assert all(tensor.shape[0] == 2 and tensor.is_contiguous() for tensor in saved.values())
    assert {tensor.data_ptr() for tensor in saved.values()}.isdisjoint(t.data_ptr() for t in pool.per_slot().values())
    other.allocate(5)
    fill_pool(other, seed=2)
    untouched = snapshot(other)
    cache.restore(other, torch.tensor([1, 4], dtype=torch.int32), saved)
    assert_same_bytes(other, untouched, [0, 2, 3])
    for name, tensor in other.per_slot().items():
        there, here = (each.contiguous().view(torch.uint8) for each in (tensor, pool.per_slot()[name]))
        assert torch.equal(there.view(5, -1)[[1, 4]], here.view(5, -1)[[3, 0]]), name


def test_a_request_goes_on_with_its_bits_after_a_file(tmp_path):
    files = pytest.importorskip("safetensors.torch")
    pool, history = make_pool(DECODER), History(DECODER).extend([5, 6, 7])
    [slot] = pool.allocate().tolist()
    history.prefill(pool, slot)

    def step(pool, slot, tokens):
        slots = torch.tensor([slot])
        outs = [DECODER.verify(pool, slots, torch.tensor([tokens]), index=index) for index in range(2)]
        pool.commit(slots, [len(tokens) - 1], len(tokens))
        return outs

    step(pool, slot, [1, 2, 3])
    files.save_file(cache.snapshot(pool, [slot]), tmp_path / "request.safetensors")
    expected = [step(pool, slot, tokens) for tokens in ([4, 5], [6, 7, 8], [9, 1, 2])]
    other = make_pool(DECODER, num_slots=4)
    for each in range(4):
        poison_slot(other, each)
    new = int(other.allocate(3)[2])
    cache.restore(other, [new], files.load_file(tmp_path / "request.safetensors"))
    for tokens, outs in zip(([4, 5], [6, 7, 8], [9, 1, 2]), expected, strict=True):
        for got, right in zip(step(other, new, tokens), outs, strict=True):
            assert torch.equal(got, right)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: saved.pop("1.g_cache"), "saved: expected the fields of this pool's .* as '1.g_cache'"),
        (lambda saved: saved.update(more=torch.zeros(1)), "saved: expected the fields of this pool's .* as 'more'"),
        (lambda saved: saved.update({3: torch.zeros(1)}), "saved: expected the fields of this pool's .* as '3'"),
        (
            lambda saved: saved.update({"0.x_cache": saved["0.x_cache"][:, :, :-1]}),
            r"saved\['0.x_cache'\]: expected shape \[n=1, 4, 8, 3\], got \[1, 4, 7, 3\]",
        ),
        (
            lambda saved: saved.update({"0.state": saved["0.state"].half()}),
            r"saved\['0.state'\]: expected dtype torch.float32, got torch.float16",
        ),
        (
            lambda saved: saved.update({"cursors.num_live": saved["cursors.num_live"].to("meta")}),
            r"saved\['cursors.num_live'\]: expected data, got a tensor on device 'meta'",
        ),
        (lambda saved: saved.update({"0.state": None}), r"saved\['0.state'\]: expected a torch.Tensor, got NoneType"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(change, message):
    pool = make_pool(DECODER)
    pool.allocate(3)
    fill_pool(pool)
    saved = cache.snapshot(pool, [1])
    change(saved)
    before = snapshot(pool)
    with pytest.raises((TypeError, ValueError), match=message):
        cache.restore(pool, [0], saved)
    for slots, expected in (([3], "slots: expected slots in use, got 3"), ([0, 0], "slots: expected distinct slots")):
        with pytest.raises(ValueError, match=expected):
            cache.restore(pool, slots, cache.snapshot(pool, [1, 2][: len(slots)]))
    assert_same_bytes(pool, before)


def test_pools_of_other_arguments_are_told_apart():
    pool, slot = make_pool(DECODER, window=6, max_tokens=2), [0]
    pool.allocate()
    saved = cache.snapshot(pool, slot)
    other = make_pool(DECODER, window=5, max_tokens=3)  # the same length of the ring
    other.allocate()
    assert other.ring_len == pool.ring_len
    with pytest.raises(ValueError, match=r"saved\['0.conv_rows'\]: expected shape "):
        cache.restore(other, slot, saved)
