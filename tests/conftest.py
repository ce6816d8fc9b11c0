import os

import pytest
import torch

# Without a GPU, Triton's kernels run interpreted. Triton decides when it is first imported, hence here.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Bits of a matrix product may depend on how threads share it.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
