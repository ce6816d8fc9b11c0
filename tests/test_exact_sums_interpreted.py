"""What kernels of exact decode keep of dt between calls, under Triton's interpreter: the same bits as without."""

import pytest
import torch

triton = pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: tests/gpu", allow_module_level=True)

from exact_cases import check_kept  # noqa: E402
from ssd_cases import random_case  # noqa: E402

from replayssm.batch_invariant_decode.configs import batch_tile  # noqa: E402
from replayssm.batch_invariant_decode.kernels import launch  # noqa: E402
from replayssm.testing import using  # noqa: E402

SIZES = {"nheads": 2, "headdim": 5, "ngroups": 1, "dstate": 11, "dtype": torch.float16}


@pytest.fixture(params=["one launch", "two launches"], autouse=True)
def form(request, monkeypatch):
    """Steps take this form, whatever the size of the batch."""
    lanes = 1 if request.param == "one launch" else 1 << 10
    monkeypatch.setattr(launch, "batch_tile", lambda *sizes: batch_tile(*sizes[:5], lanes, sizes[6]))


@pytest.mark.parametrize(("chunk_size", "max_tokens", "seed"), [(16, 1, 17), (21, 4, 13), (34, 1, 14)])
def test_kept_equals_derived(chunk_size, max_tokens, seed):  # schedules in which lanes fold
    with using("kernels"):
        check_kept(random_case(3 * chunk_size, chunk_size, **SIZES), max_tokens, 6, seed)
