"""Wrong calls of exact decode: the error names the argument, and nothing has been written."""

import re
from copy import copy
from dataclasses import replace

import pytest
import torch
from exact_cases import Decoder
from ssd_cases import int32, random_case

from replayssm.batch_invariant_decode import (
    BatchInvariantDecodeBuffers,
    _mamba_chunk_scan_decode_rows,
    _masked_update_rows,
    batch_invariant_decode_buffered_scan,
)
from replayssm.dispatch import implementation

H, P, G, N, Q, S = 6, 5, 2, 11, 16, 4
CPU = torch.device("cpu")


def decoder(max_tokens=1, **options):
    case = random_case(20)
    made = Decoder(case, S, max_tokens=max_tokens, **options)
    made.prefill((0, case.tokens(0, 5)), (2, case.tokens(0, 9)))
    return made


def arguments(lanes=2, tokens=1):
    case = random_case(lanes * tokens)
    named = {name: getattr(case, name).unflatten(0, (lanes, tokens)) for name in ("x", "z", "dt", "B", "C")}
    return {**named, "A": case.A, "D": case.D, "dt_bias": case.dt_bias, "batch_indices": torch.tensor([2, 0])}


def refuse(message, error=ValueError, made=None, call=None, **changes):
    made = made or decoder()
    before = [made.slot_bytes(slot) for slot in range(S)]
    with pytest.raises(error, match=re.escape(message)):
        batch_invariant_decode_buffered_scan(
            made.buffers, **{**(call or arguments()), "ssm_state": made.state, **changes}
        )
    for slot, old in enumerate(before):
        assert all(torch.equal(new, old[name]) for name, new in made.slot_bytes(slot).items()), "written"


NAMES = list(arguments())
REQUIRED = [name for name in NAMES if name not in ("z", "D", "dt_bias")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_state_that_is_not_fp32(dtype):
    made = decoder()
    refuse("requires an FP32 SSM state cache", AssertionError, made, ssm_state=made.state.to(dtype))


def test_more_than_one_token():
    refuse("x: expected exactly 1 token a lane, got 2", AssertionError, call=arguments(2, 2))
    refuse("x: expected exactly 1 token a lane, got 0", AssertionError, call={
        name: value[:, :0] if name in ("x", "z", "dt", "B", "C") else value for name, value in arguments().items()
    })  # fmt: skip
    refuse("x: expected 1..max_tokens=3 tokens a lane, got 4", AssertionError, decoder(3), arguments(2, 4))


def test_more_lanes_than_slots():
    call = {**arguments(5), "batch_indices": torch.full((5,), -1)}
    refuse("x: expected at most max_requests=4 lanes, got 5", AssertionError, call=call)


@pytest.mark.parametrize("name", [*NAMES, "ssm_state"])
def test_rank_type_and_dtype(name):
    value = {**arguments(), "ssm_state": decoder().state}[name]
    refuse(f"{name}: expected shape [", **{name: value.unsqueeze(0).unsqueeze(0)})
    refuse(f"{name}: expected a torch.Tensor, got list", TypeError, **{name: [1.0]})
    if name != "ssm_state":
        refuse(f"{name}: expected dtype ", **{name: value.to(torch.complex64)})
        refuse("expected device", **{name: value.to("meta")})


@pytest.mark.parametrize("name", REQUIRED)
def test_missing(name):
    refuse(f"{name}: expected a torch.Tensor, got NoneType", TypeError, **{name: None})


@pytest.mark.parametrize("name", ["x", "dt"])
def test_dtypes_are_those_of_the_buffers(name):
    refuse(f"{name}: expected dtype torch.float32, got torch.bfloat16", **{name: arguments()[name].bfloat16()})


def test_groups():
    call = arguments()
    refuse("ngroups=2", B=call["B"][:, :, :1], C=call["C"][:, :, :1])


def test_state_of_other_strides():
    made = decoder()
    refuse("ssm_state: expected axes 1..3", made=made, ssm_state=torch.zeros(S, H, P, N + 1)[..., :N])
    refuse("ssm_state: expected elements with memory", made=made, ssm_state=made.state[:1].expand(S, H, P, N))


@pytest.mark.parametrize(
    ("changes", "message", "error"),
    [
        ({"dt_softplus": 1}, "dt_softplus: expected a bool, got 1 of type int", TypeError),
        ({"dt_limit": (1.0,)}, "dt_limit: expected a pair of numbers, got (1.0,)", TypeError),
        ({"dt_limit": (2.0, 1.0)}, "dt_limit: expected 0 <= lower <= upper, got (2.0, 1.0)", ValueError),
        ({"batch_indices": int32(0, 4)}, "batch_indices: expected values below slots=4, got 4 at [1]", ValueError),
        ({"batch_indices": int32(2, 2)}, "batch_indices: expected distinct slots, got 2 more than once", ValueError),
    ],
)  # fmt: skip
def test_options_and_slots(changes, message, error):
    refuse(message, error, **changes)


@pytest.mark.parametrize(
    ("max_tokens", "field", "value", "message"),
    [
        (1, "num_buffered", 16, "num_buffered: expected 0 <= num_buffered <= 15, got 16 at slot 0 of [1]"),
        (1, "num_buffered", -1, "num_buffered: expected 0 <= num_buffered <= 15, got -1"),
        (3, "num_buffered", 19, "num_buffered: expected 0 <= num_buffered <= 18, got 19"),
        (3, "ring_start", 21, "ring_start: expected 0 <= ring_start < 21 rows, got 21 at slot 0 of [1]"),
    ],
)
def test_cursors(max_tokens, field, value, message):
    made = decoder(max_tokens)
    getattr(made.buffers, field)[0] = value
    refuse(message, made=made)


def test_kept_sums():
    made, narrow = decoder(sums=True), decoder(sums=True)
    narrow.buffers.sums = narrow.buffers.sums[:, :, :15]
    refuse(f"buffers.sums: expected shape [slots={S}, nheads={H}, rows={Q}, 2], got [4, 6, 15, 2]", made=narrow)
    made.buffers.sums = made.buffers.sums.double()
    refuse("buffers.sums: expected dtype torch.float32, got torch.float64", made=made)
    made.buffers.sums = None
    refuse("buffers.num_summed: expected it where buffers.sums is, and only there", made=made)
    made = decoder(sums=True)
    made.buffers.num_summed = made.buffers.num_summed.long()
    refuse("buffers.num_summed: expected dtype torch.int32, got torch.int64", made=made)


@pytest.mark.parametrize("name", ["num_buffered", "ring_start", "arrivals", "num_summed", "target_rows", "chunk_flags"])
def test_cursors_that_are_a_column_of_a_table(name):
    made = decoder(3, sums=True)
    table = torch.stack([getattr(made.buffers, name), torch.full((S,), 7, dtype=torch.int32)], 1)
    setattr(made.buffers, name, table[:, 0])
    before, message = table.clone(), f"buffers.{name}: expected axes 0..0 of shape [4] to be packed"
    refuse(message, made=made, call=arguments(2, 3))
    if name == "num_buffered":
        with pytest.raises(ValueError, match=re.escape(message)):
            made.buffers.commit(torch.tensor([0]), torch.tensor([1]))
    if name in ("num_buffered", "ring_start", "num_summed"):
        case = random_case(8)
        call = {each: getattr(case, each) for each in ("x", "z", "dt", "B", "C")}
        with pytest.raises(ValueError, match=re.escape(message)):
            made.buffers.seed(**call, cu_seqlens=int32(0, 8), batch_indices=int32(1))
    assert torch.equal(table, before)


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_memory_for_what_a_call_returns(max_tokens):
    for name, expected in (
        ("out", f"shape [slots=4, {'max_tokens, ' if max_tokens > 1 else ''}nheads=6, headdim=5], got [3"),
        ("target_rows", "shape [slots=4], got [3]"),
        ("chunk_flags", "shape [slots=4], got [3]"),
    ):
        made = decoder(max_tokens)
        setattr(made.buffers, name, getattr(made.buffers, name)[:3])
        refuse(f"buffers.{name}: expected {expected}", made=made)
    made = decoder(3)
    made.buffers.out = made.buffers.out[:, :2].clone()
    refuse("buffers.out: expected max_tokens=3 at axis 1, got 2", made=made)
    made = decoder(max_tokens)
    made.buffers.out = made.buffers.out.half()
    refuse("buffers.out: expected dtype torch.float32, got torch.float16", made=made)


@pytest.mark.parametrize(
    ("changes", "message", "error"),
    [
        ({"sums": 1}, "sums: expected a bool, got 1 of type int", TypeError),
        ({"chunk_size": 15}, "chunk_size: expected 16..256, got 15", ValueError),
        ({"nheads": 0}, "nheads: expected 1 <= nheads", ValueError),
        ({"headdim": 2.0}, "headdim: expected an int, got 2.0", TypeError),
        ({"ngroups": 4}, "ngroups: expected a divisor of nheads=6, got 4", ValueError),
        ({"dtype": torch.float64}, "dtype: expected torch.float32 or torch.bfloat16 or torch.float16", ValueError),
        ({"max_tokens": 17}, "max_tokens: expected 1 <= max_tokens <= 16", ValueError),
    ],
)
def test_allocate(changes, message, error):
    sizes = {"max_requests": S, "chunk_size": Q, "nheads": H, "headdim": P, "ngroups": G, "dstate": N, "device": CPU,
             "dtype": torch.float32}  # fmt: skip
    with pytest.raises(error, match=re.escape(message)):
        BatchInvariantDecodeBuffers.allocate(**{**sizes, **changes})


@pytest.mark.parametrize("verb", ["seed", "extend"])
@pytest.mark.parametrize(
    ("changes", "message", "error"),
    [
        ({"x": torch.zeros(8, H, P + 1)}, "x: expected shape [tokens, nheads=6, headdim=5], got [8, 6, 6]", ValueError),
        ({"C": None}, "C: expected a torch.Tensor, got NoneType", TypeError),
        ({"dt": torch.zeros(8, H).bfloat16()}, "dt: expected dtype torch.float32", ValueError),
        ({"batch_indices": int32(1)}, "batch_indices: expected at least sequences=2", ValueError),
        ({"batch_indices": int32(1, 4)}, "batch_indices: expected values below slots=4, got 4 at [1]", ValueError),
        ({"batch_indices": int32(1, 1)}, "batch_indices: expected distinct slots, got 1 more than once", ValueError),
        ({"cu_seqlens": int32(0, 3, 9)}, "cu_seqlens: expected values that ascend within x's 8 tokens", ValueError),
        ({"cu_seqlens": int32(0, 3, 8).long()}, "cu_seqlens: expected dtype torch.int32", ValueError),
    ],
)
def test_storing(verb, changes, message, error):
    made, case = decoder(), random_case(8)
    call = {name: getattr(case, name) for name in ("x", "z", "dt", "B", "C")}
    call |= {"cu_seqlens": int32(0, 3, 8), "batch_indices": int32(1, 2)}
    before = [made.slot_bytes(slot) for slot in range(S)]
    with pytest.raises(error, match=re.escape(message)):
        getattr(made.buffers, verb)(**{**call, **changes})
    for slot, old in enumerate(before):
        assert all(torch.equal(new, old[name]) for name, new in made.slot_bytes(slot).items())


def test_commit():
    with pytest.raises(ValueError, match="num_accepted: expected max_tokens > 1"):
        decoder().buffers.commit(torch.tensor([0]), torch.tensor([1]))
    made = decoder(3)
    for slots, counts, message in (
        ([0, 4], [1, 1], "batch_indices: expected values below slots=4, got 4 at [1]"),
        ([0, 1], [1, 4], "num_accepted: expected 0 <= num_accepted <= 3, got 4 at [1]"),
        ([0, 1], [1, -1], "num_accepted: expected 0 <= num_accepted <= 3, got -1 at [1]"),
        ([0, 1], [1], "num_accepted: expected shape [lanes=2], got [1]"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            made.buffers.commit(torch.tensor(slots), torch.tensor(counts))
        assert made.buffers.num_buffered.tolist() == [5, 0, 9, 0]
    made.buffers.commit(torch.tensor([2, -1, 0]), torch.tensor([3, 99, 0]))
    assert made.buffers.num_buffered.tolist() == [5, 0, 12, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indices": int32(0, 4)}, "indices: expected values below rows=4, got 4 at [1]"),
        ({"indices": int32(0)}, "values: expected shape [1, 3], one row of states for each index, got [2, 3]"),
        ({"indices": torch.tensor([0.0, 1.0])}, "indices: expected dtype torch.int32 or torch.int64"),
        ({"values": torch.ones(2, 3).bfloat16()}, "values: expected dtype torch.float32"),
        ({"states": torch.zeros(4, 6)[:, ::2]}, "states: expected axes 1..1"),
    ],
)
def test_masked_update_rows(changes, message):
    call = {"states": torch.zeros(4, 3), "indices": int32(0, 2), "values": torch.ones(2, 3), **changes}
    with pytest.raises(ValueError, match=re.escape(message)):
        _masked_update_rows(**call)
    assert bool((call["states"] == 0).all())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_rows": int32(3, 16)}, "target_rows: expected values below chunk_size=16, got 16 at [1]"),
        ({"chunk_starts": int32(0, 30)}, "chunk_starts: expected rows within the buffers' 32, got 30 at [1]"),
        ({"chunk_starts": int32(-1, 0)}, "chunk_starts: expected rows within the buffers' 32, got -1 at [0]"),
        ({"slots": int32(0, 3)}, "slots: expected 0 <= slots < 3, got 3 at [1]"),
        ({"chunk_flags": int32(0)}, "chunk_flags: expected shape [lanes=2], got [1]"),
    ],
)
def test_decode_rows(changes, message):
    case = random_case(32)
    states, out = torch.zeros(3, H, P, N), torch.full((2, H, P), 7.0)
    call = {"chunk_starts": int32(0, 16), "slots": int32(0, 1), "target_rows": int32(3, 15), "chunk_flags": int32(0, 1)}
    with pytest.raises(ValueError, match=re.escape(message)):
        _mamba_chunk_scan_decode_rows(
            case.x, case.z, case.dt, case.A, case.B, case.C, 16, **{**call, **changes}, initial_states=states, out=out
        )
    assert bool((out == 7.0).all()) and bool((states == 0).all())


def test_another_device_is_refused_in_words():
    with pytest.raises(NotImplementedError, match=r"replayssm.batch_invariant_decode: .*'mps:0'.*supported: cpu, cuda"):
        implementation("batch_invariant_decode", torch.device("mps:0"))


def test_a_rounded_copy_of_the_state():
    sizes = (3, 16, H, P, G, N, torch.device("cpu"))
    with pytest.raises(ValueError, match="shadow: expected a dtype of 16 bits"):
        BatchInvariantDecodeBuffers.allocate(*sizes, torch.float32, shadow=True)
    buffers = BatchInvariantDecodeBuffers.allocate(*sizes, torch.float16, shadow=True)
    state = torch.ones(3, H, P, N)
    for wrong, slots, message in (
        (state[:2], int32(0), r"ssm_state: expected shape .*slots=3"),
        (state.double(), int32(0), r"ssm_state: expected dtype torch.float32"),
        (state, torch.zeros(1), r"batch_indices: expected dtype torch.int32 or torch.int64"),
        (state, int32(3), "batch_indices: expected values below slots=3, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            buffers.refresh(wrong, slots)
    assert not buffers.shadow.any()
    buffers.refresh(state, int32(2, -1))
    assert [bool(shadow.all()) for shadow in buffers.shadow] == [False, False, True]


@pytest.mark.parametrize("name", ["x", "dt", "B", "C", "z", "A", "D", "dt_bias"])
def test_the_checked_mode_finds_numbers_that_are_not_finite(name, monkeypatch):
    monkeypatch.setenv("REPLAYSSM_CHECK", "1")
    value = arguments()[name].clone()
    value.flatten()[-1] = torch.inf
    refuse(f"{name}: expected finite values (REPLAYSSM_CHECK=1), got inf", **{name: value})


@pytest.mark.parametrize("name", ["x", "dt", "B", "state"])
def test_the_checked_mode_looks_at_live_memory_only(name, monkeypatch):
    monkeypatch.setenv("REPLAYSSM_CHECK", "1")
    made = decoder()  # slots 1 and 3 hold NaN
    batch_invariant_decode_buffered_scan(made.buffers, **arguments(), ssm_state=made.state)
    memory = made.state[2, 0, 0] if name == "state" else getattr(made.buffers, name)[2, 8].flatten()
    memory[0] = torch.nan
    full = "ssm_state" if name == "state" else f"buffers.{name}"
    refuse(f"{full}: expected finite values (REPLAYSSM_CHECK=1), got nan", made=made)


def keep(made, A, dt_bias):
    """Leave in the buffers what a GPU would keep of slots 0 and 2."""
    buffers, Q = made.buffers, made.case.chunk_size
    for slot in (0, 2):
        live, start = int(buffers.num_buffered[slot]), 0 if buffers.ring_start is None else buffers.ring_start[slot]
        at = (start + torch.arange(live)) % buffers.x.shape[1]
        dt = torch.log(torch.exp(buffers.dt[slot, at] + dt_bias) + 1.0)
        total = torch.cat([A * part.cumsum(0) for part in dt.split(Q)])
        buffers.sums[slot][:, at] = torch.stack((dt, total), -1).transpose(0, 1)
        buffers.num_summed[slot] = live + 1


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_the_checked_mode_compares_kept_sums_with_the_parameters(max_tokens, monkeypatch):
    monkeypatch.setenv("REPLAYSSM_CHECK", "1")
    made, call = decoder(max_tokens, sums=True), arguments()
    run = lambda **changes: batch_invariant_decode_buffered_scan(  # noqa: E731
        made.buffers, **{**call, "ssm_state": made.state, **changes}
    )
    if max_tokens > 1:  # a ring that goes around, and rows of two chunks
        made.buffers.ring_start[:] = made.buffers.ring_start.new_tensor([19, 0, 3, 0])
        for rows in (made.buffers.x, made.buffers.dt, made.buffers.B):
            rows[[0, 2]] = torch.randn_like(rows[[0, 2]])
        made.buffers.num_buffered[2] = 17
    keep(made, call["A"], call["dt_bias"])
    refuse("num_summed: expected 0 <= num_summed <= ", made=changed(made, "num_summed", 99), call=call)
    refuse("num_summed: expected 0 <= num_summed <= ", made=changed(made, "num_summed", -1), call=call)
    for name, value in (("A", call["A"] * 1.01), ("dt_bias", call["dt_bias"] + 0.05), ("dt_limit", (0.0, 0.2))):
        refuse("buffers.sums: expected those of this A, dt_bias, dt_softplus and dt_limit", made=made, **{name: value})
    made.buffers.sums[[1, 3]] = torch.nan  # nobody's
    run()
    assert made.buffers.num_summed.tolist() == [0, 0, 0, 0]  # a CPU keeps none
    run(A=call["A"] * 2)


def changed(made, name, value):
    """The decoder with another number of one cursor in slot 2."""
    buffers = replace(made.buffers, **{name: getattr(made.buffers, name).clone()})
    getattr(buffers, name)[2] = value
    other = copy(made)
    other.buffers = buffers
    return other
