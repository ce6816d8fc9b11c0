"""Layers of equal sizes share a launch of materialize, each with its own memory and decay rates."""

import torch

from replayssm.cache import Mamba2Layer, ReplayPool


def test_equal_layers_keep_their_own_decay_rates():
    equal = Mamba2Layer(nheads=4, headdim=3, dstate=5, ngroups=2, conv_width=3)
    other = Mamba2Layer(nheads=6, headdim=2, dstate=7, ngroups=3, conv_width=2)
    layers = [equal, other, equal]
    pool = ReplayPool(layers, 4, window=6, max_tokens=3)
    generator = torch.Generator().manual_seed(0)
    decays = [-torch.rand(layer.nheads, generator=generator) - 0.1 for layer in layers]
    pool.allocate(3)
    for buffers in pool.buffers:
        for tensor in (buffers.state, buffers.x_cache, buffers.B_cache, buffers.dt_cache):
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
    pool.commit([1, 2], [3, 1], 3)
    pool.materialize([1], [0], [1], decays)
    for layer, buffers, A in zip(layers, pool.buffers, decays, strict=True):
        expected = buffers.state[1].double()
        for row in range(2):  # three accepted, one taken back
            dt, x = buffers.dt_cache[1, :, row].double(), buffers.x_cache[1, :, row].double()
            B = buffers.B_cache[1, :, row].double().repeat_interleave(layer.nheads // layer.ngroups, 0)
            expected = torch.exp(A * dt)[:, None, None] * expected + (dt[:, None] * x)[:, :, None] * B[:, None, :]
        assert torch.allclose(buffers.state[0].double(), expected, rtol=1e-5, atol=1e-6)
