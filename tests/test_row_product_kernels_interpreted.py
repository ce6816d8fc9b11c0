"""The Triton kernel of ``row_product`` under Triton's interpreter: its logic, on a machine without a GPU."""

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: tests/gpu", allow_module_level=True)

from replayssm.row_product import configs, row_product
from replayssm.testing import using


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "bias"),
    [(1, 33, 20, True), (18, 150, 17, False), (35, 70, 7, True), (3, 1100, 7, True)],
)
def test_values_and_bits(dtype, rows, inputs, outputs, bias):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs + 4, generator=generator)[:, :inputs]
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    offset = torch.randn(outputs, generator=generator).to(dtype) if bias else None
    out = torch.full((rows, outputs + 2), float("nan"))
    with using("kernels"):
        row_product(x, weight, offset, out=out[:, :outputs])
        last = row_product(x[-1:], weight, offset)
    expected = x.double() @ weight.double().t() + (0 if offset is None else offset.double())
    torch.testing.assert_close(out[:, :outputs].double(), expected, atol=2e-5, rtol=2e-6)
    assert out[:, outputs:].isnan().all()
    torch.testing.assert_close(last, out[-1:, :outputs], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_parts_in_programs_of_their_own_are_added_in_order(dtype, monkeypatch):
    x, weight, bias = torch.randn(2, 1100), torch.randn(5, 1100).to(dtype), torch.randn(5)
    with using("kernels"):
        apart = row_product(x, weight, bias)
        monkeypatch.setattr(configs, "_ENOUGH", 0)
        assert torch.equal(row_product(x, weight, bias), apart)
