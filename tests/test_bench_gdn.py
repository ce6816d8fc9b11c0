"""``replayssm bench gdn``: bytes and answers of its cases, and that wrong answers are not timed."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from replayssm.bench import Options, gdn_buffers, gdn_peers
from replayssm.bench import gdn as family
from replayssm.bench import plot as plot_module
from replayssm.bench.timing import Timer
from replayssm.cli import main

TINY = ["bench", "gdn", "--device", "cpu", "--quick", "--heads", "6", "--groups", "2", "--batch", "5"]
pytestmark = pytest.mark.usefixtures("little_timing")
COMMON = ("us", "bytes", "floor_us", "of_ceiling", "error")


def _tables(capsys, *arguments):
    assert main([*TINY, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["tables"]


def test_every_op_is_checked_and_timed(capsys):
    tables = _tables(capsys, "--tokens", "2")
    assert {(row["mode"], row["backend"]) for row in tables["gdn"]} == {
        (mode, backend) for mode in ("frozen", "windows") for backend in ("simt", "tensor_core")
    }
    assert {row["way"] for row in tables["gdn_decode"]} == {"update", "lazy"}
    assert {row["accepted"] for row in tables["gdn_commit"]} == {1, 8}
    for rows in tables.values():
        assert len({tuple(row) for row in rows}) == 1
        for row in rows:
            assert all(row[column] > 0 for column in COMMON), row
            assert row["of_ceiling"] == pytest.approx(row["floor_us"] / row["us"])
            assert (row["state"], row["heads"], row["keys"], row["batch"]) == ("fp32", 6, 2, 5)


@pytest.mark.parametrize("state", ["bf16", "fp16"])
def test_states_of_16_bits(capsys, state):
    tables = _tables(capsys, "--state-dtype", state, "--tokens", "3")
    assert {row["state"] for rows in tables.values() for row in rows} == {state}


def test_bytes():
    state = 6 * 128 * 128 * 4
    assert gdn_buffers.state_bytes("fp32", 6) == state
    assert gdn_buffers.token_bytes(6, 2, 2) == 2 * (2 * 2 * 128 + 2 * 6 * 128 + 2 * 6)  # q, k; v, out; a, b
    assert gdn_buffers.record_bytes(6, 2, 2) == 2 * (2 * 128 + 6 * 128) + 2 * 4 * 6  # k, v; g, beta


def test_bytes_of_a_cycle(capsys):
    """Window 16, 4 tokens a step: 4, 8, 12, 16 live rows, the last of which are folded."""
    (row,) = _tables(capsys, "--op", "lazy", "--tokens", "4")["gdn_decode"]
    state, record = gdn_buffers.state_bytes("fp32", 6), gdn_buffers.record_bytes(6, 2, 4)
    assert row["bytes"] == 5 * (state * 5 / 4 + 4 * gdn_buffers.token_bytes(6, 2, 4) + 10 * record + 4 * record)


@pytest.mark.parametrize("tokens", [1, 3, 4, 16])
def test_a_cycle_flushes_every_request_once(tokens):
    steps = gdn_buffers.lazy_cycle(tokens)
    live = torch.stack([gdn_buffers.lazy_cursors(7, tokens, phase) for phase in range(steps)])
    assert ((live + tokens > gdn_buffers.WINDOW).sum(0) == 1).all()
    assert (live >= 1).all() and (live <= gdn_buffers.WINDOW).all()


@pytest.mark.parametrize("mode", ["frozen", "windows", "update"])
def test_buffers_are_those_of_the_mode(mode):
    made = gdn_buffers.mtp_buffers(3, 6, 2, 4, "fp32", mode, torch.device("cpu"))
    assert made["disable_state_update"] == (mode != "update")
    assert ("replayssm_rawv" in made) == (mode == "windows")


@pytest.mark.parametrize(
    ("op", "function", "written"),
    [
        ("verify", "gated_delta_rule_mtp", "output"),
        ("verify", "gated_delta_rule_mtp", "replayssm_rawk"),
        ("update", "gated_delta_rule_mtp", "initial_state"),
        ("commit", "gated_delta_rule_replayssm_commit", "checkpoint_state"),
        ("lazy", "gated_delta_rule_checkpointing", "output"),
        ("lazy", "gated_delta_rule_checkpointing", "g_cache"),
    ],
)
def test_a_wrong_answer_is_an_error_and_not_timed(capsys, monkeypatch, op, function, written):
    right, calls = getattr(gdn_buffers, function), []

    def spoils(**arguments):
        right(**arguments)
        calls.append(arguments)
        if len(calls) == 2:  # the first one is the reference's
            arguments[written] += 1000

    monkeypatch.setattr(gdn_buffers, function, spoils)
    monkeypatch.setattr(family, function, lambda **arguments: pytest.fail("timed"))
    mode = ["--mode", "windows"] if op == "verify" else []
    assert main([*TINY, "--op", op, *mode]) == 1
    assert "relative error" in capsys.readouterr().err


def test_the_standard_table_has_the_cases_of_the_targets():
    labels = {case.label for case in family.cases(Options(device="cuda"))}
    for batch in (1, 16, 64, 256):
        for tokens in (4, 8):
            for mode in ("frozen", "windows"):
                assert (
                    f"fp32 state, 32/16 heads, verify {tokens} token(s), {mode}, tensor_core, batch {batch}" in labels
                )
        assert f"fp32 state, 32/16 heads, lazy, 1 token(s), batch {batch}" in labels
    for accepted in (1, 8):
        assert f"fp32 state, 32/16 heads, commit {accepted} token(s), batch 64" in labels


def test_published_numbers_are_of_their_sizes():
    verify = {"flashinfer_frozen_us": 617.3, "flashinfer_snapshots_us": 1347.0, "fla_us": 600.8}
    assert gdn_peers.published_mtp(32, 16, 8, 256) == verify
    assert gdn_peers.published_update(32, 16, 64) == {"flashinfer_update_us": 68.8, "fla_us": 69.9}
    assert set(gdn_peers.published_mtp(32, 16, 8, 32).values()) == {None}
    assert set(gdn_peers.published_mtp(32, 8, 8, 1).values()) == {None}


def test_peers_are_measured_or_published(monkeypatch):
    def refuses():
        raise ValueError("no such shape")

    timer, calls = Timer("cpu", quick=True), []
    calls_of = {
        "flashinfer_frozen_us": ("flashinfer-python", lambda: [lambda: partial(calls.append, 1)]),
        "flashinfer_snapshots_us": ("flashinfer-python", lambda: [refuses]),
        "fla_us": ("fla-core", lambda: pytest.fail("it is not here")),
    }
    here = {"flashinfer-python": "9.9", "fla-core": None}
    monkeypatch.setattr(gdn_peers, "installed", lambda package, module: here[package])
    known = gdn_peers.published_mtp(32, 16, 8, 256)
    with pytest.warns(UserWarning, match="flashinfer-python was not timed: no such shape"):
        row = gdn_peers.beside(timer, True, calls_of, known)
    assert row["flashinfer_frozen_us"] > 0 and calls and row["peers"] == "flashinfer-python 9.9, this run"
    assert row["flashinfer_snapshots_us"] is None and row["fla_us"] is None
    for card, expected in (("NVIDIA H200", known | {"peers": gdn_peers.PUBLISHED}), ("NVIDIA A10", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda card=card: card)
        row = gdn_peers.beside(timer, False, calls_of, known)
        assert row == (expected or dict.fromkeys((*known, "peers")))


def test_a_picture_of_four_batches():
    rows = []
    for batch in (1, 16, 64, 256):
        for backend in ("simt", "tensor_core"):
            rows.append({
                "state": "fp32", "heads": 32, "tokens": 8, "mode": "frozen", "backend": backend, "batch": batch,
                "us": 20.0, "floor_us": 10.0, "flashinfer_frozen_us": 30.0, "fla_us": None,
            })  # fmt: skip
    (plot,) = family.plots({"gdn": rows})
    (panel,) = plot.panels
    assert [(series.label, list(series.y)) for series in panel.series] == [
        ("replayssm, tensor_core", [2.0] * 4), ("replayssm, simt", [2.0] * 4), ("FlashInfer", [3.0] * 4),
    ]  # fmt: skip
    colours = plot_module._colours(plot)
    assert len(set(colours.values())) == 3 and colours["FlashInfer"] in plot_module._PEERS
    (plot,) = family.plots({"gdn": [row for row in rows if row["backend"] == "tensor_core"]})
    assert [series.label for series in plot.panels[0].series] == ["replayssm, tensor_core", "FlashInfer"]
    assert family.plots({}) == []
