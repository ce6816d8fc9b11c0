"""The README's tables of measurements say what the committed results say."""

from __future__ import annotations

import csv
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
LINES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "README.md").read_text().splitlines()
    if line.startswith("|")
]
SPEEDS = ("transformers", "replay", "look-up")
MODELS = ("tiny-mamba2", "tiny-gdn-hybrid")
BATCHES = ("1", "16", "64", "128", "256")

# By how a row begins: its file, what its rows are chosen by, and the column of another library in the row below.
STEP = {"state": "bf16", "heads": "128", "mode": "mix"}
H200 = {
    "Mamba-2 replay step, 128 heads, bf16 state, 1 token": ("mamba", STEP | {"tokens": "1"}, "flashinfer_us"),
    "the same, 4 tokens": ("mamba", STEP | {"tokens": "4"}, "flashinfer_us"),
    "Gated DeltaNet verify, 32 heads, fp32 state, 8 tokens": (
        "gdn",
        {"state": "fp32", "heads": "32", "tokens": "8", "mode": "frozen", "backend": "tensor_core"},
        "flashinfer_frozen_us",
    ),
    "exact decode, 128 heads, chunk 128, 1 token": (
        "exact",
        {"heads": "128", "chunk": "128", "tokens": "1", "mode": "mix"},
        "megatron_us",
    ),
}


def rows_of(path):
    text = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(text))


def check(place, written, expected):
    """One cell, perhaps of several numbers, against the numbers that it rounds; None: an empty cell."""
    written = [] if not written else [part.removesuffix("x").replace(",", "") for part in written.split(", ")]
    expected = [number for number in expected if number is not None]
    assert len(written) == len(expected), f"{place}: {written} of the README, {expected} of the results"
    for text, number in zip(written, expected, strict=True):
        unit = 10.0 ** -len(text.partition(".")[2])
        assert abs(float(text) - number) <= 0.501 * unit, f"{place}: {text} in the README, {number} in the results"


def speeds(rows):
    """By the table's first column, what stands in the others: three speeds, and the last over the other two."""
    number = lambda row, key: float(row[key])  # noqa: E731
    (demo,), held = [r for r in rows if r["prompt"] == "demo"], [r for r in rows if r["prompt"] != "demo"]
    columns = (*SPEEDS, "x transformers", "x replay")
    tokens = sum(number(row, "written") for row in held)
    totals = [tokens / sum(number(row, "written") / number(row, way) for row in held) for way in SPEEDS]
    ends = sorted(held, key=lambda row: number(row, "x transformers"))
    return {
        "demo prompt": [[number(demo, key)] for key in columns],
        f"{len(held)} held-out prompts, median": [[statistics.median(number(r, key) for r in held)] for key in columns],
        "all of them, total tokens by total time": [
            [v] for v in (*totals, totals[2] / totals[0], totals[2] / totals[1])
        ],
        "the slowest and the fastest of them": [[number(ends[0], key), number(ends[-1], key)] for key in columns],
    }


@pytest.mark.parametrize("model", MODELS)
def test_generation_on_a_cpu(model):
    first = next(number for number, cells in enumerate(LINES) if cells[0].startswith(f"{model},"))
    expected = speeds(rows_of(RESULTS / f"cpu/generation-{model}.csv"))
    table = {cells[0]: cells[1:] for cells in LINES[first + 2 : first + 2 + len(expected)]}
    assert table.keys() == expected.keys()
    for name, cells in table.items():
        for written, numbers in zip(cells, expected[name], strict=True):
            check(f"{model}, {name}", written, numbers)


@pytest.mark.parametrize("name", H200)
def test_steps_on_an_h200(name):
    at = next(number for number, cells in enumerate(LINES) if cells[0] == name)
    file, chosen, other = H200[name]
    rows = [row for row in rows_of(RESULTS / f"h200/{file}.csv") if chosen.items() <= row.items()]
    by_batch = {row["batch"]: row for row in rows}
    ours, theirs = LINES[at][1:], LINES[at + 1][1:]
    for batch, mine, peer in zip(BATCHES, ours, theirs, strict=False):
        row = by_batch.get(batch)
        if mine:  # a table may leave sizes out, but not invent them
            check(f"{name}, batch {batch}", mine, [float(row["us"])])
        if peer:
            check(f"{LINES[at + 1][0]}, batch {batch}", peer, [float(row[other])])
    largest = [batch for batch, cell in zip(BATCHES, ours, strict=False) if cell][-1]
    check(f"{name}, bytes alone", ours[-1], [float(by_batch[largest]["floor_us"])])


def test_a_wrong_number_is_found():
    check("here", "3.9", [3.898])
    check("here", "1,284, 5", [1284.4, 4.6])
    for written, number in (("3.9", 3.84), ("85", 85.6), ("4.7x", 4.64)):
        with pytest.raises(AssertionError, match=re.escape(f"here: {written.rstrip('x')} in the README")):
            check("here", written, [number])
