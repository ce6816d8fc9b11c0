"""``benchmarks/targets.py``: every target is a row of a standard table, and its verdicts."""

import importlib
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from replayssm.bench import FAMILIES, Options

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module("targets")
    sys.modules.pop("targets")


def test_every_target_is_measured_by_the_standard_tables(script):
    lines = defaultdict(list)
    for name in FAMILIES:
        for case in importlib.import_module(f"replayssm.bench.{name}").cases(Options(device="cuda")):
            lines[case.table].append(vars(case.run.args[0]))
    for target in script.targets():
        for where in (target.where, target.where | target.over):
            assert sum(where.items() <= line.items() for line in lines[target.table]) == 1, target.work


def test_verdicts(script):
    Target = script.Target
    first = {"batch": 1, "us": 5.0, "cached_us": 4.5, "floor_us": 2.0, "their_us": 6.0, "state": "bf16"}
    rows = [first, first | {"us": 10.0, "cached_us": None, "state": "fp32"}]
    bf16, fp32 = {"state": "bf16"}, {"state": "fp32"}
    assert script.line(Target("t", "a", bf16, 5.0, peer="their_us"), rows) == ["a", "5", "5", "4.5", "2", "6", "met"]
    assert script.line(Target("t", "a", bf16, 4.6), rows)[-1] == "met from L2"
    assert script.line(Target("t", "a", bf16, 4.0), rows)[-1] == "missed by 12.5 %"
    assert script.line(Target("t", "a", fp32, 8.0), rows)[-1] == "missed by 25.0 %"
    assert script.line(Target("t", "a", bf16 | {"batch": 2}, 8.0), rows)[-1] == "not measured"
    ratio = script.line(Target("t", "a", fp32, 2.0, over=bf16), rows)
    assert ratio == ["a", "2", "2", "", "", "", "met"]
