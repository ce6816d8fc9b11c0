"""``replayssm bench``: bytes and answers of its cases, what it writes, and how it fails."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass

import pytest
import torch
from cli_models import fails

from replayssm.bench import FAMILIES, BadOption, Options, WrongAnswer, mamba_buffers, report, vary
from replayssm.bench import mamba as family
from replayssm.bench.plot import Panel, Plot, Series, draw
from replayssm.bench.timing import Timer, interleaved_time, one_thread, verify
from replayssm.cli import main

TINY = ["bench", "mamba", "--device", "cpu", "--quick", "--heads", "6", "--groups", "2", "--state-dtype", "fp32"]
pytestmark = pytest.mark.usefixtures("little_timing")
COMMON = ("us", "bytes", "floor_us", "of_ceiling", "error")


def _rows(capsys, *arguments):
    assert main([*TINY, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["tables"]


def test_the_bytes_of_a_step():
    """Six heads, two groups, three tokens, fp32: one request folds 16 rows, one replays 5."""
    live = torch.tensor([16, 5])
    state = 6 * 64 * 128 * 4
    rows = 21 * (6 * (64 * 4 + 4) + 2 * 128 * 4)
    token = 6 * (3 * 64 * 4 + 4 + 4) + 2 * 3 * 128 * 4  # x, out, row of x; dt, row of dt; B, C, row of B
    assert mamba_buffers.step_bytes(6, 2, 3, "fp32", live, 4) == 3 * state + rows + 2 * 3 * token


def test_the_bytes_of_a_state_with_scales():
    assert mamba_buffers.state_bytes("int8", 3) == 3 * 64 * (128 + 4)
    assert mamba_buffers.state_bytes("bf16", 3) == 3 * 64 * 128 * 2


@pytest.mark.parametrize("mode", ["hold", "mix", "flush"])
def test_buffers_have_the_live_rows_of_their_mode(mode):
    live = mamba_buffers.live_rows(mode, 19)
    buffers = mamba_buffers.step_buffers(19, 2, 1, 4, "bf16", live)
    assert torch.equal(buffers["prev_num_accepted_tokens"][buffers["state_batch_indices"].long()], live.int())
    assert live.tolist() == {"hold": [8] * 19, "mix": [*range(17), 0, 1], "flush": [16] * 19}[mode]


@pytest.mark.parametrize("state", list(mamba_buffers.DTYPES))
def test_every_state_type_is_checked_and_timed(capsys, state):
    tables = _rows(capsys, "--state-dtype", state, "--batch", "5", "--tokens", "3")
    (step, *_), (materialize, *_) = tables["mamba"], tables["materialize"]
    for row in (step, materialize):
        assert all(row[column] >= 0 for column in COMMON) and row["us"] > 0
        assert row["of_ceiling"] == pytest.approx(row["floor_us"] / row["us"])
        assert (row["state"], row["heads"], row["groups"], row["batch"]) == (state, 6, 2, 5)
    assert {row["mode"] for row in tables["mamba"]} == {"hold", "mix", "flush"}
    assert {row["prefix"] for row in tables["materialize"]} == {0, 8}
    assert (step["plain_us"] is None) == (state in ("int8", "fp8"))


@pytest.mark.parametrize(("tokens", "state"), [(1, "fp32"), (3, "fp32"), (3, "bf16")])
def test_the_ordinary_step_computes_what_a_step_does(tokens, state):
    live = torch.zeros(5, dtype=torch.int64)
    buffers = mamba_buffers.step_buffers(5, 6, 2, tokens, state, live)
    expected = family.checkpointing_ssu(**{**buffers, "out": None})
    verify("ordinary step", mamba_buffers.ordinary_step(buffers)(), expected, 1e-6)


@pytest.mark.parametrize("name", ["out", "state", "dt_cache", "x_cache"])
def test_a_wrong_step_is_an_error_and_not_timed(capsys, monkeypatch, name):
    right, calls = mamba_buffers.checkpointing_ssu, []

    def spoils(**arguments):
        right(**arguments)
        calls.append(arguments)
        if len(calls) == 2:  # the first one is the reference's
            arguments[name].view(-1)[-1] += 1000

    monkeypatch.setattr(mamba_buffers, "checkpointing_ssu", spoils)
    monkeypatch.setattr(family, "checkpointing_ssu", lambda **arguments: pytest.fail("timed"))
    fails(capsys, [*TINY, "--op", "step", "--mode", "flush"], 1, "relative error", "flush, batch 1")


def test_a_wrong_materialize_is_an_error(capsys, monkeypatch):
    right, calls = mamba_buffers.replayssm_materialize, []

    def forgets(*tables, **options):
        calls.append(tables)
        if len(calls) % 2 == 0:  # the reference does its work, the op none
            right(*tables, **options)

    monkeypatch.setattr(mamba_buffers, "replayssm_materialize", forgets)
    fails(capsys, [*TINY, "--op", "materialize"], 1, "materialize, prefix 0", "relative error")


def test_verify_refuses_what_is_no_number():
    with pytest.raises(WrongAnswer, match="a: relative error nan"):
        verify("a", torch.tensor([1.0, torch.nan]), torch.ones(2), 1.0)
    assert verify("a", torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]), 0.2) == pytest.approx(0.1)


def test_options_replace_the_values_of_the_standard_table():
    cases = family.cases(Options(ops=["step"], batches=[3, 512], state_dtypes=["int8"], modes=["mix"]))
    labels = [case.label for case in cases]
    assert len(set(labels)) == len(labels) == 2 * 2
    assert labels[0] == "int8 state, 16/1 heads, 1 token(s), mix, batch 3"
    standard = {case.label for case in family.cases(Options(device="cuda"))}
    for batch in (1, 8, 16, 32, 64, 128, 256, 512):
        for tokens in (1, 4, 8):
            assert f"fp32 state, 128/8 heads, {tokens} token(s), mix, batch {batch}" in standard
    for prefix in (0, 1, 8, 16):
        assert f"bf16 state, 128/8 heads, materialize, prefix {prefix}, batch 64" in standard


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_family_has_a_standard_table_and_a_shorter_one(name, device):
    module, offered = importlib.import_module(f"replayssm.bench.{name}"), FAMILIES[name]
    full, quick = (module.cases(Options(device=device, quick=quick)) for quick in (False, True))
    assert 0 < len(quick) <= len(full)
    labels = [(case.table, case.label) for case in full]
    assert len(set(labels)) == len(labels)
    for op in offered.ops:
        part = module.cases(Options(device=device, ops=[op]))
        assert len(part) > 0 and {(case.table, case.label) for case in part} <= set(labels)
    assert module.plots({}) == []


def test_vary_keeps_the_order_and_drops_doubles():
    @dataclass(frozen=True)
    class Line:
        a: int
        b: str

    lines = [Line(1, "x"), Line(2, "x"), Line(1, "y")]
    assert vary(lines, a=[3], b=None) == [Line(3, "x"), Line(3, "y")]
    assert vary(lines[:1], a=[5, 4]) == [Line(5, "x"), Line(4, "x")]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mamba", Options(heads=(6,), groups=(4,)), "6 heads cannot share 4 groups evenly"),
        ("mamba", Options(tokens=(17,)), "at most 16 tokens"),
        ("gdn", Options(heads=(6,), groups=(4,)), "6 value heads cannot share 4 key heads"),
        ("gdn", Options(tokens=(17,)), "at most 16 tokens"),
        ("exact", Options(heads=(6,), groups=(4,)), "6 heads cannot share 4 groups evenly"),
        ("exact", Options(tokens=(65,), quick=True), "at most 64 tokens, a chunk"),
        ("exact", Options(tokens=(4,), modes=("chunk",)), "mode chunk commits every token"),
    ],
)
def test_options_that_cannot_be_measured(name, options, message):
    with pytest.raises(BadOption, match=message):
        importlib.import_module(f"replayssm.bench.{name}").cases(options)


@pytest.mark.parametrize(
    ("arguments", "code", "fragment"),
    [
        (["bench"], 2, "FAMILY"),
        (["bench", "mambo"], 2, "invalid choice: 'mambo'"),
        (["bench", "mamba", "--heds", "4"], 2, "unrecognized arguments: --heds 4 (see replayssm bench mamba --help)"),
        (["bench", "mamba", "--mode", "hold,held"], 2, "expected some of hold, mix, flush, got 'held'"),
        (["bench", "mamba", "--state-dtype", "int4"], 2, "got 'int4'"),
        (["bench", "mamba", "--batch", "4,x"], 2, "expected an integer of at least 1, got 'x'"),
        (["bench", "mamba", "--device", "abacus"], 2, "expected 'cpu' or 'cuda', got 'abacus'"),
        ([*TINY, "--groups", "4"], 2, "6 heads cannot share 4 groups evenly"),
        ([*TINY, "--plot"], 2, "--plot needs --output"),
        ([*TINY, "--peers"], 2, "--peers needs a CUDA device"),
        ([*TINY, "--output", __file__], 1, "cannot make the folder"),
    ],
)
def test_wrong_use_is_one_line(capsys, arguments, code, fragment):
    fails(capsys, arguments, code, fragment)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_missing_device_is_named(capsys):
    fails(capsys, ["bench", "mamba", "--device", "cuda"], 1, "no CUDA device")


def test_pictures_without_matplotlib_are_refused_at_once(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("replayssm.cli.bench.find_spec", lambda name: None)
    fails(capsys, [*TINY, "--plot", "--output", str(tmp_path)], 1, "pip install 'replayssm[bench]'")


def test_csv_files_read_back_and_name_their_conditions(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv(report.COMMIT, "abc1234")
    folder = tmp_path / "new" / "folder"
    assert main([*TINY, "--output", str(folder), "--json"]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert data["family"] == "mamba" and data["conditions"]["commit"] == "abc1234"
    assert set(data["conditions"]) >= {"replayssm", "date", "device", "python", "torch", "triton", "copy ceiling"}
    for name, rows in data["tables"].items():
        facts, read = report.read_csv(folder / f"{name}.csv")
        assert facts == data["conditions"]
        assert [list(row) for row in read] == [list(row) for row in rows]
        for row, expected in zip(read, rows, strict=True):
            assert row == {k: pytest.approx(v, rel=1e-3) if isinstance(v, float) else v for k, v in expected.items()}
        assert f"written: {folder / f'{name}.csv'}" in err
    assert "1 of " in err  # progress


def test_an_interrupted_run_leaves_the_rows_that_it_measured(capsys, monkeypatch, tmp_path):
    right, calls = family._run_step, []

    def interrupted(line, peers, timer):
        calls.append(line)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return right(line, peers, timer)

    monkeypatch.setattr(family, "_run_step", interrupted)
    assert main([*TINY, "--output", str(tmp_path)]) == 130
    assert len(report.read_csv(tmp_path / "mamba.csv")[1]) == 2


def test_tables_without_a_curve_are_named(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert main([*TINY, "--op", "materialize", "--plot", "--output", str(tmp_path)]) == 0
    assert "no picture" in capsys.readouterr().err and not list(tmp_path.glob("*.png"))


def test_the_commit_of_a_copy_without_repository_is_unknown(monkeypatch, tmp_path):
    monkeypatch.delenv(report.COMMIT, raising=False)
    monkeypatch.setattr(report, "_PACKAGE", tmp_path)
    assert report.commit() == "unknown"


def test_the_table_in_a_pipe_is_whole(capsys):
    assert main([*TINY, "--op", "step"]) == 0
    out = capsys.readouterr().out
    assert "copy ceiling" in out and "…" not in out
    assert "mamba: state fp32, heads 6, groups 2, batch 1, peers torch operations, this run" in out


def test_what_all_rows_share_stands_in_the_title():
    rows = [{"a": 1, "b": "x", "c": None, "d": 2.5}, {"a": 1, "b": "y", "c": None, "d": None}]
    title, table = report.table("t", rows).renderables
    assert title.plain == "t: a 1" and [column.header for column in table.columns] == ["b", "d"]
    assert [list(column.cells) for column in table.columns] == [["x", "y"], ["2.5", ""]]
    title, table = report.table("t", rows[:1]).renderables
    assert title.plain == "t" and [list(column.cells) for column in table.columns] == [
        list("abcd"),
        ["1", "x", "", "2.5"],
    ]


def test_a_picture_of_the_steps(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        {"state": "bf16", "heads": 6, "tokens": 1, "mode": "mix", "batch": batch, "us": 3.0 * batch, "floor_us": batch,
         "flashinfer_us": None if batch == 2 else 4.0 * batch, "plain_us": None}
        for batch in (2, 1, 16, 8)
    ]  # fmt: skip
    (plot,) = family.plots({"mamba": rows})
    ours, theirs = plot.panels[0].series
    assert (ours.x, ours.y) == ([1, 2, 8, 16], [3.0] * 4)
    assert (theirs.x, theirs.y) == ([1, 8, 16], [4.0] * 3)
    assert draw(plot, tmp_path).read_bytes().startswith(b"\x89PNG")
    assert family.plots({"mamba": rows[:3]}) == []  # too few batches for a curve
    bars = Plot("bars", "", "", "", [Panel("", [Series("a", ["x", "y"], [1.0, 2.0], ours=True)])], bars=True)
    assert draw(bars, tmp_path).stat().st_size > 1000


def test_buffers_outlast_the_cache_and_a_few_of_a_small_batch_do_not(monkeypatch):
    class Card:
        L2_cache_size = 60 << 20

    timer = Timer("cpu", quick=True)
    monkeypatch.setattr("replayssm.bench.timing._MOST_SETS", {"cuda": 512})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card)
    assert timer.cached_sets(1) == 0  # a CPU
    timer.device, timer._quick = torch.device("cuda"), False
    for size in (4e5, 2e6, 4e6, 1e9):
        assert timer.sets(size) * size > 3 * Card.L2_cache_size
    assert [timer.cached_sets(size) for size in (2e6, 4e6)] == [16, 0]


def test_ways_are_timed_in_turn():
    order = []
    times = interleaved_time({"a": [lambda: order.append("a")], "b": [lambda: order.append("b")]}, 0.0)
    assert set(times) == {"a", "b"} and order == ["a", "b"] * 4  # once to warm up, three rounds


def test_threads_are_given_back():
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
