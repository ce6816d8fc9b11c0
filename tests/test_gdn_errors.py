"""Wrong calls of the GDN ops: the error names the argument, what was expected and what came; nothing was written."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from gdn_cases import WINDOWS, int32, mtp_call, windows_of_layers
from op_cases import refuse_call

from replayssm.dispatch import implementation
from replayssm.gdn_decode import gated_delta_rule_mtp
from replayssm.gdn_decode import gated_delta_rule_replayssm_commit as commit
from replayssm.gdn_decode import gated_delta_rule_replayssm_materialize as materialize
from replayssm.testing import as_bytes

T = 4
TENSORS = ("q", "k", "v", "initial_state", "initial_state_indices", "A_log", "a", "dt_bias", "b", "output")
refuse = partial(refuse_call, gated_delta_rule_mtp)


@pytest.mark.parametrize("name", [*TENSORS, *WINDOWS])
def test_rank_dtype_device_and_type_of_every_tensor(name):
    call = mtp_call(3, T).with_windows()
    tensor = call.arguments()[name]
    refuse(call, f"{name}: expected shape [", **{name: tensor.unsqueeze(0)})
    refuse(call, f"{name}: expected dtype ", **{name: torch.empty_like(tensor, dtype=torch.complex64)})
    refuse(call, f"{name}: expected a torch.Tensor, got list", TypeError, **{name: [1]})
    if name != "initial_state":
        refuse(call, f"{name}: expected device cpu, got meta", **{name: tensor.to("meta")})
    if name not in ("output", *WINDOWS):
        refuse(call, f"{name}: expected a torch.Tensor, got NoneType", TypeError, **{name: None})


@pytest.mark.parametrize(
    ("name", "axis", "expected"),
    [
        ("k", 3, "[batch=3, T=4, H=2, K=16], got [3, 4, 2, 15]"),
        ("v", 2, "[batch=3, T=4, HV=6, V=11], got [3, 4, 5, 11]"),
        ("q", 3, "[batch, T, H, K=16], got [3, 4, 2, 15]"),
        ("a", 1, "[batch=3, T=4, HV=6], got [3, 3, 6]"),
        ("b", 0, "[batch=3, T=4, HV=6], got [2, 4, 6]"),
        ("A_log", 0, "[HV=6], got [5]"),
        ("dt_bias", 0, "[HV=6], got [5]"),
        ("output", 3, "[batch=3, T=4, HV=6, V=11], got [3, 4, 6, 10]"),
        ("initial_state_indices", 0, "[batch=3], got [2]"),
        ("replayssm_rawv", 2, "[slots=6, HV=6, T=4, V=11], got [6, 6, 3, 11]"),
        ("replayssm_rawk", 1, "[slots=6, H=2, T=4, K=16], got [6, 1, 4, 16]"),
        ("replayssm_g", 0, "[slots=6, HV=6, T=4], got [5, 6, 4]"),
        ("replayssm_beta", 2, "[slots=6, HV=6, T=4], got [6, 6, 3]"),
    ],
)
def test_sizes(name, axis, expected):
    call = mtp_call(3, T).with_windows()
    tensor = call.arguments()[name]
    refuse(call, f"{name}: expected shape {expected}", **{name: tensor.narrow(axis, 0, tensor.shape[axis] - 1)})


def test_limits():
    refuse(mtp_call(2, 17), "T: expected 1 <= T <= 16 (tokens in q), got 17")
    refuse(mtp_call(2, 0), "T: expected 1 <= T <= 16 (tokens in q), got 0")
    refuse(mtp_call(2, 1, K=257), "K: expected 1 <= K <= 256, got 257")
    refuse(mtp_call(2, 1, V=257), "V: expected 1 <= V <= 256, got 257")
    refuse(mtp_call(2, 1, H=4), "H: expected a divisor of HV=6, the value heads, got H=4 key heads")


@pytest.mark.parametrize("name", ["initial_state", "output", *WINDOWS])
def test_memory_that_is_written_is_packed_and_does_not_overlap(name):
    call = mtp_call(3, T).with_windows()
    tensor = call.arguments()[name]
    refuse(call, f"{name}: expected axes ", **{name: torch.stack((tensor, tensor), -1)[..., 0]})
    refuse(call, f"{name}: expected elements with memory of", **{name: tensor[:1].expand(tensor.shape)})


def test_a_transposed_window():
    call = mtp_call(3, T, H=4, HV=4, K=8, V=8).with_windows()
    turned = call.options["replayssm_rawv"].transpose(1, 2).contiguous().transpose(1, 2)
    refuse(call, "replayssm_rawv: expected axes 1..3", replayssm_rawv=turned)


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_come_with_the_flag_and_all_together(name):
    call = mtp_call(3, T).with_windows()
    refuse(call, f"{name}: expected a tensor with cache_replayssm=True, got None", **{name: None})
    plain = replace(call, options={})
    refuse(plain, f"{name}: expected None with cache_replayssm=False, got a tensor", **{name: call.options[name]})


def test_dtypes_that_must_agree():
    call = mtp_call(3, T).with_windows()
    refuse(call, "k: expected dtype torch.float32, got torch.float16", k=call.k.half())
    refuse(call, "v: expected dtype torch.float32, got torch.bfloat16", v=call.v.bfloat16())
    half = call.options["replayssm_rawk"].half()
    refuse(call, "replayssm_rawk: expected dtype torch.float32, got torch.float16", replayssm_rawk=half)
    half = call.options["replayssm_g"].half()
    refuse(call, "replayssm_g: expected dtype torch.float32, got torch.float16", replayssm_g=half)
    plain, buffer = mtp_call(3, T), torch.zeros(3, T, 6, 11, 16, dtype=torch.float16)
    message = "intermediate_states_buffer: expected dtype torch.float32, got torch.float16"
    refuse(plain, message, intermediate_states_buffer=buffer)


def test_ways_to_keep_states_that_contradict_each_other():
    call, plain = mtp_call(3, T).with_windows(), mtp_call(3, T)
    buffer, scatter = torch.zeros(3, T, 6, 11, 16), torch.full((3, T), -1)
    refuse(call, "disable_state_update: expected True with cache_replayssm=True, got False", disable_state_update=False)
    refuse(call, "intermediate_states_buffer: expected None with cache_replayssm", intermediate_states_buffer=buffer)
    refuse(call, "ssm_state_indices: expected None with cache_replayssm=True, got a tensor", ssm_state_indices=scatter)
    frozen = replace(plain, disable_state_update=True)
    refuse(frozen, "disable_state_update: expected False with ssm_state_indices, got True", ssm_state_indices=scatter)
    both = {"ssm_state_indices": scatter, "intermediate_states_buffer": buffer}
    refuse(plain, "ssm_state_indices: expected None with intermediate_states_buffer, got a tensor", **both)
    for wrong in (buffer[:2], buffer[:, :3]):
        message = f"expected at least [batch=3, T=4] states, got {list(wrong.shape)}"
        refuse(plain, message, intermediate_states_buffer=wrong.contiguous())


def test_options():
    call = mtp_call(3, T)
    refuse(call, "backend: expected one of auto, simt, tensor_core, got 'tcgen05'", backend="tcgen05")
    refuse(call, "backend: expected a string, got 3", TypeError, backend=3)
    refuse(call, "scale: expected a number or None, got '1'", TypeError, scale="1")
    refuse(call, "scale: expected a finite number, got nan", scale=float("nan"))
    refuse(call, "use_qk_l2norm: expected a bool, got 1", TypeError, use_qk_l2norm=1)
    refuse(call, "cache_replayssm: expected a bool, got 0", TypeError, cache_replayssm=0)
    refuse(call, "disable_state_update: expected a bool, got 2", TypeError, disable_state_update=2)


def test_slots():
    call = mtp_call(3, T)
    refuse(
        call,
        "initial_state_indices: expected values below slots=6, got 6 at [1]",
        initial_state_indices=int32([1, 6, 2]),
    )
    refuse(call, "initial_state_indices: expected distinct slots, got 2", initial_state_indices=int32([2, 1, 2]))
    output = {"output_state_indices": int32([4, 6, 1])}
    refuse(call, "output_state_indices: expected values below slots=6, got 6 at [1]", **output)
    refuse(call, "output_state_indices: expected distinct slots, got 4 more", output_state_indices=int32([4, 4, 1]))
    message = "output_state_indices: expected slots that no other request reads, got 2, written for request 0 and read"
    refuse(call, message, output_state_indices=int32([2, 4, -1]))
    scatter = {"ssm_state_indices": int32([[0, 4, 5, 0], [-1, -1, -1, 1], [9, 9, 9, 9]])}
    refuse(call, "ssm_state_indices: expected distinct slots, got 0 more than once", **scatter)
    windows = replace(call.with_windows(), initial_state_indices=int32([2, 1, 2]))
    refuse(windows, "initial_state_indices: expected distinct slots, got 2 more than once")


def good(function):
    if function is commit:
        lists = {"state_indices": [1, -1, 3], "accept_lens": [2, 3, 4]}
    else:
        lists = {"src_slots": [1, -1, 3], "dst_slots": [2, -1, 4], "prefix_lens": [3, 0, 2]}
    return {**windows_of_layers(2, 5, T), **{name: int32(values) for name, values in lists.items()}}


def refuse_recorded(function, message, error=ValueError, **changes):
    arguments = {**good(function), **changes}
    before = {name: as_bytes(t) for name, t in arguments.items() if isinstance(t, torch.Tensor) and not t.is_meta}
    with pytest.raises(error, match=re.escape(message)):
        function(**arguments)
    for name, memory in before.items():
        assert torch.equal(as_bytes(arguments[name]), memory), f"{name} was written before the error"


RECORDS = ("rawv_cache", "rawk_cache", "g_cache", "beta_cache")


@pytest.mark.parametrize("function", [commit, materialize])
def test_recorded_tensors(function):
    call = good(function)
    for name, tensor in call.items():
        storage = name in ("checkpoint_state", *RECORDS)
        refuse_recorded(function, f"{name}: expected shape [", **{name: tensor.unsqueeze(0)})
        wrong = torch.empty_like(tensor, dtype=torch.float64)
        refuse_recorded(function, f"{name}: expected dtype ", TypeError if storage else ValueError, **{name: wrong})
        refuse_recorded(function, f"{name}: expected a torch.Tensor, got int", TypeError, **{name: 3})
        if name != "checkpoint_state":
            refuse_recorded(function, f"{name}: expected device cpu, got meta", **{name: tensor.to("meta")})
        if storage:
            spread = torch.stack((tensor, tensor), -1)[..., 0]
            refuse_recorded(function, f"{name}: expected axes 2..", **{name: spread})
            refuse_recorded(
                function, f"{name}: expected elements with memory of", **{name: tensor[:1].expand(tensor.shape)}
            )
    half = call["rawk_cache"].half()
    refuse_recorded(function, "rawk_cache: expected dtype torch.float32, got", TypeError, rawk_cache=half)
    short = {"g_cache": call["g_cache"][..., :3].contiguous()}
    refuse_recorded(function, "g_cache: expected shape [layers=2, slots=5, HV=6, T=4], got [2, 5, 6, 3]", **short)
    refuse_recorded(function, "H: expected a divisor of HV=6", rawk_cache=torch.zeros(2, 5, 4, T, 16))
    refuse_recorded(function, "T: expected 1 <= T <= 16 (tokens in rawv_cache), got 17", **windows_of_layers(2, 5, 17))
    refuse_recorded(function, "K: expected 1 <= K <= 256, got 257", **windows_of_layers(2, 5, 2, K=257))


@pytest.mark.parametrize("function", [commit, materialize])
def test_recorded_options(function):
    refuse_recorded(function, "backend: expected one of auto, simt, tensor_core, tcgen05, got 'fast'", backend="fast")
    refuse_recorded(function, "backend: expected a string, got None", TypeError, backend=None)
    refuse_recorded(function, "backend: expected a GPU of SM10x for 'tcgen05', got device cpu", backend="tcgen05")
    refuse_recorded(function, "null_block_id: expected -1 <= null_block_id", null_block_id=-2)
    refuse_recorded(function, "null_block_id: expected an int, got 1.0", TypeError, null_block_id=1.0)
    refuse_recorded(function, "use_qk_l2norm: expected a bool, got None", TypeError, use_qk_l2norm=None)


def test_commit_values_and_tracking():
    both = "expected both of track_state_indices and track_steps or neither, got None"
    steps, slots = int32([0, 0, 0]), int32([0, -1, 4])
    refuse_recorded(commit, f"track_state_indices: {both}", track_steps=steps)
    refuse_recorded(commit, f"track_steps: {both}", track_state_indices=slots)
    refuse_recorded(
        commit, "track_steps: expected shape [batch=3], got [2]", track_state_indices=slots, track_steps=steps[:2]
    )
    refuse_recorded(
        commit, "state_indices: expected values below slots=5, got 5 at [2]", state_indices=int32([1, 2, 5])
    )
    refuse_recorded(
        commit,
        "state_indices: expected distinct slots, got 1 more",
        accept_lens=int32([1, 0, 2]),
        state_indices=int32([1, 1, 1]),
    )
    for count in (-1, 5):
        message = f"accept_lens: expected 0 <= accept_lens <= T=4, got {count} at [0]"
        refuse_recorded(commit, message, accept_lens=int32([count, 9, 1]))
    accepts = int32([2, 2, 2])
    live = {"accept_lens": accepts, "track_steps": steps}
    message = "track_state_indices: expected slots outside of the live state_indices, got 1"
    refuse_recorded(commit, message, track_state_indices=int32([0, 2, 1]), **live)
    message = "track_state_indices: expected distinct slots, got 0 more than once"
    refuse_recorded(commit, message, track_state_indices=int32([0, 2, 0]), **live)
    message = "track_state_indices: expected values below slots=5, got 7 at [2]"
    refuse_recorded(commit, message, track_state_indices=int32([0, 2, 7]), **live)


def test_materialize_values():
    message = "dst_slots: expected distinct slots, got 4 more than once"
    refuse_recorded(materialize, message, dst_slots=int32([4, 0, 4]))
    message = "dst_slots: expected slots that no other request reads, got 1"
    refuse_recorded(materialize, message, dst_slots=int32([4, 0, 1]))
    refuse_recorded(materialize, "src_slots: expected values below slots=5, got 5", src_slots=int32([5, -1, 0]))
    refuse_recorded(materialize, "dst_slots: expected values below slots=5, got 5", dst_slots=int32([5, -1, 0]))
    for start in (-1, 4):
        message = f"ring_start: expected 0 <= ring_start < T=4, got {start} at [2]"
        refuse_recorded(materialize, message, ring_start=int32([0, 9, start]))
    refuse_recorded(materialize, "ring_start: expected shape [batch=3], got [2]", ring_start=int32([0, 1]))
    message = "T: expected 1 <= T <= 80 (tokens in rawv_cache), got 81"
    refuse_recorded(materialize, message, **windows_of_layers(2, 5, 81), ring_start=int32([0, 0, 0]))
    message = "prefix_lens: expected 0 <= prefix_lens <= T=4, got 5 at [0]"
    refuse_recorded(materialize, message, prefix_lens=int32([5, 9, 0]))


def test_devices_without_an_implementation():
    with pytest.raises(
        NotImplementedError, match=r"replayssm.gdn_decode: tensors on device 'mps:0' .*supported: cpu, cuda$"
    ):
        implementation("gdn_decode", torch.device("mps:0"))
    call = mtp_call(3, T)
    meta = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in call.arguments().items()
    }
    with pytest.raises(NotImplementedError, match=r"replayssm.gdn_decode: tensors on device 'meta' are not supported"):
        gated_delta_rule_mtp(**meta)
    for function in (commit, materialize):
        with pytest.raises(NotImplementedError, match=r"gdn_decode: tensors on device .meta"):
            function(**{name: tensor.to("meta") for name, tensor in good(function).items()})
