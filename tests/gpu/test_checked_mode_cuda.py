"""``REPLAYSSM_CHECK=1`` on a GPU: values are read there too, and what is right still runs."""

import pytest
import torch

from replayssm.cache import Mamba2Layer, ReplayPool
from replayssm.conv import causal_conv1d_replay

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYER = Mamba2Layer(nheads=6, headdim=24, dstate=20, ngroups=2, conv_width=3)


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setenv("REPLAYSSM_CHECK", "1")
    return ReplayPool([LAYER], 3, window=7, max_tokens=3, device="cuda")


def test_the_convolution(pool):
    slots, rows = pool.allocate(2), pool.buffers[0].conv_rows
    x, weight = torch.randn(2, 3, LAYER.conv_channels, device="cuda"), torch.randn(LAYER.conv_channels, 3).cuda()
    rows[2] = torch.nan  # nobody's
    out = causal_conv1d_replay(rows, pool.cursors.conv_start, x, weight, state_batch_indices=slots)
    assert out.isfinite().all()
    rows[slots[1], 1, 5] = torch.nan
    with pytest.raises(ValueError, match=r"rows: expected finite values .* of the history of slot 1"):
        causal_conv1d_replay(rows, pool.cursors.conv_start, x, weight, state_batch_indices=slots)
    pool.cursors.conv_start[slots[0]] = 99
    with pytest.raises(ValueError, match=r"conv_start: expected 0 <= conv_start < conv_len=5, got 99 at slot 0"):
        causal_conv1d_replay(rows, pool.cursors.conv_start, x, weight, state_batch_indices=slots)


def test_materialize(pool):
    slots, rates = pool.allocate(2), [-torch.rand(6, device="cuda") - 0.1]
    pool.buffers[0].state.normal_()
    pool.commit(slots, torch.tensor([2, 1], device="cuda"), 2)
    pool.materialize(slots[:1], slots[1:], torch.tensor([2], device="cuda"), rates)
    assert torch.equal(pool.buffers[0].state[0], pool.buffers[0].state[1])
    with pytest.raises(ValueError, match="rewind: expected 0 <= rewind <= 2 "):
        pool.materialize(slots[:1], slots[1:], torch.tensor([3], device="cuda"), rates)
    pool.cursors.ring_start[slots[0]] = 99
    with pytest.raises(ValueError, match="ring_start: expected 0 <= ring_start < ring_buffer_len=10, got 99"):
        pool.materialize(slots[:1], slots[1:], torch.tensor([1], device="cuda"), rates)
