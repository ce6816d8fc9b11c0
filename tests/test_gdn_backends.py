"""What ``backend="auto"`` stands for: a function of shapes, dtypes and the kind of device."""

import pytest
import torch

from replayssm.gdn_decode.configs import records_backend, verify_backend

CPU, GPU, bf16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16


@pytest.mark.parametrize("backend", ["simt", "tensor_core"])
def test_a_backend_that_is_named_is_taken(backend):
    assert verify_backend(backend, GPU, False, torch.float32, 1) == backend
    assert records_backend(backend, CPU, True, torch.float32, 80) == backend


@pytest.mark.skipif(torch.version.hip is not None, reason="measured on NVIDIA GPUs")
def test_auto():
    assert verify_backend("auto", GPU, True, bf16, 2) == "tensor_core"
    assert records_backend("auto", GPU, False, bf16, 5) == "tensor_core"
    simt = [
        verify_backend("auto", CPU, True, bf16, 8), verify_backend("auto", GPU, False, bf16, 8),
        verify_backend("auto", GPU, True, torch.float16, 8), verify_backend("auto", GPU, True, bf16, 1),
        records_backend("auto", CPU, False, bf16, 8), records_backend("auto", GPU, True, bf16, 8),
        records_backend("auto", GPU, False, torch.float32, 8), records_backend("auto", GPU, False, bf16, 4),
    ]  # fmt: skip
    assert set(simt) == {"simt"}
