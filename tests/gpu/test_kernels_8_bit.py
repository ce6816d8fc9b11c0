"""8-bit states on a CUDA device where programs take several heads: the bits of one head, and the error of reading."""

from dataclasses import replace

import pytest
import torch
from test_kernels import error, on_device, some_rows

from replayssm.mamba import checkpointing_ssu
from replayssm.mamba.configs import step_tile
from replayssm.testing import as_bytes, random_ssu_call, using

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
bf16, int8, fp8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn


def eightfold(call):
    """The call with eight of each request: states and rings are copies, new tokens are not."""
    slots, batch = call.state.shape[0], call.x.shape[0]
    pool = ("state", "state_scale", "x_cache", "B_cache", "dt_cache", "ring_start", "prev_num_accepted_tokens")
    shifts = slots * torch.arange(8, device="cuda")[:, None]
    indices = torch.where(call.state_batch_indices < 0, -1, call.state_batch_indices + shifts)
    fresh = {name: torch.randn_like(getattr(call, name).repeat(8, 1, 1, 1)) for name in ("x", "B", "C", "z")}
    dt = torch.randn_like(call.dt[..., :1].repeat(8, 1, 1, 1)).expand(8 * batch, *call.dt.shape[1:])
    copies = {name: torch.cat([getattr(call, name)] * 8) for name in (*pool, "out")}
    return replace(call, **copies, **fresh, dt=dt, state_batch_indices=indices.flatten())


@pytest.mark.parametrize(
    ("headdim", "dstate", "stochastic"), [(64, 128, False), (64, 128, True), (20, 36, False)], ids=str
)
@pytest.mark.parametrize("seq_len", [1, 4])
@pytest.mark.parametrize("dtype", [int8, fp8])
def test_eight_heads_a_program_have_the_bits_of_fewer(dtype, seq_len, headdim, dstate, stochastic):
    """176 requests of 96 heads, two halves of them, and nine: eight, four heads and one head a program.

    With sizes that leave tiles partly empty it is one head everywhere.
    """
    for batch, together in ((176, 8), (88, 4), (9, 1)):
        blocks = step_tile(headdim, dstate, 1, 2, seq_len, 16, 32, batch * 96).blocks
        assert blocks == (together if dstate == 128 else 1)
    random = {"rand_seed": torch.tensor([7], device="cuda")} if stochastic else {}
    hold, flush = range(17 - seq_len), range(17 - seq_len, 17)
    for lives in (hold, flush, range(17)):
        live = tuple(-1 if row == 3 else lives[5 * row % len(lives)] for row in range(22))
        sizes = {"nheads": 96, "ngroups": 3, "headdim": headdim, "dstate": dstate}
        one = random_ssu_call(live=live, seq_len=seq_len, window=16, state_dtype=dtype, dtype=bf16, **sizes)
        call = eightfold(on_device(replace(one, options=random)))
        full = some_rows(call, list(range(176)))
        checkpointing_ssu(**full.arguments())
        for rows in (list(range(88)), list(range(88, 176)), list(range(175, 166, -1))):
            part = some_rows(call, rows)
            checkpointing_ssu(**part.arguments())
            slots = part.state_batch_indices[part.state_batch_indices >= 0]
            assert torch.equal(as_bytes(part.out), as_bytes(full.out[rows]))
            for name in ("state", "state_scale", "x_cache", "B_cache", "dt_cache"):
                assert torch.equal(as_bytes(getattr(part, name)[slots]), as_bytes(getattr(full, name)[slots])), name


@pytest.mark.parametrize(("headdim", "dstate"), [(64, 128), (20, 36), (32, 64), (48, 100)])
@pytest.mark.parametrize("dtype", [int8, fp8])
def test_8_bit_states_of_many_heads_are_read_right(dtype, headdim, dstate):
    """Without a flush the outputs have the error of other states: codes and C are exact, or nearly so."""
    call = random_ssu_call(
        live=tuple(row % 13 for row in range(90)), seq_len=2, window=16, nheads=12, headdim=headdim, dstate=dstate,
        state_dtype=dtype, dtype=bf16,
    )  # fmt: skip
    expected, call = call.clone(), on_device(call)
    with using("reference"):
        checkpointing_ssu(**expected.arguments())
    checkpointing_ssu(**call.arguments())
    assert error(call.out, expected.out) < 4e-3
