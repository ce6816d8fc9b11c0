"""The noise of sampling on a GPU: that of the CPU, but for the last bits of a logarithm."""

import pytest
import torch

from replayssm.gumbel import gumbel_noise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_values_of_the_cpu():
    places = (torch.tensor([[5], [-1], [2**40 + 3]]), torch.tensor([[0], [7], [2**32 - 1]]), torch.arange(12)[None])
    expected = gumbel_noise(*places, 2051)
    got = gumbel_noise(*(each.cuda() for each in places), 2051)
    torch.testing.assert_close(got.cpu(), expected, atol=1e-13, rtol=1e-13)
