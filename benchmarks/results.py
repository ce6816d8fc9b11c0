"""Where a benchmark's numbers go, and under which conditions they were taken."""

from __future__ import annotations

import csv
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent


def conditions() -> dict[str, str]:
    """Versions, processor and commit: what a number depends on."""
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "processor": _processor(),
        "threads": str(torch.get_num_threads()),
    }


def write_csv(name: str, rows: list[dict[str, object]], device: str = "cpu") -> Path:
    """Write rows with equal keys to benchmarks/results/<device>/<name>, the conditions as comment lines above."""
    path = ROOT / "benchmarks" / "results" / device / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.writelines(f"# {key}: {value}\n" for key, value in conditions().items())
        writer = csv.DictWriter(file, fieldnames=[key.strip() for key in rows[0]], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k.strip(): f"{v:.4f}" if isinstance(v, float) else v for k, v in row.items()})
    return path


def pin_to_one_core() -> None:
    """One thread on one core: the scheduler then moves nothing between measurements."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def _commit() -> str:
    """The commit, with "-dirty" when a tracked file other than a result differs from it."""
    commit = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results")
    return (commit or "unknown") + ("-dirty" if changed else "")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
