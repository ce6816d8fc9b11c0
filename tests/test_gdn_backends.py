"""What ``backend="auto"`` stands for: a function of shapes, dtypes and the kind of device."""

import pytest
import torch

from replayssm.gdn_decode.configs import records_backend, verify_backend

CPU, GPU = torch.device("cpu"), torch.device("cuda")
f32, bf16 = torch.float32, torch.bfloat16


class Like:
    """The metadata of a tensor on a GPU that need not be there."""

    def __init__(self, *shape, dtype, device=GPU):
        self.shape, self.dtype, self.device = shape, dtype, device


def records(backend="auto", *, rows=8, K=128, ring=False, device=GPU, state=f32, keys=bf16):
    checkpoint = Like(2, 9, 4, 64, K, dtype=state, device=device)
    return records_backend(backend, checkpoint, Like(2, 9, 2, rows, K, dtype=keys, device=device), ring)


@pytest.mark.parametrize("backend", ["simt", "tensor_core"])
def test_a_backend_that_is_named_is_taken(backend):
    assert verify_backend(backend, GPU, False, f32, 1) == backend
    assert records(backend, ring=True, device=CPU) == backend


@pytest.mark.skipif(torch.version.hip is not None, reason="measured on NVIDIA GPUs")
def test_auto():
    assert verify_backend("auto", GPU, True, bf16, 2) == verify_backend("auto", GPU, True, f32, 4) == "tensor_core"
    assert records() == records(rows=4, K=64) == "tensor_core"
    verifies = [(CPU, True, bf16, 8), (GPU, False, bf16, 8), (GPU, True, bf16, 1), (GPU, True, f32, 3)]
    assert {verify_backend("auto", *arguments) for arguments in verifies} == {"simt"}
    others = ({"rows": 3}, {"K": 256}, {"ring": True}, {"device": CPU}, {"state": bf16}, {"keys": f32})
    assert {records(**change) for change in others} == {"simt"}
