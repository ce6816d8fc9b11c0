"""What ``backend="auto"`` stands for on a GPU: a function of shapes and dtypes."""

import pytest
import torch

from replayssm.gdn_decode import configs

CPU, GPU = torch.device("cpu"), torch.device("cuda")
f32, bf16 = torch.float32, torch.bfloat16


class Like:
    """The metadata of a tensor on a GPU that need not be there."""

    def __init__(self, *shape, dtype, device=GPU):
        self.shape, self.dtype, self.device = shape, dtype, device


def windows(backend="auto", *, rows=8, K=128, device=GPU, state=f32, keys=bf16):
    checkpoint = Like(2, 9, 4, 64, K, dtype=state, device=device)
    return configs.windows_backend(backend, checkpoint, Like(2, 9, 2, rows, K, dtype=keys, device=device))


@pytest.mark.parametrize("backend", ["simt", "tensor_core"])
def test_a_backend_that_is_named_is_taken(backend):
    assert configs.verify_backend(backend, GPU, f32, 1) == windows(backend, rows=1, device=CPU) == backend


def test_auto(monkeypatch):
    monkeypatch.setattr(configs, "_measured", lambda device: device.type == "cuda")
    verify = configs.verify_backend
    assert verify("auto", GPU, bf16, 3) == verify("auto", GPU, f32, 4) == "tensor_core"
    assert windows() == windows(rows=4, K=64) == "tensor_core"
    verifies = [(CPU, bf16, 8), (GPU, bf16, 2), (GPU, f32, 3)]
    assert {verify("auto", *arguments) for arguments in verifies} == {"simt"}
    others = ({"rows": 3}, {"K": 256}, {"device": CPU}, {"state": bf16}, {"keys": f32})
    assert {windows(**change) for change in others} == {"simt"}
