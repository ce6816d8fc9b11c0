"""Megatron-Core's batch-invariant decode gives the same bits, outputs, states and rows, where it can be imported."""

import pytest
import torch
from exact_cases import INPUTS, bounds, pack
from ssd_cases import random_case

from replayssm import batch_invariant_decode as ours
from replayssm.bench import exact_peers

try:
    theirs = exact_peers.megatron()
except ImportError:
    pytest.skip("needs Megatron-Core with its batch-invariant decode", allow_module_level=True)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("made_on_the_device"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16, F16 = torch.bfloat16, torch.float16


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize(
    ("chunk_size", "nheads", "headdim", "ngroups", "dstate", "dtype", "D", "lanes"),
    [
        (128, 16, 64, 2, 128, BF16, "head", 3),  # one launch of ours
        (128, 16, 64, 2, 128, BF16, "head", 19),  # two
        (256, 128, 64, 8, 128, BF16, "head", 5),
        (32, 8, 80, 1, 64, F16, "element", 11),
    ],
)
def test_every_step_of_a_chunk(chunk_size, nheads, headdim, ngroups, dstate, dtype, D, lanes):
    """Lanes all over their chunks, one of them padding, each of which folds once."""
    lengths = [1 + 53 * lane % (2 * chunk_size) for lane in range(lanes)]
    sizes = {"nheads": nheads, "headdim": headdim, "ngroups": ngroups, "dstate": dstate, "dtype": dtype, "D": D}
    whole = random_case(sum(lengths) + lanes * (chunk_size + 1), chunk_size, **sizes)
    prompts = [whole.tokens(sum(lengths[:lane]), sum(lengths[: lane + 1])) for lane in range(lanes)]
    named = {name: pack(prompts, name) for name in INPUTS}
    slots = torch.randperm(lanes + 2)[:lanes].int()
    slots[1] = -1
    boundary = whole.states(lanes)
    whole.scan(**named, cu_seqlens=bounds(prompts), boundary_states=boundary)
    state = whole.states(lanes + 2)
    state[slots[slots >= 0]] = boundary[slots >= 0]
    sides = []
    for library in (ours, theirs):
        buffers = library.BatchInvariantDecodeBuffers.allocate(
            lanes + 2, chunk_size, nheads, headdim, ngroups, dstate, state.device, dtype
        )
        buffers.seed(**named, cu_seqlens=bounds(prompts), batch_indices=slots)
        sides.append((library.batch_invariant_decode_buffered_scan, buffers, state.clone()))
    (_, mine, my_state), (_, other, other_state) = sides
    folds = 0
    for step in range(chunk_size + 1):
        first = sum(lengths) + step * lanes
        tokens = {name: getattr(whole, name)[first : first + lanes, None] for name in INPUTS}
        out, expected = (
            run(buffers, **tokens, A=whole.A, D=whole.D, dt_bias=whole.dt_bias, batch_indices=slots, ssm_state=states)
            for run, buffers, states in sides
        )
        assert torch.equal(out, expected), step
        assert torch.equal(bits(my_state), bits(other_state)), step
        assert torch.equal(mine.chunk_flags[:lanes], other.chunk_flags[:lanes])
        folds += int(mine.chunk_flags.sum())
    assert folds >= lanes - 1
    for name in (*INPUTS, "num_buffered"):
        assert torch.equal(bits(getattr(mine, name)), bits(getattr(other, name))), name
