import pytest
import torch

# Bits of a matrix product may depend on how threads share it.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
