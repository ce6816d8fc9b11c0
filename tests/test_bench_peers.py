"""Other libraries beside ours in ``replayssm bench``: published or measured, and what happens when one crashes."""

import importlib
from dataclasses import replace

import pytest
import torch

from replayssm.bench import Options, WrongAnswer, flashinfer, report
from replayssm.bench import mamba as family
from replayssm.bench.apart import Apart
from replayssm.bench.timing import Timer
from replayssm.cli import bench as bench_command

pytestmark = pytest.mark.usefixtures("little_timing")
LINE = family.Step("bf16", 128, 8, 4, "mix", 32)


def test_published_numbers_are_named_as_such(monkeypatch):
    monkeypatch.setattr(flashinfer, "version", lambda: None)
    for card, expected in (
        ("NVIDIA H200", (38.0, 120.1, "FlashInfer 0.7.4, another run on an H200")),
        ("NVIDIA A10", (None,) * 3),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda card=card: card)
        assert tuple(family._step_peers(LINE, [], False, None).values()) == expected
        assert family._step_peers(replace(LINE, heads=16, groups=1), [], True, None)["peers"] is None


def test_peers_are_measured_where_they_are(monkeypatch):
    calls = []

    def call_on(name, buffers):
        return lambda: calls.append((name, buffers))

    monkeypatch.setattr(flashinfer, "version", lambda: "9.9")
    monkeypatch.setattr(flashinfer, "checkpointing_ssu", lambda buffers, algorithm: call_on(algorithm, buffers))
    monkeypatch.setattr(flashinfer, "selective_state_update", lambda buffers: call_on("plain", buffers))
    pools = [{"state_scale": None}, {"state_scale": None}]
    row = family._step_peers(LINE, pools, True, Timer("cpu", quick=True))
    assert row["flashinfer_us"] > 0 and row["plain_us"] > 0 and row["peers"] == "FlashInfer 9.9, this run"
    assert {name for name, _ in calls} == {"monolith", "two-kernel", "plain"}
    assert {id(buffers) for _, buffers in calls} == {id(pool) for pool in pools}  # in turn
    scaled = [{"state_scale": 1}]
    assert family._step_peers(LINE, scaled, True, Timer("cpu", quick=True))["plain_us"] is None


def test_a_peer_that_refuses_leaves_a_warning_and_what_was_published(monkeypatch):
    def refuses(buffers, algorithm="plain"):
        raise RuntimeError("at most 16 cache tokens")

    monkeypatch.setattr(flashinfer, "version", lambda: "9.9")
    monkeypatch.setattr(flashinfer, "checkpointing_ssu", refuses)
    monkeypatch.setattr(flashinfer, "selective_state_update", refuses)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    with pytest.warns(UserWarning, match="not timed: at most 16 cache tokens"):
        row = family._step_peers(LINE, [{"state_scale": None}], True, Timer("cpu", quick=True))
    assert row["flashinfer_us"] == 38.0 and row["peers"] == flashinfer.PUBLISHED


FAKE_FAMILY = """
__name__ = "replayssm.fake"  # its warnings are shown
import os, signal, warnings
from functools import partial
from replayssm.bench import Case, WrongAnswer

def run(number, peers, timer):
    assert timer.ceiling == 7.0
    if not peers:
        return {"number": number, "us": 1.0, "peers": None}
    print("a compiler says something")
    if number in (1, 4, 5, 6):
        os.kill(os.getpid(), signal.SIGSEGV if number == 1 else signal.SIGABRT)
    if number == 2:
        warnings.warn("a peer refused")
    return {"number": number, "us": 2.0, "peers": f"process {os.getpid()}"}

def cases(options):
    return [Case("t", f"case {number}", partial(run, number, options.peers)) for number in range(options.tokens[0])]
"""


def test_a_peer_that_crashes_takes_no_row_with_it(capfd, monkeypatch, tmp_path):
    """And when three in turn have crashed, the rest is left as it was."""
    (tmp_path / "fake_family.py").write_text(FAKE_FAMILY)
    monkeypatch.syspath_prepend(tmp_path)
    fake, timer = importlib.import_module("fake_family"), Timer("cpu", quick=True, ceiling=7.0)
    asked = Options(quick=True, peers=True, tokens=[8])
    cases = fake.cases(replace(asked, peers=False))
    ours = bench_command.measure(cases, timer, {}, tmp_path, {})
    with pytest.warns(UserWarning) as warned:
        rows = bench_command._with_peers("fake_family", asked, cases, timer, {}, tmp_path, ours)["t"]
    died = "no numbers beside ours, the process died"
    assert [str(warning.message) for warning in warned] == [
        f"case 1: {died} (SIGSEGV)", "a peer refused", *(f"case {number}: {died} (SIGABRT)" for number in (4, 5, 6)),
        "other libraries are left out of the rest",
    ]  # fmt: skip
    assert [row["number"] for row in rows] == list(range(8))
    assert [row["us"] for row in rows] == [2.0, 1.0, 2.0, 2.0, *[1.0] * 4]
    first, none, second, third = (row["peers"] for row in rows[:4])
    assert none is None and second == third != first  # one process until it dies, then another one
    assert report.read_csv(tmp_path / "t.csv")[1] == rows
    assert "a compiler says something" not in capfd.readouterr().out


def test_what_a_case_raises_apart_is_raised_here(monkeypatch, tmp_path):
    (tmp_path / "raising_family.py").write_text(
        FAKE_FAMILY.replace("if number == 2:", "if number == 2:\n        raise WrongAnswer('wrong')")
    )
    monkeypatch.syspath_prepend(tmp_path)
    with Apart("raising_family", Options(peers=True, tokens=[3])) as apart:
        timer = Timer("cpu", quick=True, ceiling=7.0)
        with pytest.raises(WrongAnswer, match=r"^wrong$"):
            apart.run(2, timer)
        assert apart.run(0, timer)["number"] == 0


def test_no_peer_is_imported_unless_asked_for(monkeypatch):
    monkeypatch.setattr(flashinfer, "version", lambda: pytest.fail("looked for"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert Options().peers is False
    assert family._step_peers(LINE, [], False, None)["peers"] == flashinfer.PUBLISHED


def test_what_flashinfer_took_for_materialize():
    assert flashinfer.published_materialize("bf16", 8, 16, 128, 24) == 492.6
    assert flashinfer.published_materialize("bf16", 0, 16, 128, 24) is None
