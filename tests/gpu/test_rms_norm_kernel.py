"""``rms_norm`` on a GPU: values against FP64, bits of a row in any company."""

import pytest
import torch

from replayssm.rms_norm import reference, rms_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("channels", [7, 3072])
@pytest.mark.parametrize(("gated", "gate_first", "offset"), [(False, True, 0.0), (True, True, 0.0), (True, False, 1.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_values_and_bits(channels, gated, gate_first, offset, dtype):
    generator = torch.Generator("cuda").manual_seed(channels)
    wide = torch.full((2, 90, channels + 5), float("nan"), device="cuda")
    wide[:, :, 2:-3] = torch.randn(2, 90, channels, generator=generator, device="cuda")
    x, gate = wide[:, :, 2:-3]
    gate = gate if gated else None
    weight = torch.randn(channels, generator=generator, device="cuda").to(dtype)
    options = dict(eps=1e-5, offset=offset, gate_first=gate_first)
    expected, out = torch.empty(90, channels, dtype=torch.float64, device="cuda"), torch.empty_like(x)
    reference.rms_norm(expected, x, weight, gate, 1e-5, offset, gate_first)
    rms_norm(x, weight, gate, out=out, **options)
    assert (out - expected).norm() / expected.norm() < 1e-6
    for rows in (slice(0, 1), slice(41, 90)):
        assert torch.equal(rms_norm(x[rows], weight, None if gate is None else gate[rows], **options), out[rows])
