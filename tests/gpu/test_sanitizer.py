"""NVIDIA's compute-sanitizer on a small case of the Mamba-2 kernels: no access outside memory, no race."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer"),
]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_nothing_is_found(tool):
    script = Path(__file__).with_name("sanitize.py")
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "3", sys.executable, str(script), "bfloat16"]
    done = subprocess.run([*command, "int8"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "done" in done.stdout
