"""The GDN ops as torch.library sees them: mutation lists, fake tensors, torch.compile, and the eager short cut."""

import pytest
import torch
from gdn_cases import int32, mtp_call, windows_of_layers
from op_cases import OPCHECK, handed_to

from replayssm.gdn_decode import gated_delta_rule_mtp, recorded, verify
from replayssm.gdn_decode import gated_delta_rule_replayssm_commit as commit
from replayssm.gdn_decode import gated_delta_rule_replayssm_materialize as materialize


def finite_call(**options):
    """opcheck compares with NaN unequal: zeros in unowned memory."""
    call = mtp_call(3, 4, **options)
    call.initial_state.nan_to_num_(0.0)
    return call


@pytest.mark.parametrize("windows", [True, False])
@pytest.mark.parametrize("backend", ["simt", "tensor_core"])
def test_opcheck_mtp(windows, backend):
    call = finite_call()
    call = call.with_windows() if windows else call
    arguments = handed_to(verify, "_op", lambda: gated_delta_rule_mtp(**{**call.arguments(), "backend": backend}))
    torch.library.opcheck(torch.ops.replayssm.gated_delta_rule_mtp.default, arguments, test_utils=OPCHECK)


def test_opcheck_commit_and_materialize():
    tensors = windows_of_layers(2, 6, 4)
    track = {"track_state_indices": int32([5, 0]), "track_steps": int32([1, 0])}
    lists = {"state_indices": int32([1, 3]), "accept_lens": int32([2, 4]), **track}
    arguments = handed_to(recorded, "_commit", lambda: commit(**tensors, **lists))
    torch.library.opcheck(torch.ops.replayssm.gated_delta_rule_replayssm_commit.default, arguments, test_utils=OPCHECK)
    lists = {"src_slots": int32([1, 3]), "dst_slots": int32([2, 4]), "prefix_lens": int32([0, 3])}
    arguments = handed_to(recorded, "_materialize", lambda: materialize(**tensors, **lists))
    op = torch.ops.replayssm.gated_delta_rule_replayssm_materialize.default
    torch.library.opcheck(op, arguments, test_utils=OPCHECK)


def written(name):
    schema = getattr(torch.ops.replayssm, name).default._schema
    assert not schema.returns
    return {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}


def test_the_schemas_tell_what_is_written():
    windows = {"replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta"}
    assert written("gated_delta_rule_mtp") == {"initial_state", "output", "intermediate_states_buffer", *windows}
    assert written("gated_delta_rule_replayssm_commit") == {"checkpoint_state"}
    assert written("gated_delta_rule_replayssm_materialize") == {"checkpoint_state"}


def test_verify_and_commit_compiled_equal_eager():
    def step(call, arguments, accepts):
        output, state = gated_delta_rule_mtp(**arguments)
        windows = [w[None] for w in call.windows()]
        commit(state[None], *windows, arguments["initial_state_indices"], accepts)
        return output * 2 + state.sum()

    call, accepts = finite_call().with_windows(), torch.tensor([2, 4, 1])
    eager, compiled = call.clone(), call.clone()
    expected = step(eager, eager.arguments(), accepts)
    actual = torch.compile(lambda a, n: step(compiled, a, n), backend="aot_eager", fullgraph=True)(
        compiled.arguments(), accepts
    )
    assert torch.equal(actual, expected)
    assert all(torch.equal(a, b) for a, b in zip(compiled.memory().values(), eager.memory().values(), strict=True))
    assert not torch.equal(eager.initial_state, call.initial_state)


def test_compiled_for_sizes_that_change():
    torch._dynamo.reset()
    compiled = torch.compile(lambda a: gated_delta_rule_mtp(**a)[0], backend="aot_eager", dynamic=True, fullgraph=True)
    for T in (3, 2, 4, 1):
        call = mtp_call(3, T, seed=T)
        eager, traced = call.clone(), call.clone()
        assert torch.equal(compiled(traced.arguments())[:2], gated_delta_rule_mtp(**eager.arguments())[0][:2])


def test_no_gradient_is_recorded():
    call = finite_call()
    v = call.v.clone().requires_grad_()
    output, _ = gated_delta_rule_mtp(**{**call.arguments(), "v": v, "output": None})
    assert not output.requires_grad


def test_a_default_device_that_the_caller_has_set_changes_nothing():
    call = mtp_call(3, 5)
    for backend in ("simt", "tensor_core"):
        expected = call.run(backend=backend)
        with torch.device("meta"):
            actual = call.run(backend=backend)
        assert torch.equal(actual.output, expected.output)
