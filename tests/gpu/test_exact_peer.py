"""mamba_ssm's own Triton kernels give the same bits, outputs and boundary states, where they can be imported."""

from math import prod

import pytest
import torch
from exact_cases import Decoder
from ssd_cases import random_case

from replayssm.ssd import pin_mamba_ssm

chunk_state = pytest.importorskip("mamba_ssm.ops.triton.ssd_chunk_state")
bmm = pytest.importorskip("mamba_ssm.ops.triton.ssd_bmm")
chunk_scan = pytest.importorskip("mamba_ssm.ops.triton.ssd_chunk_scan")
state_passing = pytest.importorskip("mamba_ssm.ops.triton.ssd_state_passing")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16, F16 = torch.bfloat16, torch.float16


OTHERS = (
    chunk_state._chunk_state_fwd_kernel,
    bmm._bmm_chunk_fwd_kernel,
    chunk_scan._chunk_scan_fwd_kernel,
    state_passing._state_passing_fwd_kernel,
)
for kernel in OTHERS:  # no tile of these gives other bits: one saves the time of measuring them all
    kernel.configs = [min(kernel.configs, key=lambda config: prod(config.kwargs.values()))]


@pytest.fixture(autouse=True)
def _pinned(made_on_the_device):
    pin_mamba_ssm()


def combined(case, initial=None):
    """mamba_ssm's scan over one sequence from its parts: outputs, states entering each chunk, final state."""
    x, dt, B, C = (value[None] for value in (case.x, case.dt, case.B, case.C))
    sums, dt = chunk_state._chunk_cumsum_fwd(dt, case.A, case.chunk_size, dt_bias=case.dt_bias, dt_softplus=True)
    states = chunk_state._chunk_state_fwd(B, x, dt, sums, states_in_fp32=True)
    shape = states.shape
    states, final = state_passing._state_passing_fwd(
        states.flatten(-2), sums[:, :, :, -1], initial_states=None if initial is None else initial[None].flatten(-2),
        out_dtype=torch.float32,
    )  # fmt: skip
    products = bmm._bmm_chunk_fwd(C, B, case.chunk_size, output_dtype=torch.float32)
    entering = states.view(shape)
    out = chunk_scan._chunk_scan_fwd(
        products, x, dt, sums, C, entering.to(case.x.dtype), D=case.D, z=None if case.z is None else case.z[None]
    )[0]
    return out[0], entering[0], final.view(shape[0], *shape[2:])[0]


@pytest.mark.parametrize(
    ("chunk_size", "nheads", "headdim", "ngroups", "dstate", "dtype", "D", "with_z"),
    [
        (128, 16, 64, 2, 128, BF16, "head", True),
        (256, 8, 64, 1, 128, BF16, "element", False),
        (64, 8, 80, 2, 64, F16, None, True),
        (32, 8, 32, 1, 16, BF16, "head", True),
        (16, 6, 40, 3, 256, F16, "head", False),
    ],
)
def test_the_scan(chunk_size, nheads, headdim, ngroups, dstate, dtype, D, with_z):
    tokens = 3 * chunk_size + chunk_size // 2 + 3
    case = random_case(
        tokens, chunk_size, nheads=nheads, headdim=headdim, ngroups=ngroups, dstate=dstate, dtype=dtype, D=D,
        with_z=with_z,
    )  # fmt: skip
    initial = torch.randn(case.state_shape)
    expected, entering, final = combined(case, initial)
    states, last = torch.zeros(tokens // chunk_size + 1, *case.state_shape), case.states()
    out = case.scan(initial_states=initial[None], final_states=last, chunk_states=states)
    assert torch.equal(out, expected)
    assert torch.equal(states[:3], entering[1:]) and torch.equal(last[0], final)


def test_decode():
    """Every row of two chunks, one token at a time and in verifications."""
    case = random_case(2 * 128 + 9, 128, nheads=16, headdim=64, ngroups=2, dstate=128, dtype=BF16)
    expected, entering, _ = combined(case)
    one, some = Decoder(case), Decoder(case, max_tokens=5)
    for decoder in (one, some):
        decoder.prefill((2, case.tokens(0, 60)))
    for t in range(60, 265):
        assert torch.equal(one.step([2], [case.tokens(t, t + 1)])[0], expected[t : t + 1])
    for t in range(60, 265, 5):
        assert torch.equal(some.step([2], [case.tokens(t, t + 5)])[0], expected[t : t + 5])
        some.commit([2], [5])
    for decoder in (one, some):
        assert torch.equal(decoder.state[2], entering[2])
