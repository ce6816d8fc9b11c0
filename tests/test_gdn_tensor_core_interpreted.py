"""The GDN kernels of the matrix unit under Triton's interpreter: their logic. ``tests/gpu`` has accuracy and bits.

The interpreter multiplies bf16 wrongly; the parts of a number are fp32 here, with the values that they have in bf16.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: tests/gpu", allow_module_level=True)
from gdn_cases import mtp_call

from replayssm.testing import as_bytes, assert_close, output_tolerance, using

f32, f16 = torch.float32, torch.float16


def check(call):
    """Compare one call, frozen, with the reference, and return the output."""
    call = replace(call, disable_state_update=True, backend="tensor_core")
    with using("kernels"):
        actual = call.run()
    with using("reference"):
        expected = call.run()
    live = [row for row, _ in call.live()]
    tolerance = output_tolerance(actual.output.dtype, f32)
    assert_close("output", actual.output[live], expected.output[live], tolerance)
    padding = [row for row in range(call.q.shape[0]) if row not in live]
    assert torch.equal(actual.output[padding], call.output[padding])
    assert torch.equal(as_bytes(actual.initial_state), as_bytes(call.initial_state))
    if call.options:
        (v, k, g, beta), wanted = actual.windows(), expected.windows()
        assert torch.equal(v, wanted[0]) and torch.equal(k, wanted[1])
        torch.testing.assert_close(g, wanted[2], atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(beta, wanted[3], atol=2e-6, rtol=2e-6)
    return actual.output


@pytest.mark.parametrize(
    ("T", "H", "HV", "K", "V", "dtype", "state_dtype"),
    [
        (1, 2, 2, 5, 3, f32, f16),
        (4, 1, 2, 16, 20, f32, f32),
        (3, 1, 3, 19, 5, f16, f32),
        (8, 2, 4, 32, 16, f16, f16),
        (11, 1, 1, 7, 9, f32, f32),
        (16, 1, 2, 4, 3, f16, f32),
    ],
)
def test_frozen_and_with_windows(T, H, HV, K, V, dtype, state_dtype):
    call = mtp_call(2, T, H, HV, K, V, dtype=dtype, state_dtype=state_dtype)
    assert torch.equal(check(call), check(call.with_windows()))


def test_windows_of_another_type_round_keys_and_values_but_not_queries():
    check(mtp_call(2, 3, 1, 2, 8, 5).with_windows(f16))
    check(mtp_call(2, 3, 1, 2, 8, 5, dtype=f16).with_windows(f32))


@pytest.mark.parametrize(
    "changes",
    [
        {"use_qk_l2norm": False, "scale": 1.0},
        {"A_log": torch.tensor([-torch.inf, 12.0])},
        {"dt_bias": torch.tensor([100.0, -1e4])},
    ],
)
def test_gates_and_norms(changes):
    check(replace(mtp_call(2, 5, 1, 2, 4, 6), **changes))


def test_strided_inputs():
    call = mtp_call(2, 3, 1, 2, 6, 5)
    apart = {name: torch.stack((getattr(call, name),) * 2, -1)[..., 0] for name in ("q", "k", "v", "a", "b")}
    apart |= {name: torch.stack((getattr(call, name),) * 3, -1)[:, 0] for name in ("A_log", "dt_bias")}
    wide = torch.full((2, 5, 2, 5), 3.0)
    moved = replace(call, **apart, initial_state_indices=call.initial_state_indices.int(), output=wide[:, 1:4])
    assert torch.equal(check(moved), check(call))


def test_keys_that_nearly_agree():
    """Corrections that cancel: the solve must not amplify rounding."""
    call = mtp_call(1, 8, 1, 1, 16, 9)
    k = call.k[:, :1] + 1e-3 * call.k
    check(replace(call, k=k, b=call.b + 5, a=call.a - 8))


def test_a_request_with_a_nan_touches_no_other():
    call = mtp_call(3, 2, 1, 2, 5, 6)
    k = call.k.clone()
    k[0, 1, 0, 3] = torch.nan
    with using("kernels"):
        frozen = replace(call, disable_state_update=True, backend="tensor_core")
        clean, spoilt = frozen.run(), replace(frozen, k=k).run()
    assert spoilt.output[0].isnan().any() and torch.equal(spoilt.output[1:], clean.output[1:])
