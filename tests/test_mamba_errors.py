"""Wrong calls: the error names the argument, what was expected with sizes, and what came; nothing has been written."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from op_cases import refuse_call

from replayssm.mamba import checkpointing_ssu, replayssm_materialize
from replayssm.testing import random_ssu_call

H, P, N, G, T, W = 6, 5, 11, 2, 3, 7
refuse = partial(refuse_call, checkpointing_ssu)


def good(**options):
    return random_ssu_call(live=(3, 6), seq_len=T, window=W, **options)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def like(tensor, **changes):
    """A tensor of the same shape and strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), **{"dtype": tensor.dtype, **changes})


CONTIGUOUS = {"dt": "axis 3", "A": "axis 1", "D": "axis 1", "dt_bias": "axis 1"}
TENSORS = (
    "state", "x_cache", "B_cache", "dt_cache", "ring_start", "prev_num_accepted_tokens", "x", "dt", "A", "B", "C",
    "out", "D", "z", "dt_bias", "state_batch_indices",
)  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_rank(name):
    call = good()
    refuse(call, f"{name}: expected shape [", **{name: getattr(call, name).unsqueeze(0)})


@pytest.mark.parametrize(
    ("name", "axis", "expected"),
    [
        ("x_cache", 1, f"[slots=5, nheads={H}, ring_len, headdim={P}], got [5, {H - 1}, 10, {P}]"),
        ("x_cache", 3, f"headdim={P}], got [5, {H}, 10, {P - 1}]"),
        ("B_cache", 2, f"ring_len=10, dstate={N}], got [5, {G}, 9, {N}]"),
        ("B_cache", 3, f"dstate={N}], got [5, {G}, 10, {N - 1}]"),
        ("dt_cache", 2, f"[slots=5, nheads={H}, ring_len=10], got [5, {H}, 9]"),
        ("ring_start", 0, "[slots=5], got [4]"),
        ("prev_num_accepted_tokens", 0, "[slots=5], got [4]"),
        ("x", 2, f"nheads={H}, headdim={P}], got [2, {T}, {H - 1}, {P}]"),
        ("dt", 1, f"seq_len={T}, nheads={H}, headdim={P}], got [2, {T - 1}, {H}, {P}]"),
        ("A", 0, f"[nheads={H}, headdim={P}, dstate={N}], got [{H - 1}, {P}, {N}]"),
        ("B", 2, f"[batch=2, seq_len={T}, ngroups={G}, dstate={N}], got [2, {T}, {G - 1}, {N}]"),
        ("C", 3, f"dstate={N}], got [2, {T}, {G}, {N - 1}]"),
        ("out", 0, f"[batch=2, seq_len={T}, nheads={H}, headdim={P}], got [1, {T}, {H}, {P}]"),
        ("D", 0, f"[nheads={H}, headdim={P}], got [{H - 1}, {P}]"),
        ("z", 3, f"headdim={P}], got [2, {T}, {H}, {P - 1}]"),
        ("dt_bias", 0, f"[nheads={H}, headdim={P}], got [{H - 1}, {P}]"),
        ("state_batch_indices", 0, "[batch=2], got [1]"),
    ],
)
def test_sizes(name, axis, expected):
    call = good()
    tensor = getattr(call, name)
    refuse(call, expected, **{name: tensor.narrow(axis, 0, tensor.shape[axis] - 1)})


@pytest.mark.parametrize("name", TENSORS)
def test_dtype(name):
    call = good()
    refuse(call, f"{name}: expected dtype ", **{name: like(getattr(call, name), dtype=torch.float64)})


def test_dtypes_that_must_agree():
    call = good()
    for name in ("x_cache", "B_cache", "B", "C", "z", "out"):
        changed = getattr(call, name).bfloat16()
        refuse(call, f"{name}: expected dtype torch.float32, got torch.bfloat16", **{name: changed})
    refuse(call, "dt_bias: expected dtype torch.float32", dt_bias=call.dt_bias.bfloat16()[:, :1].expand(H, P))


@pytest.mark.parametrize("name", CONTIGUOUS)
def test_materialised_broadcasts(name):
    call = good()
    refuse(call, f"{name}: expected {CONTIGUOUS[name]} of shape", **{name: getattr(call, name).contiguous()})


@pytest.mark.parametrize("name", ["state", "x_cache", "B_cache", "dt_cache", "x", "B", "C", "z", "out"])
def test_inner_strides(name):
    call = good()
    tensor = getattr(call, name)
    refuse(call, f"{name}: expected axes ", **{name: torch.stack((tensor, tensor), -1)[..., 0]})


@pytest.mark.parametrize("name", ["state", "x_cache", "B_cache", "dt_cache", "out", "state_scale"])
def test_memory_that_is_written_may_not_overlap(name):
    call = good(state_dtype=torch.int8)
    tensor = getattr(call, name)
    refuse(call, f"{name}: expected elements with memory of their own", **{name: tensor[:1].expand(tensor.shape)})


@pytest.mark.parametrize("name", [*TENSORS, "state_scale", "rand_seed", "cu_seqlens"])
def test_no_tensor(name):
    value = None if name in ("rand_seed", "cu_seqlens") else getattr(good(), name)
    for wrong in ([1.0], 3, torch.zeros([] if value is None else value.shape).to_sparse()):
        refuse(good(), f"{name}: expected a torch.Tensor", error=TypeError, **{name: wrong})


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("pad_slot_id", (None, 1.5, "x", True), "an int"),
        ("max_window", (float(W), "x", True), "an int"),
        ("philox_rounds", (None, 1.5, True), "an int"),
        ("dt_softplus", (None, 1, "x"), "a bool"),
        ("dt_limit", (None, 1.0, (1.0,), (0.0, 1.0, 2.0), "ab", (0, "x")), "a pair of numbers"),
    ],
)
def test_types_of_options_also_after_an_equal_number_of_another_type_passed(name, values, expected):
    call = good()
    checkpointing_ssu(**call.clone().arguments())
    for wrong in values:
        refuse(call, f"{name}: expected {expected}", error=TypeError, **{name: wrong})


def test_max_seqlen_is_a_whole_number():
    call = good()
    tokens = {name: getattr(call, name)[:1] for name in ("x", "dt", "B", "C", "z", "out")}
    bounds = int32([0, T])
    refuse(call, "max_seqlen: expected an int", TypeError, cu_seqlens=bounds, max_seqlen=3.0, **tokens)
    refuse(call, "pad_slot_id: expected -9223372036854775808 <= pad_slot_id", pad_slot_id=1 << 70)


@pytest.mark.parametrize("name", TENSORS)
def test_device(name):
    call = good()
    if name == "state":
        other = torch.empty(call.state.shape, device="meta")
        refuse(call, "x_cache: expected device meta, got cpu", state=other)
        return
    refuse(call, f"{name}: expected device cpu, got meta", **{name: like(getattr(call, name), device="meta")})


@pytest.mark.parametrize("name", TENSORS[:11])
def test_missing_tensors(name):
    refuse(good(), f"{name}: expected a torch.Tensor, got NoneType", error=TypeError, **{name: None})


def test_scales():
    call = good(state_dtype=torch.int8)
    refuse(
        call,
        "state_scale: expected fp32 [slots, nheads, headdim] with a state of torch.int8, got None",
        state_scale=None,
    )
    refuse(call, f"state_scale: expected shape [slots=5, nheads={H}, headdim={P}]", state_scale=call.state_scale[1:])
    refuse(call, "state_scale: expected dtype torch.float32", state_scale=call.state_scale.half())
    plain = good()
    scale = torch.ones(5, H, P)
    refuse(
        plain,
        "state_scale: expected None with a state of torch.float32, got a tensor of shape [5, 6, 5]",
        state_scale=scale,
    )


def test_heads_must_be_a_multiple_of_groups():
    call = good()
    B_cache = torch.zeros(5, 4, 10, N)
    B = torch.zeros(2, T, 4, N)
    refuse(call, "B: expected ngroups to divide nheads=6, got ngroups=4", B_cache=B_cache, B=B, C=B)


def test_window():
    call = good()
    refuse(call, "x: expected seq_len <= window=2 (max_window), got seq_len=3", max_window=2)
    refuse(call, "x_cache: expected ring_len >= window + seq_len = 8 + 3 rows, got ring_len=10", max_window=8)
    refuse(call, "max_window: expected 1 <= max_window <= 64, got 65", max_window=65)
    refuse(call, "max_window: expected 1 <= max_window <= 64, got 0", max_window=0)
    short = {name: getattr(call, name)[:, :, :5].contiguous() for name in ("x_cache", "B_cache", "dt_cache")}
    refuse(call, "x: expected seq_len <= window=2 (ring_len - seq_len), got seq_len=3", max_window=None, **short)
    empty = {name: getattr(call, name)[:, :0] for name in ("x", "B", "C", "z", "out", "dt")}
    refuse(call, "seq_len: expected 1 <= seq_len <= 64", **empty)


def test_numbers():
    call = good()
    refuse(call, "philox_rounds: expected 0 <= philox_rounds <= 32", philox_rounds=33)
    refuse(call, "rand_seed: expected dtype torch.int64, got torch.int32", rand_seed=torch.tensor([1]).int())
    refuse(call, "rand_seed: expected one element, got shape [2]", rand_seed=torch.tensor([1, 2]))
    refuse(call, "dt_limit: expected 0 <= lower <= upper, got (0.5, 0.1)", dt_limit=(0.5, 0.1))
    refuse(call, "max_seqlen: expected None or x's seq_len=3 without cu_seqlens, got 4", max_seqlen=4)
    few = {name: getattr(call, name)[:1] for name in ("state", "x_cache", "B_cache", "dt_cache")}
    few |= {name: getattr(call, name)[:1] for name in ("ring_start", "prev_num_accepted_tokens")}
    refuse(
        call, "state_batch_indices: expected indices for batch=2 > slots=1, got None", state_batch_indices=None, **few
    )


@pytest.mark.parametrize(
    ("bounds", "max_seqlen", "message"),
    [
        ([0, 3, 6], None, "max_seqlen: expected the most tokens"),
        ([0, 3, 6], 2, "cu_seqlens: expected at most max_seqlen=2 tokens a request, got 3 at [0]"),
        ([0, 3, 7], 4, "max_window"),
        ([0, 2, 7], 3, "cu_seqlens: expected at most max_seqlen=3 tokens a request, got 5 at [1]"),
        ([4, 6, 8], 3, "cu_seqlens: expected rows within x's 6 tokens, got 6..8 at [1]"),
        ([-1, 1, 3], 3, "cu_seqlens: expected rows within x's 6 tokens, got -1..1 at [0]"),
        ([0, 3], 3, "state_batch_indices: expected shape [batch=1], got [2]"),
    ],
)
def test_varlen(bounds, max_seqlen, message):
    call = good()
    flat = {name: getattr(call, name).flatten(0, 1)[None] for name in ("x", "B", "C", "z")}
    flat |= {"dt": call.dt[..., 0].flatten(0, 1)[None, ..., None].expand(1, 6, H, P)}
    out = torch.zeros(1, 6, H, P)
    bounds = torch.tensor(bounds, dtype=torch.int32)
    if message == "max_window":
        message = "x_cache: expected ring_len >= window + seq_len = 7 + 4 rows"
    refuse(call, message, cu_seqlens=bounds, max_seqlen=max_seqlen, **{**flat, "out": out})
    assert not out.any()


def test_varlen_types():
    call = good()
    refuse(call, "x: expected batch=1", cu_seqlens=int32([0, 3, 6]), max_seqlen=3)
    refuse(call, "cu_seqlens: expected dtype torch.int32", cu_seqlens=torch.tensor([0, 3, 6]), max_seqlen=3)


@pytest.mark.parametrize("row", [0, 1])
def test_values_are_checked_for_every_request_before_the_first_write(row):
    call = good()
    slots = call.state_batch_indices.tolist()

    def changed(name, value, index):
        tensor = getattr(call, name).clone()
        tensor[index] = value
        return {name: tensor}

    refuse(
        call,
        f"state_batch_indices: expected values below slots=5, got 5 at [{row}]",
        **changed("state_batch_indices", 5, row),
    )
    refuse(
        call, f"expected distinct slots, got {slots[0]} more than once", **changed("state_batch_indices", slots[0], 1)
    )
    for value in (-1, 10):
        refuse(
            call,
            f"ring_start: expected 0 <= ring_start < ring_len=10, got {value}",
            **changed("ring_start", value, slots[row]),
        )
    for value in (-1, 8):
        expected = f"prev_num_accepted_tokens: expected 0 <= prev_num_accepted_tokens <= window=7, got {value} at slot"
        refuse(call, expected, **changed("prev_num_accepted_tokens", value, slots[row]))


def test_unknown_device():
    call = good()
    meta = {
        name: getattr(call, name).to("meta")
        for name in ("state", "x_cache", "B_cache", "dt_cache", "x", "B", "C", "z", "out")
    }
    meta |= {
        name: getattr(call, name).to("meta")
        for name in ("ring_start", "prev_num_accepted_tokens", "state_batch_indices")
    }
    meta |= {"dt": meta["x"][..., :1].expand_as(call.dt), "A": meta["x"][0, 0, :, :1, None].expand(H, P, N)}
    meta |= {name: meta["x"][0, 0, :, :1].expand(H, P) for name in ("D", "dt_bias")}
    with pytest.raises(NotImplementedError, match="device 'meta' are not supported"):
        checkpointing_ssu(**{**call.arguments(), **meta})


@pytest.mark.parametrize(
    "name", ["x", "dt", "B", "C", "z", "A", "D", "dt_bias", "state", "x_cache", "B_cache", "dt_cache"]
)
def test_checked_mode_finds_numbers_that_are_not_finite(name, monkeypatch):
    monkeypatch.setenv("REPLAYSSM_CHECK", "1")
    checkpointing_ssu(**good().arguments())  # unowned memory holds NaN, which is fine
    call = good()
    slot, start = int(call.state_batch_indices[1]), int(call.ring_start[call.state_batch_indices[1]])
    tensor = getattr(call, name).clone() if name not in CONTIGUOUS else getattr(call, name)
    if name in CONTIGUOUS:  # one head's value
        first = tensor.as_strided(
            tensor.shape[: -2 if name == "A" else -1], tensor.stride()[: -2 if name == "A" else -1]
        )
        first.select(-1, 2).fill_(torch.inf)
    elif name in ("x", "B", "C", "z"):
        tensor[1, 2, 1, 3] = torch.inf
    elif name == "state":
        tensor[slot, 2, 1, 3] = torch.inf
    else:
        tensor[slot, 1, (start + 5) % 10] = torch.inf
    refuse(replace(call, **{name: tensor}), f"{name}: expected finite values (REPLAYSSM_CHECK=1), got inf")


def materialize_arguments():
    table = lambda: torch.ones(3, dtype=torch.int64)  # noqa: E731
    names = ("state", "x_cache", "B_cache", "dt_cache")
    arguments = {f"{name}_{kind}": table() for name in names for kind in ("ptrs", "slot_strides")}
    arguments = {name: 64 * t if name.endswith("ptrs") else t for name, t in arguments.items()}
    arguments |= {"A_ptrs": 64 * table(), "state_scale_ptrs": 64 * table(), "state_scale_slot_strides": table()}
    arguments |= {name: torch.zeros(3, 2).int() for name in ("src_slots", "dst_slots")}
    arguments["dst_slots"] = torch.tensor([[1, 2]] * 3, dtype=torch.int32)
    arguments["src_slots"] = torch.tensor([[0, 4]] * 3, dtype=torch.int32)
    names = ("ring_start", "replay_prefix_len", "active_request_indices")
    arguments |= {name: torch.zeros(2).int() for name in names}
    arguments["active_request_indices"] = int32([1, 0])
    sizes = {"dim": P, "dstate": N, "num_heads": H, "heads_per_group": 3, "max_window": W, "ring_buffer_len": 10}
    types = {"state_dtype": torch.float32, "input_dtype": torch.bfloat16, "matrixA_dtype": torch.float32}
    return {**arguments, **sizes, **types}


# Addresses near 64 would crash the process if anything were read: every refusal comes before the first access.
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_cache_ptrs": torch.ones(2, dtype=torch.int64)}, "x_cache_ptrs: expected shape [layers=3], got [2]"),
        ({"A_ptrs": torch.ones(3, dtype=torch.int32)}, "A_ptrs: expected dtype torch.int64, got torch.int32"),
        ({"src_slots": torch.zeros(3, 2, dtype=torch.int64)}, "src_slots: expected dtype torch.int32"),
        ({"dst_slots": torch.zeros(2, 2).int()}, "dst_slots: expected shape [layers=3, batch=2], got [2, 2]"),
        ({"ring_start": torch.zeros(3).int()}, "ring_start: expected shape [batch=2], got [3]"),
        ({"replay_prefix_len": torch.zeros(2)}, "replay_prefix_len: expected dtype torch.int32, got torch.float32"),
        ({"active_request_indices": int32([0, 0]).to("meta")}, "active_request_indices: expected device cpu"),
        ({"state_dtype": torch.int16}, "state_dtype: expected torch.float32 or torch.bfloat16"),
        ({"input_dtype": torch.int8}, "input_dtype: expected torch.float32 or torch.bfloat16 or torch.float16"),
        ({"matrixA_dtype": torch.float64}, "matrixA_dtype: expected"),
        ({"max_window": 65}, "max_window: expected 1 <= max_window <= 64, got 65"),
        ({"max_window": 0}, "max_window: expected 1 <= max_window <= 64, got 0"),
        ({"ring_buffer_len": 0}, "ring_buffer_len: expected 1 <= ring_buffer_len"),
        ({"num_heads": 0}, "num_heads: expected 1 <= num_heads"),
        ({"heads_per_group": 4}, "heads_per_group: expected a divisor of num_heads=6, got 4"),
        ({"dim": 0}, "dim: expected 1 <= dim"),
        ({"philox_rounds": 5}, "rand_seed: expected a tensor with philox_rounds=5, got None"),
        ({"philox_rounds": -1}, "philox_rounds: expected 0 <= philox_rounds <= 32"),
        ({"rand_seed": torch.tensor([1.0])}, "rand_seed: expected dtype torch.int64"),
        ({"dependency_inputs": [torch.zeros(1, device="meta")]}, "dependency_inputs[0]: expected device cpu, got meta"),
        ({"active_request_indices": int32([1, 2])}, "active_request_indices: expected values below batch=2, got 2"),
        ({"active_request_indices": int32([1, 1])}, "expected distinct requests, got 1 more than once"),
        ({"ring_start": int32([0, 10])}, "ring_start: expected 0 <= ring_start < ring_buffer_len=10, got 10"),
        ({"replay_prefix_len": int32([8, 0])}, "expected 0 <= replay_prefix_len <= max_window=7, got 8"),
        ({"replay_prefix_len": int32([0, -1])}, "got -1 of request 1, active_request_indices[0]"),
        ({"dst_slots": int32([[1, 2], [3, 3], [1, 2]])}, "dst_slots: expected distinct slots in layer 1, got 3"),
        ({"dst_slots": int32([[1, 2], [1, 0], [1, 2]])}, "slots that no other request reads in layer 1, got 0"),
        ({"state_ptrs": torch.tensor([64, 0, 64])}, "state_ptrs: expected an address for layer 1, got 0"),
        ({"state_ptrs": torch.tensor([64, 65, 64])}, "state_ptrs: expected an address where torch.float32 may lie"),
        ({"A_ptrs": torch.tensor([66] * 3), "replay_prefix_len": int32([1, 1])}, "A_ptrs: expected an address where"),
        ({"pad_slot_id": 1 << 70}, "pad_slot_id: expected -9223372036854775808 <= pad_slot_id"),
        ({"state_dtype": torch.int8, "state_scale_ptrs": torch.tensor([64, 0, 64])}, "state_scale_ptrs: expected a"),
    ],
)  # fmt: skip
def test_materialize_refuses(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        replayssm_materialize(**{**materialize_arguments(), **changes})


def test_materialize_needs_tensors():
    with pytest.raises(TypeError, match=r"state_ptrs: expected a torch\.Tensor, got list"):
        replayssm_materialize(**{**materialize_arguments(), "state_ptrs": [1, 2, 3]})
    numbers = ("dim", "dstate", "num_heads", "heads_per_group", "max_window", "ring_buffer_len")
    for name in (*numbers, "philox_rounds", "pad_slot_id"):
        with pytest.raises(TypeError, match=f"{name}: expected an int, got 3.0"):
            replayssm_materialize(**{**materialize_arguments(), name: 3.0})
    for name in ("dependency_inputs", "dependency_outputs"):
        with pytest.raises(TypeError, match=f"{name}: expected a list of tensors or None, got Tensor"):
            replayssm_materialize(**{**materialize_arguments(), name: torch.zeros(3)})
    no_layers = {
        name: t[:0] for name, t in materialize_arguments().items() if name.endswith(("ptrs", "strides", "slots"))
    }
    with pytest.raises(ValueError, match="state_ptrs: expected 1 <= state_ptrs"):
        replayssm_materialize(**{**materialize_arguments(), **no_layers})
