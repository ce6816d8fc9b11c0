"""The commit of cursors in Triton, under Triton's interpreter, against torch's operations."""

from dataclasses import fields

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: tests/gpu", allow_module_level=True)

from replayssm import cursors
from replayssm.cursors import kernels

WINDOW, RING, CONV, SLOTS = 7, 12, 8, 160


def random_case(batch, seed, slots_dtype):
    generator = torch.Generator().manual_seed(seed)

    def integers(high, count, dtype=torch.int32):
        return torch.randint(0, high, (count,), generator=generator, dtype=dtype)

    every = (integers(RING, SLOTS), integers(WINDOW + 1, SLOTS), integers(CONV, SLOTS), integers(5, SLOTS))
    slots = torch.randperm(SLOTS, generator=generator)[:batch].to(slots_dtype)
    slots[integers(4, batch) == 0] = -1
    lengths = integers(6, batch)
    accepted = (lengths * torch.rand(batch, generator=generator)).to(torch.int64)
    return every, slots, lengths, accepted


@pytest.mark.parametrize("batch", [1, 5, 131])
@pytest.mark.parametrize("slots_dtype", [torch.int32, torch.int64])
def test_equals_the_rule_in_torch(batch, slots_dtype):
    for seed in range(3):
        every, slots, lengths, accepted = random_case(batch, seed, slots_dtype)
        columns = torch.stack([slots.long(), lengths.long(), accepted], 1)
        for seq_lens in (lengths, columns[:, 1], 3, 0):
            if not isinstance(seq_lens, torch.Tensor):
                accepted = accepted.clamp(max=seq_lens)
            expected, got = [each.clone() for each in every], tuple(each.clone() for each in every)
            if isinstance(seq_lens, torch.Tensor) or seq_lens:
                cursors._commit(tuple(expected), slots, seq_lens, accepted, WINDOW, RING, CONV)
            kernels.commit(got, slots, seq_lens, columns[:, 2].minimum(accepted), WINDOW, RING, CONV)
            for field, one, other in zip(fields(cursors.Cursors), expected, got, strict=True):
                assert torch.equal(one, other), field.name
