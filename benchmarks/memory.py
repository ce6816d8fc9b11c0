"""Memory of one sequence by replay, for the sizes of Nemotron-H: checkpoint, ring, convolution, against snapshots.

``python benchmarks/memory.py`` prints a table and writes benchmarks/results/cpu/memory.csv. Each row is first compared
with what a pool really allocates, one layer at a time.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console

from replayssm.bench.report import conditions, table, write_csv
from replayssm.cache import Mamba2Layer, ReplayPool, plan

WINDOW, TOKENS = 16, 4
# Heads, head size, state size, groups and Mamba-2 layers as published.
MODELS = {
    "Nemotron-H 4B": (Mamba2Layer(nheads=112, headdim=64, dstate=128, ngroups=8, conv_width=4), 24),
    "Nemotron-H 8B": (Mamba2Layer(nheads=128, headdim=64, dstate=128, ngroups=8, conv_width=4), 24),
    "Nemotron-H 56B": (Mamba2Layer(nheads=256, headdim=64, dstate=256, ngroups=8, conv_width=4), 54),
}
LIMITS = {torch.bfloat16: 1.15, torch.float32: 1.27}  # largest total in units of the bare fp32 state


def main() -> int:
    rows = [row(name, *MODELS[name], dtype) for name in MODELS for dtype in LIMITS]
    Console(width=120).print(table(f"MiB of one sequence, fp32 state, window {WINDOW}, T = {TOKENS}", rows))
    write_csv(Path(__file__).parent / "results" / "cpu" / "memory.csv", rows, conditions("cpu"))
    return 0 if all(each["x state"] <= each["limit"] for each in rows) else 1


def row(name: str, layer: Mamba2Layer, count: int, activations: torch.dtype) -> dict[str, object]:
    sizes = {"window": WINDOW, "max_tokens": TOKENS, "activation_dtype": activations}
    one = plan.slot_bytes([layer], **sizes)
    allocated = ReplayPool([layer], 1, **sizes).bytes_per_slot()
    assert one.total == allocated, f"{name}: planned {one.total} bytes, allocated {allocated}"
    total = plan.slot_bytes([layer] * count, **sizes)
    snapshots = plan.snapshot_bytes([layer] * count, num_tokens=TOKENS)
    mib = 2.0**20
    return {
        "model": name,
        "activations": str(activations).removeprefix("torch."),
        "state": total.state / mib,
        "ring": total.ring / mib,
        "conv": total.conv / mib,
        "total": total.total / mib,
        "x state": total.overhead,
        "limit": LIMITS[activations],
        "snapshots": (total.state + snapshots) / mib,
        "snapshots x": (total.state + snapshots) / total.state,
    }


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help, and nothing else
    sys.exit(main())
