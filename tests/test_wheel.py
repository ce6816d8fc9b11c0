"""The wheel: what is in it, and that it imports where neither Triton nor transformers exist."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import replayssm.models

ROOT = Path(__file__).parent.parent
LARGEST = 15 << 20  # bytes that the shipped models may take

# Refuses what a minimal environment lacks, then uses what must work there.
MINIMAL = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"triton", "transformers", "tokenizers", "safetensors", "matplotlib"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
sys.path.insert(0, sys.argv[1])

import replayssm
assert replayssm.__file__.startswith(sys.argv[1]), replayssm.__file__
import torch
import replayssm.cache, replayssm.conv, replayssm.mamba, replayssm.models

x = torch.ones(1, 2, 3)
out = replayssm.conv.causal_conv1d_replay(torch.zeros(1, 4, 3), torch.zeros(1, dtype=torch.int32), x, torch.ones(3, 2))
assert out.shape == x.shape
assert replayssm.models.path().is_dir()

from replayssm.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # hatchling builds in place without leaving anything in the source tree.
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        check=True,
        capture_output=True,
        timeout=120,
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check", "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", target, wheel], check=True, timeout=120)
    return target


def _run(installed, tmp_path, *arguments):
    command = [sys.executable, "-c", MINIMAL, str(installed), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, stdin=subprocess.DEVNULL)


def metadata(wheel):
    """The lines of the wheel's METADATA."""
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
    return archive.read(name).decode().splitlines()


def test_wheel_holds_the_whole_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if ".dist-info/" not in name}
    source = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "replayssm").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert package == source
    assert "replayssm/py.typed" in package
    assert any(name.startswith("replayssm/models/") and name.endswith(".safetensors") for name in package)


def test_shipped_models_are_small(wheel):
    models = [info for info in zipfile.ZipFile(wheel).infolist() if info.filename.startswith("replayssm/models/")]
    assert sum(info.file_size for info in models) <= LARGEST


def test_metadata_tells_the_licences_of_the_models_too(wheel):
    """What looks into the metadata alone, an audit say, must not miss the terms that the models came with."""
    assert "License-Expression: Apache-2.0 AND PSF-2.0" in metadata(wheel)
    texts = ["LICENSE", *(str(path.relative_to(ROOT)) for path in ROOT.glob("replayssm/models/*/LICENSE*"))]
    assert len(texts) == 1 + len(replayssm.models.NAMES)
    archive = zipfile.ZipFile(wheel)
    for text in texts:
        assert f"License-File: {text}" in metadata(wheel)
        (name,) = (n for n in archive.namelist() if n.endswith(f".dist-info/licenses/{text}"))
        assert archive.read(name) == (ROOT / text).read_bytes()


def test_metadata_asks_for_ranges(wheel):
    required = [line.split(":", 1)[1] for line in metadata(wheel) if "Requires-Dist" in line]
    unconditional = [line.strip() for line in required if "extra ==" not in line]
    assert sorted(line.split(">=")[0] for line in unconditional) == ["rich", "torch"]
    assert not any("==" in line for line in unconditional)


def test_imports_without_triton_and_transformers(installed, tmp_path):
    done = _run(installed, tmp_path, "info", "--json")
    assert done.returncode == 0, done.stderr
    assert '"available": false' in done.stdout


def test_generate_says_what_is_missing(installed, tmp_path):
    done = _run(installed, tmp_path, "generate", "--prompt", "a")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "pip install 'replayssm[hf]'" in done.stderr
