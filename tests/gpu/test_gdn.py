"""The tests of the GDN ops once more, on a CUDA device: kernels against the fp64 reference, both on that device."""

import pytest
import torch

MODULES = ("test_gdn_verify", "test_gdn_commit", "test_gdn_lazy", "test_gdn_ops")
pytest.register_assert_rewrite(*MODULES)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# What only the CPU path does: refuse values, which on a GPU are not read back, and share work between threads.
HOST = (
    "test_refused_tensors",
    "test_refused_numbers_and_values",
    "test_simt_has_the_same_bits_on_any_number_of_threads",
)

for module in MODULES:
    for name, test in vars(__import__(module)).items():
        if name.startswith("test_") and name not in HOST:
            globals()[f"{name}__{module.removeprefix('test_gdn_')}"] = test


@pytest.fixture(autouse=True)
def _on_the_device():
    with torch.device("cuda"):
        yield
