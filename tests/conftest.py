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


@pytest.fixture
def little_timing(monkeypatch):
    """What is timed does not matter: few bytes to find the copy ceiling, few buffers, few rounds."""
    monkeypatch.setattr("replayssm.bench.timing._COPY", {"cpu": 1 << 12})
    monkeypatch.setattr("replayssm.bench.timing._MOST_SETS", {"cpu": 2})
    monkeypatch.setattr("replayssm.bench.timing._CPU_SECONDS", 0.001)
