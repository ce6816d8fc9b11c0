"""The normalisation: values against FP64 in every form, bits of a row in any company, what is refused."""

import pytest
import torch
from torch.library import opcheck

from replayssm.rms_norm import rms_norm
from replayssm.testing import using

NAN = float("nan")
MODULES = ["cpu", "reference", "kernels"]
FORMS = [(False, True, 0.0), (True, True, 0.0), (True, False, 0.0), (False, True, 1.0)]


def skip_without(module):
    if module == "kernels":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("with a GPU the kernels are compiled: tests/gpu")


def make(rows, channels, gated, dtype=torch.float32):
    generator = torch.Generator().manual_seed(channels)
    wide = [torch.full((rows, channels + 5), NAN) for _ in range(2)]
    for each in wide:
        each[:, 2:-3] = torch.randn(rows, channels, generator=generator)
    x, gate = (each[:, 2:-3] for each in wide)
    return x, torch.randn(channels, generator=generator).to(dtype), gate if gated else None


def truth(x, weight, gate, gate_first, offset, eps):
    out = torch.empty(x.shape, dtype=torch.float64)
    with using("reference"):
        from replayssm.rms_norm import reference

        reference.rms_norm(out, x, weight, gate, eps, offset, gate_first)
    return out


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(("gated", "gate_first", "offset"), FORMS)
@pytest.mark.parametrize(
    ("rows", "channels", "dtype"), [(1, 7, torch.float32), (3, 33, torch.float16), (0, 4, torch.float32)]
)
def test_values(module, gated, gate_first, offset, rows, channels, dtype):
    skip_without(module)
    x, weight, gate = make(rows, channels, gated, dtype)
    options = dict(eps=1e-5, offset=offset, gate_first=gate_first)
    expected = truth(x, weight, gate, gate_first, offset, 1e-5)
    out = torch.full((rows, channels + 2), NAN)
    with using(module):
        assert rms_norm(x, weight, gate, out=out[:, 1:-1], **options).data_ptr() == out[:, 1:-1].data_ptr()
        torch.testing.assert_close(out[:, 1:-1].double(), expected, atol=1e-6, rtol=2e-6)
        assert out[:, [0, -1]].isnan().all()
        if rows:
            assert torch.equal(rms_norm(x[-1:], weight, None if gate is None else gate[-1:], **options), out[-1:, 1:-1])
            x[0] = NAN
            again = rms_norm(x, weight, gate, **options)
            assert again[0].isnan().all() and torch.equal(again[1:], out[1:, 1:-1])


def test_the_modules_of_transformers():
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    x, weight, gate = make(5, 24, True)
    plain, gated = modeling.Mamba2RMSNorm(24, 1e-5), modeling.MambaRMSNormGated(24, 1e-5)
    with torch.no_grad():
        for module in (plain, gated):
            module.weight.copy_(weight)
        assert torch.equal(rms_norm(x, weight, eps=1e-5), plain(x))
        assert torch.equal(rms_norm(x, weight, gate, eps=1e-5), gated(x, gate))


def test_the_op_is_known_to_torch():
    x, weight, gate = make(3, 8, True)
    opcheck(torch.ops.replayssm.rms_norm.default, (torch.empty(3, 8), x, weight, gate, 1e-6, 0.0, False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=torch.zeros(3, 9)), r"weight: expected shape \[channels=9\], got \[8\]"),
        (dict(x=torch.zeros(3, 8).half()), r"x: expected dtype torch.float32, got torch.float16"),
        (dict(x=torch.zeros(8, 3).t()), "x: expected axes 1..1"),
        (dict(weight=torch.zeros(16)[::2]), "weight: expected axes 0..0"),
        (dict(gate=torch.zeros(2, 8)), r"gate: expected shape \[rows=3, channels=8\], got \[2, 8\]"),
        (dict(out=torch.zeros(1, 8).expand(3, 8)), "out: expected elements with memory of their own"),
        (dict(eps=-1.0), "eps, offset: expected finite numbers, eps not negative, got -1.0 and 0.0"),
        (dict(offset=NAN), "got 1e-06 and nan"),
        (dict(x=torch.zeros(1, 40000), weight=torch.zeros(40000)), "x: expected 1 to 32768 channels, got 40000"),
        (dict(gate=torch.zeros(3, 8, device="meta")), "gate: expected device cpu, got meta"),
    ],
)
def test_refused(change, message):
    with pytest.raises(ValueError, match=message):
        rms_norm(**{"x": torch.zeros(3, 8), "weight": torch.zeros(8), **change})
