"""``REPLAYSSM_CHECK=1`` for the convolution and ``replayssm_materialize``: numbers that are not finite are named."""

import re

import pytest
import torch
from wrong_calls import CALLS

from replayssm.testing import as_bytes


def refuse(call, message, **changes):
    before = [as_bytes(tensor) for tensor in call.memory]
    with pytest.raises(ValueError, match=re.escape(message)):
        call.function(**{**call.every(), **changes})
    assert all(torch.equal(as_bytes(tensor), old) for tensor, old in zip(call.memory, before, strict=True))


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    monkeypatch.setenv("REPLAYSSM_CHECK", "1")


@pytest.mark.parametrize("name", ["rows", "x", "weight", "bias"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_the_convolution(name, value):
    call = CALLS["causal_conv1d_replay"]()
    # Slots 3 and 0 have their history at rows 3, 4, 5 and 0, 1, 2; what nobody reads may hold anything.
    call.arguments["rows"][[1, 2, 4]] = torch.nan
    call.arguments["rows"][3, :3], call.arguments["rows"][0, 3:] = torch.nan, torch.nan
    call.function(**call.every())
    call = CALLS["causal_conv1d_replay"]()
    place, where = {"rows": ((3, 4, 2), " at [1, 2] of the history of slot 3"), "x": ((1, 2, 5), " of request 1")}.get(
        name, ((4,), "")
    )
    call.arguments[name][place] = value
    refuse(call, f"{name}: expected finite values (REPLAYSSM_CHECK=1), got {value}")
    if where:
        refuse(call, where)


def test_materialize():
    CALLS["replayssm_materialize"]().function(**CALLS["replayssm_materialize"]().every())
    call = CALLS["replayssm_materialize"]()
    slot, start = int(call.arguments["src_slots"][0, 1]), int(call.arguments["ring_start"][1])
    x_cache, B_cache, dt_cache, A = call.arguments["dependency_inputs"]
    state = call.arguments["dependency_outputs"][0]
    for name, tensor, place in (
        ("state", state, (slot, 2, 3, 4)),
        ("x_cache", x_cache, (slot, 5, start, 1)),
        ("B_cache", B_cache, (slot, 1, start, 7)),
        ("dt_cache", dt_cache, (slot, 4, start)),
        ("A", A, (3,)),
    ):
        kept = tensor[place].clone()
        tensor[place] = torch.inf
        refuse(call, f"{name}: expected finite values (REPLAYSSM_CHECK=1), got inf")
        tensor[place] = kept
    # Of this request one row is applied; the row behind it is not read.
    x_cache[slot, 5, (start + 1) % x_cache.shape[2], 1] = torch.inf
    call.function(**call.every())
