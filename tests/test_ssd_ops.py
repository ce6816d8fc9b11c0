"""``chunk_scan`` as torch.library sees it."""

import pytest
import torch
from op_cases import OPCHECK, handed_to
from ssd_cases import WRITTEN, full_arguments, random_case
from torch._subclasses.fake_tensor import FakeTensorMode

from replayssm import ssd
from replayssm.ssd import chunk_scan


def fresh(call):
    return {name: value.clone() if name in WRITTEN else value for name, value in call.items()}


@pytest.mark.parametrize("full", [True, False])
def test_opcheck(full):
    call = full_arguments() if full else {**random_case(20).arguments(), "out": torch.zeros(20, 6, 5)}
    torch.library.opcheck(
        torch.ops.replayssm.chunk_scan.default, handed_to(ssd, "_op", lambda: chunk_scan(**call)), test_utils=OPCHECK
    )


def test_the_schema_tells_what_is_written():
    schema = torch.ops.replayssm.chunk_scan.default._schema
    assert {a.name for a in schema.arguments if a.alias_info is not None} == set(WRITTEN)
    assert not schema.returns


def test_compiled_equals_eager():
    call = full_arguments()

    def run(arguments, factor):
        out = chunk_scan(**{**arguments, "x": arguments["x"] * factor})
        return out * 2 + arguments["final_states"].sum()

    eager, compiled = fresh(call), fresh(call)
    expected = run(eager, 0.5)
    actual = torch.compile(run, backend="aot_eager", fullgraph=True)(compiled, 0.5)
    assert torch.equal(actual, expected)
    assert all(torch.equal(compiled[name], eager[name]) for name in WRITTEN)


def test_fake_tensors():
    with FakeTensorMode() as mode:
        case = random_case(20)
        out = chunk_scan(**case.arguments())
    assert out.shape == (20, 6, 5) and out.fake_mode is mode


def test_precision_under_autocast():
    case = random_case(20)
    expected = case.scan()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(case.scan(), expected)


def test_a_default_device_is_no_matter():
    case = random_case(20)
    expected = case.scan()
    with torch.device("meta"):
        assert torch.equal(chunk_scan(**case.arguments()), expected)
