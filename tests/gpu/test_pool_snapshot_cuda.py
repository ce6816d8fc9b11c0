"""Slots of pools on a GPU: to the host and back, into another pool, with all their bytes; outputs that stay."""

import pytest
import torch

from replayssm.cache import ExactMamba2Layer, GDNLayer, Mamba2Layer, ReplayPool, restore, snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MAMBA2 = Mamba2Layer(nheads=6, headdim=24, dstate=20, ngroups=2, conv_width=3)
GDN = GDNLayer(value_heads=4, value_dim=24, key_dim=20, key_heads=2, conv_width=4)
EXACT = ExactMamba2Layer(nheads=6, headdim=24, dstate=20, ngroups=2, conv_width=3, chunk_size=32)
POOLS = {
    "fp32": ([MAMBA2, GDN, EXACT], {}),
    "fp8": ([MAMBA2, MAMBA2], {"state_dtype": torch.float8_e4m3fn, "activation_dtype": torch.bfloat16}),
    "int8": ([MAMBA2], {"state_dtype": torch.int8, "stochastic_rounding": True}),
}


def filled(layers, options, seed):
    pool = ReplayPool(layers, 5, window=7, max_tokens=3, device="cuda", **options)
    pool.allocate(5)
    generator = torch.Generator("cuda").manual_seed(seed)
    for tensor in pool.per_slot().values():
        tensor.view(torch.uint8).random_(0, 256, generator=generator)
    return pool


def rows(pool, slots):
    return [tensor.contiguous().view(torch.uint8).view(5, -1)[slots].clone() for tensor in pool.per_slot().values()]


@pytest.mark.parametrize("kind", POOLS)
def test_every_byte_comes_back_in_another_pool(kind):
    pool, other = (filled(*POOLS[kind], seed) for seed in (1, 2))
    before = rows(other, [0, 2, 3])
    saved = {name: tensor.cpu() for name, tensor in snapshot(pool, torch.tensor([3, 0], device="cuda")).items()}
    restore(other, [1, 4], saved)
    assert all(torch.equal(a, b) for a, b in zip(rows(other, [1, 4]), rows(pool, [3, 0]), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(rows(other, [0, 2, 3]), before, strict=True))
    with pytest.raises(ValueError, match="slots: expected slots in use"):
        pool.free([3])
        restore(pool, [3], {name: tensor[:1] for name, tensor in saved.items()})
