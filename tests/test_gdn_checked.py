"""The checked mode of the GDN ops: what is read must be finite, what is not read may be anything."""

import re

import pytest
import torch
from gdn_cases import int32, lazy_call, mtp_call, windows_of_layers

from replayssm.gdn_decode import gated_delta_rule_replayssm_commit as commit
from replayssm.gdn_decode import gated_delta_rule_replayssm_materialize as materialize


@pytest.fixture(autouse=True)
def _checked(monkeypatch):
    monkeypatch.setenv("REPLAYSSM_CHECK", "1")


def refuse(message, function):
    with pytest.raises(ValueError, match=re.escape(message)):
        function()


def test_mtp():
    call = mtp_call(3, 4)  # NaN in slots that are not used
    call.k[2] = torch.nan  # and in the tokens of padding
    call.run(A_log=torch.full((6,), -torch.inf))
    for name in ("q", "k", "v", "a", "b"):
        bad = getattr(call, name).clone()
        bad[1, 2, 1] = torch.inf
        refuse(
            f"{name}: expected finite values (REPLAYSSM_CHECK=1), got inf", lambda n=name, bad=bad: call.run(**{n: bad})
        )
    for name in ("A_log", "dt_bias"):
        refuse(f"{name}: expected finite values", lambda n=name: call.run(**{n: torch.full((6,), torch.nan)}))
    call.initial_state[2, 1, 3, 4] = torch.nan
    refuse("initial_state: expected finite values (REPLAYSSM_CHECK=1), got nan at [1, 3, 4] of slot 2", call.run)


@pytest.mark.parametrize("function", [commit, materialize])
def test_recorded(function):
    def run(tensors):
        lists = (
            (int32([1, -1]), int32([2, 4])) if function is commit else (int32([1, -1]), int32([3, 2]), int32([2, 4]))
        )
        function(**{name: tensor.clone() for name, tensor in tensors.items()}, **dict(zip(names, lists, strict=True)))

    names = ("state_indices", "accept_lens") if function is commit else ("src_slots", "dst_slots", "prefix_lens")
    tensors = windows_of_layers(2, 4, 4)
    tensors["checkpoint_state"][:, 0] = torch.nan
    tensors["g_cache"][:, 1, 3, 0] = -torch.inf
    for name in ("rawv_cache", "rawk_cache", "g_cache", "beta_cache"):
        tensors[name][:, 1, :, 2:] = torch.nan
    run(tensors)
    for name, tensor in tensors.items():
        bad = tensor.clone()
        bad[1, 1, 0, 1] = torch.nan
        message = f"{name}: expected finite values (REPLAYSSM_CHECK=1), got nan"
        refuse(message, lambda n=name, bad=bad: run({**tensors, n: bad}))


def test_checkpointing():
    call = lazy_call((3, -1, 6), 3, 7)
    call.v[1] = torch.nan
    call.run()
    slot = int(call.state_batch_indices[2])
    row = int((call.ring_start[slot] + 5) % call.v_cache.shape[2])
    for name in ("state", "v_cache", "k_cache", "g_cache", "beta_cache"):
        bad = getattr(call, name).clone()
        if name == "state":
            bad[slot, 0, 0, 0] = torch.nan
        else:
            bad[slot][:, row] = torch.nan
        refuse(f"{name}: expected finite values", lambda n=name, bad=bad: call.run(**{n: bad}))
    bad = call.b.clone()
    bad[2, 0, 0] = torch.nan
    refuse("b: expected finite values (REPLAYSSM_CHECK=1), got nan at [0, 0] of request 2", lambda: call.run(b=bad))
