"""Products whose rows stand alone: values against FP64, bits against each row by itself, what is refused."""

from itertools import product

import pytest
import torch
from torch.library import opcheck

from replayssm.row_product import configs, row_product
from replayssm.testing import using

NAN = float("nan")


def make(rows, inputs, outputs, dtype=torch.float32, bias=True):
    generator = torch.Generator().manual_seed(rows + inputs)
    x, weight = torch.randn(rows, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)
    return x, weight.to(dtype), torch.randn(outputs, generator=generator).to(dtype) if bias else None


@pytest.mark.parametrize("module", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "bias"), [(1, 33, 57, True), (7, 130, 20, False), (0, 9, 4, True)]
)
def test_values(module, dtype, rows, inputs, outputs, bias):
    x, weight, offset = make(rows, inputs, outputs, dtype, bias)
    expected = x.double() @ weight.double().t() + (0 if offset is None else offset.double())
    with using(module):
        out = torch.full((rows, outputs + 3), NAN)[:, :outputs]
        assert row_product(x, weight, offset, out=out) is out
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-6)
        assert torch.equal(row_product(x, weight, offset), out)


@pytest.mark.parametrize("inputs", [5, 64, 257])
def test_a_row_has_the_bits_that_it_has_alone(inputs):
    x, weight, bias = make(70, inputs, 41)
    whole = row_product(x, weight, bias)
    for rows in (slice(0, 1), slice(3, 4), slice(1, 70), slice(60, 70), slice(0, 33)):
        assert torch.equal(row_product(x[rows], weight, bias), whole[rows])
    wide = torch.full((70, inputs + 5), NAN)
    wide[:, 2:-3] = x
    assert torch.equal(row_product(wide[:, 2:-3], weight, bias), whole)


def test_a_row_that_is_not_finite_leaves_the_others_alone():
    x, weight, bias = make(9, 40, 12)
    expected = row_product(x, weight, bias)
    x[4] = NAN
    out = row_product(x, weight, bias)
    others = [row for row in range(9) if row != 4]
    assert out[4].isnan().all() and torch.equal(out[others], expected[others])


def test_the_op_is_known_to_torch():
    x, weight, bias = make(3, 8, 5)
    opcheck(torch.ops.replayssm.row_product.default, (torch.empty(3, 5), x, weight, bias))
    compiled = torch.compile(lambda x: row_product(x * 2, weight, bias) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), row_product(x * 2, weight, bias) + 1)


def test_tiles_hold_every_shape():
    for depth in (1, 64, 500, 512, 1000, 1024, 1100, 4097):
        parts = configs.num_parts(depth)
        assert parts >= 1 and parts * configs.BLOCK <= max(depth, configs.BLOCK)
        for rows in (1, 16, 17, 33, 64, 4096):
            for columns in (5, 256, 2048, 6448, 50288):
                for bf16, wide in product((False, True), repeat=2):
                    tile = configs.tile(rows, columns, depth, bf16, wide)
                    assert tile.rows >= 16 and tile.columns >= 16 and tile.stages > 1
                    programs = -(-rows // tile.rows) * -(-columns // tile.columns)
                    assert tile.split == (parts > 1 and programs < 264)
                    assert programs >= 90 or parts > 1 or tile.columns == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=torch.zeros(3, 9)), r"weight: expected shape \[out, in=9\], got \[5, 8\]"),
        (dict(x=torch.zeros(3, 8).double()), r"x: expected dtype torch.float32, got torch.float64"),
        (dict(x=torch.zeros(8, 3).t()), "x: expected axes 1..1"),
        (dict(weight=torch.zeros(5, 8, dtype=torch.int8)), "weight: expected dtype .* got torch.int8"),
        (dict(weight=torch.zeros(8, 5).t()), "weight: expected axes 1..1"),
        (dict(bias=torch.zeros(8)), r"bias: expected shape \[out=5\], got \[8\]"),
        (dict(out=torch.zeros(4, 5)), r"out: expected shape \[rows=3, out=5\], got \[4, 5\]"),
        (dict(out=torch.zeros(1, 5).expand(3, 5)), "out: expected elements with memory of their own"),
        (dict(weight=torch.zeros(5, 8, device="meta")), "weight: expected device cpu, got meta"),
    ],
)
def test_refused(change, message):
    arguments = {"x": torch.zeros(3, 8), "weight": torch.zeros(5, 8), "bias": None, **change}
    with pytest.raises(ValueError, match=message):
        row_product(**arguments)
    with pytest.raises(TypeError, match=r"weight: expected a torch\.Tensor, got list"):
        row_product(torch.zeros(3, 8), [[0.0] * 8])
