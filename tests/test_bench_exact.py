"""``replayssm bench exact``: what it measures, and that it compares bits before it times anything."""

import json

import pytest
import torch

from replayssm.bench import BadOption, Options, WrongAnswer
from replayssm.bench import exact as family
from replayssm.bench.timing import Timer
from replayssm.cli import main

TINY = ["bench", "exact", "--device", "cpu", "--quick", "--heads", "6", "--groups", "2", "--batch", "3"]


def test_tables(capsys):
    assert main([*TINY, "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert [(row["tokens"], row["mode"], row["batch"]) for row in tables["exact"]] == [(1, "mix", 3), (4, "mix", 3)]
    for row in (*tables["exact"], *tables["chunk_scan"]):
        assert row["us"] > row["floor_us"] > 0 and row["error"] == 0 and row["peers"] is None
    (scan,) = tables["chunk_scan"]
    assert scan["bytes"] == 4 * scan["length"] * (3 * 6 * 64 + 2 * 2 * 128 + 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(heads=(6,), groups=(4,)), "6 heads cannot share 4 groups evenly"),
        (Options(tokens=(65,), quick=True), "at most 64 tokens, a chunk"),
        (Options(tokens=(4,), modes=("chunk",)), "mode chunk commits every token"),
    ],
)
def test_options_that_cannot_be_measured(options, message):
    with pytest.raises(BadOption, match=message):
        family.cases(options)


def test_other_bits_are_never_timed(monkeypatch):
    scan = family.chunk_scan
    timer = Timer("cpu", quick=True)
    monkeypatch.setattr(timer, "micros", pytest.fail)
    monkeypatch.setattr(
        family, "chunk_scan", lambda *args, **named: torch.nextafter(scan(*args, **named), torch.ones(1))
    )
    with pytest.raises(WrongAnswer, match=r"1 token.*differ in their bits"):
        family._run_decode(family.Decode(4, 1, 16, 1, "mix", 2), timer)

    def in_pieces_only(*args, **named):
        out = scan(*args, **named)
        return out + 1 if "boundary_states" in named else out

    monkeypatch.setattr(family, "chunk_scan", in_pieces_only)
    with pytest.raises(WrongAnswer, match="two pieces and the whole"):
        family._run_scan(family.Scan(2, 1, 16, 64), timer)


def test_bytes_of_a_step():
    line = family.Decode(heads=4, groups=2, chunk=16, tokens=1, mode="mix", batch=8)
    live = family._live_rows(line)
    assert live.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    state, row, token = 4 * 64 * 128 * 4, 2 * (4 * 64 + 2 * 128 + 4), 2 * (3 * 4 * 64 + 2 * 2 * 128 + 4)
    # half a lane folds: it writes its state and reads its chunk's rows
    assert family._step_bytes(line, live, 2) == 8 * (state + token + row) + 56 * row + (state + 16 * row) // 2
    verify = family.Decode(heads=4, groups=2, chunk=16, tokens=3, mode="mix", batch=1)
    assert family._live_rows(verify).tolist() == [7]
    assert family._step_bytes(verify, torch.tensor([7]), 2) == state + 3 * (token + row) + 7 * row


def test_the_steps_of_a_chunk_are_timed_together():
    timed = []

    class Stub:
        device, ceiling = torch.device("cpu"), 1e4

        def sets(self, size):
            return 2

        def cached_sets(self, size):
            return 1

        def micros(self, ways):
            timed.append([len(calls) for calls in ways.values()])
            return dict.fromkeys(ways, 9.0)

    row = family._run_decode(family.Decode(2, 1, 16, 1, "chunk", 2), Stub())
    assert row["cached_us"] == 9.0
    family._run_decode(family.Decode(2, 1, 16, 1, "mix", 2), Stub())
    assert timed == [[32, 16], [2, 1]]


def test_a_picture_needs_a_batch_axis():
    row = {"heads": 16, "chunk": 128, "tokens": 1, "mode": "mix", "us": 6.0, "floor_us": 3.0, "plain_us": None}
    rows = [{**row, "batch": batch, "megatron_us": 9.0 if batch > 1 else None} for batch in (1, 16, 64, 256)]
    (plot,) = family.plots({"exact": rows})
    ours, megatron = plot.panels[0].series
    assert (ours.x, ours.y, ours.ours) == ([1, 16, 64, 256], [2.0] * 4, True)
    assert (megatron.x, megatron.y) == ([16, 64, 256], [3.0] * 3)
    assert family.plots({"exact": rows[:3]}) == []
