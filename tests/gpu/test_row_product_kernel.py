"""``row_product`` on a GPU: values against FP64, bits of a row in any company."""

import pytest
import torch

from replayssm.row_product import row_product

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NAN = float("nan")
SHAPES = [(24, 83), (512, 256), (3072, 1536), (1090, 4001)]


def make(rows, inputs, outputs, dtype=torch.float32):
    generator = torch.Generator("cuda").manual_seed(rows + inputs)

    def random(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    return random(rows, inputs), random(outputs, inputs).to(dtype), random(outputs).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_values(dtype, inputs, outputs):
    for rows in (1, 12, 20, 64, 300):
        x, weight, bias = make(rows, inputs, outputs, dtype)
        expected = x.double() @ weight.double().t() + bias.double()
        out = torch.full((rows, outputs + 3), NAN, device="cuda")
        row_product(x, weight, bias, out=out[:, :outputs])
        error = (out[:, :outputs] - expected).norm() / expected.norm()
        assert error < 1e-6, (rows, float(error))
        assert out[:, outputs:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_row_has_the_bits_that_it_has_alone(dtype, inputs, outputs):
    x, weight, bias = make(300, inputs, outputs, dtype)
    whole = row_product(x, weight, bias)
    for rows in (slice(0, 1), slice(7, 8), slice(5, 17), slice(3, 35), slice(1, 65), slice(100, 292)):
        assert torch.equal(row_product(x[rows], weight, bias), whole[rows])
    x[4] = NAN
    out = row_product(x, weight, bias)
    assert out[4].isnan().all() and torch.equal(out[5:], whole[5:]) and torch.equal(out[:4], whole[:4])


def test_more_than_two_billion_elements():
    weight = torch.zeros(3, 64, device="cuda")
    weight[:, 5] = torch.tensor([1.0, 2.0, 3.0])
    x = torch.zeros(40_000_000, 64, device="cuda")
    x[-1, 5] = 2.0
    assert row_product(x, weight)[-1].tolist() == [2.0, 4.0, 6.0]


def test_in_a_graph():
    x, weight, bias = make(5, 96, 40)
    expected = row_product(x, weight, bias)
    out, graph = torch.zeros_like(expected), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        row_product(x, weight, bias, out=out)
    graph.replay()
    assert torch.equal(out, expected)
