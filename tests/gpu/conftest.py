import pytest
import torch


@pytest.fixture
def made_on_the_device():
    """Tensors are made on the CUDA device unless another is named."""
    before = torch.get_default_device()
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(before)
