"""The noise of sampling: every implementation has the same words; what is refused. Its statistics: tests/hf."""

import pytest
import torch
from torch.library import opcheck

from replayssm.gumbel import gumbel_noise
from replayssm.testing import using

SEEDS = torch.tensor([[5], [-1], [2**40 + 3]])
REQUESTS = torch.tensor([[0], [7], [2**32 - 1]])
POSITIONS = torch.tensor([[0, 9], [3, 4], [70000, 2]])


@pytest.mark.parametrize("module", ["cpu", "kernels"])
@pytest.mark.parametrize("vocab_size", [1, 4, 9])
def test_values(module, vocab_size):
    if module == "kernels":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("with a GPU the kernels are compiled: tests/gpu")
    with using("reference"):
        expected = gumbel_noise(SEEDS, REQUESTS, POSITIONS, vocab_size)
    with using(module):
        got = gumbel_noise(SEEDS, REQUESTS, POSITIONS, vocab_size)
        assert got.shape == (3, 2, vocab_size) and got.dtype == torch.float64
        torch.testing.assert_close(got, expected, atol=1e-14, rtol=1e-14)
        alone = gumbel_noise(SEEDS[1, 0], REQUESTS[1, 0], POSITIONS[1, 1], vocab_size)
        assert torch.equal(alone, got[1, 1])


def test_the_op_is_known_to_torch():
    places = [each.expand(3, 2) for each in (SEEDS, REQUESTS, POSITIONS)]
    opcheck(torch.ops.replayssm.gumbel_noise.default, (torch.empty(3, 2, 5, dtype=torch.float64), *places))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(seeds=SEEDS.int()), "seeds: expected dtype torch.int64, got torch.int32"),
        (dict(positions=POSITIONS.to("meta")), "positions: expected device cpu, got meta"),
        (dict(requests=torch.arange(5)), r"expected shapes that broadcast, got \[3, 1\], \[5\], \[3, 2\]"),
        (dict(vocab_size=0), "vocab_size: expected 1 <= vocab_size"),
    ],
)
def test_refused(change, message):
    arguments = {"seeds": SEEDS, "requests": REQUESTS, "positions": POSITIONS, "vocab_size": 9, **change}
    with pytest.raises(ValueError, match=message):
        gumbel_noise(**arguments)
    with pytest.raises(TypeError, match=r"seeds: expected a torch\.Tensor, got int"):
        gumbel_noise(3, REQUESTS, POSITIONS, 9)
