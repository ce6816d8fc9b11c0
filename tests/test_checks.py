"""The checks' messages: name, expectation with the sizes that are known, fact."""

import sys

import pytest
import torch

from replayssm.checks import (
    as_device,
    check_device,
    check_dtype,
    check_packed,
    check_range,
    check_separate,
    check_shape,
    check_tensor,
    check_values,
    checked_mode,
    once_per_layout,
    renamed,
)


def test_shape_binds_names_only_when_the_whole_shape_fits():
    sizes = {"slots": 4}
    check_shape("a", torch.zeros(4, 7, 3), "slots rows 3", sizes)
    assert sizes == {"slots": 4, "rows": 7}
    with pytest.raises(ValueError, match=r"^b: expected shape \[slots=4, columns, rows=7\], got \[4, 9, 8\]$"):
        check_shape("b", torch.zeros(4, 9, 8), "slots columns rows", sizes)
    assert sizes == {"slots": 4, "rows": 7}


@pytest.mark.parametrize(
    ("shape", "spec", "message"),
    [
        ((4,), "slots rows", r"expected shape \[slots, rows\], got \[4\]"),
        ((4, 5), "slots 3", r"expected shape \[slots, 3\], got \[4, 5\]"),
        ((), "slots", r"expected shape \[slots\], got \[\]"),
    ],
)
def test_shape_messages(shape, spec, message):
    with pytest.raises(ValueError, match=f"^a: {message}$"):
        check_shape("a", torch.zeros(shape), spec, {})


@pytest.mark.parametrize("value", [None, 3, [1.0], "tensor"])
def test_tensor(value):
    with pytest.raises(TypeError, match=f"^a: expected a torch.Tensor, got {type(value).__name__}$"):
        check_tensor("a", value)
    with pytest.raises(TypeError, match=r"^a: expected a torch\.Tensor"):
        check_shape("a", value, "n", {})


def test_tensor_without_strides():
    with pytest.raises(
        TypeError, match=r"^a: expected a torch.Tensor with strides, got one of layout torch.sparse_coo$"
    ):
        check_tensor("a", torch.zeros(2).to_sparse())


def test_dtype_and_device():
    check_dtype("a", torch.zeros(2), torch.int32, torch.float32)
    with pytest.raises(ValueError, match=r"^a: expected dtype torch.int32 or torch.int64, got torch.float32$"):
        check_dtype("a", torch.zeros(2), torch.int32, torch.int64)
    check_device("a", torch.zeros(2), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"^a: expected device meta, got cpu$"):
        check_device("a", torch.zeros(2), torch.device("meta"))


def test_packed_looks_at_inner_axes_of_size_above_one_only():
    wide = torch.zeros(4, 10, 3, 5)
    check_packed("a", wide[:, ::2], 2)
    check_packed("a", wide[:, :, :1], 3)
    check_packed("a", wide[:, :, 1:2, :].transpose(2, 3)[..., :1], 3)
    with pytest.raises(
        ValueError, match=r"^a: expected axes 1..3 .*\(stride 15 at axis 1\), got strides \[150, 30, 5, 1\]$"
    ):
        check_packed("a", wide[:, ::2], 1)
    with pytest.raises(ValueError, match="stride 1 at axis 3"):
        check_packed("a", wide.transpose(2, 3), 2)


def test_range():
    check_range("a", 1, 1, 3)
    check_range("a", 3, 1, 3)
    with pytest.raises(ValueError, match=r"^a: expected 1 <= a <= 3 \(rows\), got 4$"):
        check_range("a", 4, 1, 3, "rows")
    with pytest.raises(ValueError, match=r"^a: expected 1 <= a <= 3, got 0$"):
        check_range("a", 0, 1, 3)


@pytest.mark.parametrize("value", [1.0, True, None, "1", torch.tensor(1)])
def test_range_takes_whole_numbers_only(value):
    with pytest.raises(TypeError, match=r"^a: expected an int, got "):
        check_range("a", value, 1, 3)


def test_separate():
    check_separate("a", torch.zeros(4, 9, 3).transpose(0, 1)[:, ::2], 2)
    check_separate("a", torch.zeros(4, 3)[:1].expand(1, 3), 1)
    check_separate("a", torch.zeros(0, 3), 1)
    overlapping = torch.zeros(40)
    for shape, strides, num_axes in (((4, 3), (0, 1), 1), ((4, 3), (2, 1), 1), ((4, 5, 3), (6, 3, 1), 2)):
        with pytest.raises(ValueError, match=r"^a: expected elements with memory of their own"):
            check_separate("a", overlapping.as_strided(shape, strides), num_axes)


def test_a_layout_that_passed_does_not_hide_an_argument_of_another_type():
    check = once_per_layout(lambda tensor, number: check_range("a", number, 1, 3))
    check(torch.zeros(2), 1)
    for value in (1.0, True):
        with pytest.raises(TypeError, match=r"^a: expected an int"):
            check(torch.zeros(2), value)


def test_renamed():
    for error in (TypeError, ValueError, NotImplementedError):
        with pytest.raises(error, match=r"^b: expected a: 3$"), renamed("a", "b"):
            raise error("a: expected a: 3")
        with pytest.raises(error, match=r"^ab: a: 3$"), renamed("a", "b"):
            raise error("ab: a: 3")


def test_an_upper_bound_that_nobody_reaches_is_not_told():
    check_range("a", sys.maxsize, 1, sys.maxsize)
    with pytest.raises(ValueError, match=r"^a: expected a >= 1 \(why\), got 0$"):
        check_range("a", 0, 1, sys.maxsize, "why")
    with pytest.raises(ValueError, match=rf"^a: expected 1 <= a <= {sys.maxsize}, got {10 * sys.maxsize}$"):
        check_range("a", 10 * sys.maxsize, 1, sys.maxsize)


def test_values_reports_the_first_bad_element():
    check_values("a", torch.tensor([[0, 3], [2, 1]]), 0, 3)
    with pytest.raises(ValueError, match=r"^a: expected values in 0..3 \(rows\), got 4 at \[1, 0\]$"):
        check_values("a", torch.tensor([[0, 3], [4, -1]]), 0, 3, "rows")


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False), (None, False)])
def test_checked_mode(value, on, monkeypatch):
    if value is None:
        monkeypatch.delenv("REPLAYSSM_CHECK", raising=False)
    else:
        monkeypatch.setenv("REPLAYSSM_CHECK", value)
    assert checked_mode() is on


def test_a_device_is_one_that_the_machine_has(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert as_device("a", "cuda") == torch.device("cuda:1") and as_device("a", "cuda:0") == torch.device("cuda:0")
    assert as_device("a", torch.device("cpu")) == torch.device("cpu")
    for wrong, error, message in (
        ("cuda:2", ValueError, r"^a: expected a device of this machine, which has 2 for CUDA, got 'cuda:2'$"),
        ("abacus", ValueError, r"^a: expected a device of PyTorch, got 'abacus'$"),
        (3, TypeError, r"^a: expected a torch.device or its name, got 3 of type int$"),
    ):
        with pytest.raises(error, match=message):
            as_device("a", wrong)
