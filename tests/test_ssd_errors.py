"""Wrong calls of ``chunk_scan``: the error names the argument, and nothing has been written."""

import re

import pytest
import torch
from ssd_cases import WRITTEN, full_arguments, int32, random_case

from replayssm.ssd import chunk_scan

H, P, G, N, Q, T, S = 6, 5, 2, 11, 16, 40, 4


def refuse(message, error=ValueError, **changes):
    call = {**full_arguments(), **changes}
    with pytest.raises(error, match=re.escape(message)):
        chunk_scan(**call)
    for name in WRITTEN:
        if isinstance(call[name], torch.Tensor) and name not in changes:
            assert bool((call[name] == 7.0).all()), f"{name} was written before the error"


def test_the_call_itself_is_right():
    call = full_arguments()
    chunk_scan(**call)
    assert not bool((call["out"] == 7.0).any())


TENSORS = [name for name, value in full_arguments().items() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("name", TENSORS)
def test_rank(name):
    refuse(f"{name}: expected shape [", **{name: full_arguments()[name].unsqueeze(0).unsqueeze(0)})


@pytest.mark.parametrize("name", TENSORS)
def test_no_tensor(name):
    refuse(f"{name}: expected a torch.Tensor, got list", TypeError, **{name: [1.0]})


@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C"])
def test_missing(name):
    refuse(f"{name}: expected a torch.Tensor, got NoneType", TypeError, **{name: None})


@pytest.mark.parametrize("name", TENSORS)
def test_dtype(name):
    refuse(f"{name}: expected ", **{name: full_arguments()[name].to(torch.float64)})


@pytest.mark.parametrize("name", TENSORS)
def test_device(name):
    refuse(f"{name}: expected device cpu, got meta" if name != "x" else "expected device meta",
           **{name: full_arguments()[name].to("meta")})  # fmt: skip


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("dt", (T, H - 1), f"dt: expected shape [tokens={T}, nheads={H}], got [{T}, {H - 1}]"),
        ("C", (T, G, N + 1), f"C: expected shape [tokens={T}, ngroups={G}, dstate={N}], got [{T}, {G}, {N + 1}]"),
        ("D", (H, P + 1), f"D: expected shape [nheads={H}, headdim={P}], got [{H}, {P + 1}]"),
        ("x_buffer", (S, Q, H + 1, P), f"x_buffer: expected shape [slots, buffer_rows, nheads={H}, headdim={P}]"),
        ("num_buffered", (S + 1,), f"num_buffered: expected shape [slots={S}], got [{S + 1}]"),
        ("batch_indices", (3,), "batch_indices: expected shape [sequences=2], got [3]"),
        ("initial_states", (1, H, P, N), "initial_states: expected shape [sequences=2, "),
        ("chunk_states", (3, H, P, N), f"chunk_states: expected shape [boundaries={T // Q + 2}, "),
    ],
)
def test_shape(name, shape, message):
    dtype = full_arguments()[name].dtype
    refuse(message, **{name: torch.zeros(shape, dtype=dtype)})


def test_groups_that_do_not_divide_the_heads():
    changes = {"B": torch.zeros(T, 4, N), "C": torch.zeros(T, 4, N), "B_buffer": torch.zeros(S, Q, 4, N)}
    refuse("B: expected ngroups to divide nheads=6, got ngroups=4 from B's axis 1", **changes)


@pytest.mark.parametrize("name", ["x_buffer", "dt_buffer", "B_buffer", "num_buffered", "batch_indices"])
def test_incomplete_buffers(name):
    refuse(f"{name}: expected a tensor with ", **{name: None})


def test_buffers_shorter_than_a_chunk():
    short = {name: full_arguments()[name][:, :15] for name in ("x_buffer", "dt_buffer", "B_buffer")}
    refuse("x_buffer: expected at least chunk_size=16 rows a slot, got 15", **short)


def test_dt_is_not_rounded_on_its_way_into_the_buffer():
    refuse("dt: expected dt_buffer's dtype torch.bfloat16, got torch.float32",
           dt_buffer=torch.zeros(S, Q, H, dtype=torch.bfloat16))  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_written_memory_is_packed_and_separate(name):
    tensor = full_arguments()[name]
    refuse(f"{name}: expected axes 1..", **{name: torch.zeros(*tensor.shape[:-1], 20)[..., : tensor.shape[-1]]})
    refuse(f"{name}: expected elements with memory of their own", **{name: tensor[:1].expand(tensor.shape)})


@pytest.mark.parametrize("chunk_size", [0, 15, 257])
def test_chunk_size(chunk_size):
    refuse(f"chunk_size: expected 16..256, got {chunk_size}", chunk_size=chunk_size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk_size": 16.0}, "chunk_size: expected an int, got 16.0"),
        ({"dt_softplus": 1}, "dt_softplus: expected a bool, got 1 of type int"),
        ({"dt_limit": 3.0}, "dt_limit: expected a pair of numbers, got 3.0"),
    ],
)
def test_options(changes, message):
    refuse(message, TypeError, **changes)


def test_order_of_the_limits():
    refuse("dt_limit: expected 0 <= lower <= upper, got (2.0, 1.0)", dt_limit=(2.0, 1.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens": int32(0, 30, 20)}, "cu_seqlens: expected values that ascend within x's 40 tokens, got 30..20"),
        ({"cu_seqlens": int32(0, 30, 41)}, "cu_seqlens: expected values that ascend within x's 40 tokens, got 30..41"),
        ({"cu_seqlens": int32(-1, 30, 40)}, "cu_seqlens: expected values that ascend within x's 40 tokens, got -1..30"),
        ({"batch_indices": torch.tensor([0, 4])}, "batch_indices: expected values below slots=4, got 4 at [1]"),
        ({"batch_indices": torch.tensor([2, 2])}, "batch_indices: expected distinct slots, got 2 more than once"),
        ({"num_buffered": int32(16, 0, 0, 0), "ring_start": None},
         "num_buffered: expected 0 <= num_buffered <= 15, got 16 at slot 0 of [1]"),
        ({"num_buffered": int32(17, 0, 0, 0)}, "num_buffered: expected 0 <= num_buffered <= 16, got 17"),
        ({"num_buffered": int32(0, 0, -1, 0)}, "num_buffered: expected 0 <= num_buffered <= 16, got -1"),
        ({"ring_start": int32(0, 0, 16, 0)}, "ring_start: expected 0 <= ring_start <= 15, got 16 at slot 2 of [0]"),
    ],
)  # fmt: skip
def test_values(changes, message):
    refuse(message, **changes)


def test_no_implementation():
    case = random_case(20)
    named = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in case.arguments().items()
    }
    with pytest.raises(NotImplementedError, match=r"replayssm.ssd: tensors on device 'meta' are not supported yet"):
        chunk_scan(**named)


def test_another_device_is_refused_in_words():
    from replayssm.dispatch import implementation

    with pytest.raises(NotImplementedError, match=r"replayssm.ssd: .*supported: cpu, cuda"):
        implementation("ssd", torch.device("mps:0"))


@pytest.mark.parametrize("name", ["x", "dt", "B", "C", "z", "A", "D", "dt_bias", "initial_states"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_the_checked_mode_finds_numbers_that_are_not_finite(name, value, monkeypatch):
    monkeypatch.setenv("REPLAYSSM_CHECK", "1")
    tensor = full_arguments()[name].clone()
    tensor.flatten()[-1] = value
    refuse(f"{name}: expected finite values (REPLAYSSM_CHECK=1), got {value}", **{name: tensor})


@pytest.mark.parametrize("name", ["x_buffer", "dt_buffer", "B_buffer"])
def test_the_checked_mode_looks_at_live_rows_only(name, monkeypatch):
    monkeypatch.setenv("REPLAYSSM_CHECK", "1")
    tensor = torch.full_like(full_arguments()[name], torch.nan)
    tensor[2, 1:16], tensor[0, 0:3] = 0.5, 0.5  # slot 2: 15 rows from row 1 on; slot 0: 3 rows from row 0 on
    chunk_scan(**{**full_arguments(), name: tensor})
    tensor[2, 15] = torch.nan
    refuse(f"{name}: expected finite values (REPLAYSSM_CHECK=1), got nan", **{name: tensor})
