"""What a step of exact decode allocates: no term in the square of the chunk, no copy of the states."""

from functools import partial

import pytest
import torch

from replayssm.batch_invariant_decode import batch_invariant_decode_buffered_scan
from replayssm.bench import exact as family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("lanes", [3, 33])  # one launch, two
def test_the_workspace_of_a_step(lanes):
    taken, states = {}, 0
    for chunk in (128, 256):
        line = family.Decode(heads=16, groups=2, chunk=chunk, tokens=1, mode="mix", batch=lanes)
        step = family._step_buffers(line, torch.device("cuda"))
        taken[chunk] = family._workspace(partial(batch_invariant_decode_buffered_scan, **step))
        states = step["ssm_state"].nbytes
    assert taken[128] < states / 16
    assert taken[256] <= 2 * taken[128] + (1 << 10)  # allocations come in whole 512 bytes
