"""Matrix products that do not depend on the number of rows."""

import pytest
import torch
from tiny import greedy_text, make_prompts, shared_model
from torch import nn

import replayssm.hf as hf
from replayssm.hf import linear as linear_module
from replayssm.hf.linear import RowProduct, may_pack


@pytest.mark.parametrize("shape", [(24, 90), (33, 57), (40, 301), (210, 317)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("pack", [False, True])
def test_a_row_does_not_depend_on_the_number_of_rows(shape, bias, threads, pack):
    if pack and not may_pack([]):
        pytest.skip("torch was built without oneDNN")
    torch.set_num_threads(threads)
    try:
        linear = nn.Linear(*shape, bias=bias)
        with torch.no_grad():
            product = RowProduct(linear, pack)
            assert product.rows_alike
            x = torch.randn(50, shape[0])
            expected = product(x)
            torch.testing.assert_close(expected, linear(x))
            for count in range(1, 50):
                assert torch.equal(product(x[:count]), expected[:count]), count
                batch = product(x[50 - count :].view(1, count, -1))
                assert torch.equal(batch[0], expected[50 - count :]), count
    finally:
        torch.set_num_threads(1)


def test_large_models_are_not_packed():
    small, large = nn.Linear(3, 5), nn.Linear(2**14, 2**14 + 1, device="meta")
    assert may_pack([small]) == torch.backends.mkldnn.is_available()
    assert not may_pack([small, large])


def test_a_model_that_is_not_packed_gives_the_same_text(monkeypatch):
    monkeypatch.setattr(linear_module, "_MOST_PACKED", 0)
    (prompt,) = make_prompts("biases", (9,))
    out = hf.generate(shared_model(), torch.tensor([prompt]), max_new_tokens=15)
    assert out[0, 9:].tolist() == greedy_text("biases", prompt, 15)


@torch.no_grad()
def test_a_machine_where_rows_never_agree_is_reported(monkeypatch):
    linear, own, calls = nn.Linear(19, 23), linear_module.F.linear, iter(range(10**6))
    monkeypatch.setattr(linear_module.F, "linear", lambda *args: own(*args) + next(calls) * 1e-3)
    with pytest.warns(UserWarning, match="round a row differently"):
        product = RowProduct(linear, pack=False)
    monkeypatch.undo()
    assert not product.rows_alike
    x = torch.randn(5, 19)
    assert torch.equal(product(x), own(x, linear.weight, linear.bias))
