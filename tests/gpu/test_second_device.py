"""Tensors on a device that is not the current one: kernels go where the tensors are, and give the same bits."""

import pytest
import torch

from replayssm.cache import Mamba2Layer, ReplayPool
from replayssm.conv import causal_conv1d_replay
from replayssm.row_product import row_product

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
DEVICES = ("cuda:0", "cuda:1")
LAYER = Mamba2Layer(nheads=6, headdim=24, dstate=20, ngroups=2, conv_width=3)


def step(device):
    """A product, a convolution, a commit and a materialized state."""
    generator = torch.Generator().manual_seed(0)
    pool = ReplayPool([LAYER], 3, window=7, max_tokens=3, device=device)
    slots = pool.allocate(2)
    pool.write_state(
        0, slots, torch.randn(2, 6, 24, 20, generator=generator).to(device),
        torch.randn(2, LAYER.conv_channels, 2, generator=generator).to(device),
    )  # fmt: skip
    x, weight = (torch.randn(*shape, generator=generator).to(device) for shape in ((6, 40), (LAYER.conv_channels, 40)))
    taps = torch.randn(LAYER.conv_channels, 3, generator=generator).to(device)
    channels = row_product(x, weight).view(2, 3, -1)
    out = causal_conv1d_replay(
        pool.buffers[0].conv_rows, pool.cursors.conv_start, channels, taps, state_batch_indices=slots
    )
    pool.commit(slots, torch.tensor([2, 1], device=device), 3)
    pool.materialize(slots[:1], slots[1:], torch.tensor([2], device=device), [-torch.ones(6, device=device)])
    return [each.cpu() for each in (out, pool.buffers[0].state, pool.cursors.conv_start, pool.cursors.num_live)]


def test_ops_and_pools():
    first, second = (step(device) for device in DEVICES)
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_model_called_with_a_cache():
    pytest.importorskip("transformers")
    from tiny import fresh_model, make_prompts

    import replayssm.hf as hf

    ids, logits = torch.tensor(make_prompts("biases", (9,))), []
    for device in DEVICES:
        model = hf.attach(fresh_model().to(device))
        with torch.no_grad(), hf.ReplayCache(model, 1, max_tokens=4) as cache:
            for part in (ids[:, :5], ids[:, 5:]):
                logits.append(model(part.to(device), **{cache.name: cache}).logits.cpu())
    assert torch.equal(logits[0], logits[2]) and torch.equal(logits[1], logits[3])
