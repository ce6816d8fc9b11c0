"""``replayssm bench exact``: what it measures, and that it compares bits before it times anything."""

import json
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch

from replayssm.batch_invariant_decode import BatchInvariantDecodeBuffers, batch_invariant_decode_buffered_scan
from replayssm.bench import WrongAnswer, exact_peers
from replayssm.bench import exact as family
from replayssm.bench.timing import Timer
from replayssm.cli import main
from replayssm.ssd import chunk_scan

TINY = ["bench", "exact", "--device", "cpu", "--quick", "--heads", "6", "--groups", "2", "--batch", "3"]


def test_tables(capsys):
    assert main([*TINY, "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert [(row["tokens"], row["mode"], row["batch"]) for row in tables["exact"]] == [(1, "mix", 3), (4, "mix", 3)]
    for row in (*tables["exact"], *tables["chunk_scan"]):
        assert row["us"] > row["floor_us"] > 0 and row["error"] == 0 and row["peers"] is None
    assert {row["sums_bytes"] for row in tables["exact"]} == {None}  # a CPU keeps none
    (scan,) = tables["chunk_scan"]
    assert scan["bytes"] == 4 * scan["length"] * (3 * 6 * 64 + 2 * 2 * 128 + 6)


def test_other_bits_are_never_timed(monkeypatch):
    scan = family.chunk_scan
    timer = Timer("cpu", quick=True)
    monkeypatch.setattr(timer, "micros", pytest.fail)
    monkeypatch.setattr(
        family, "chunk_scan", lambda *args, **named: torch.nextafter(scan(*args, **named), torch.ones(1))
    )
    with pytest.raises(WrongAnswer, match=r"1 token.*differ in their bits"):
        family._run_decode(family.Decode(4, 1, 16, 1, "mix", 2), False, timer)

    def in_pieces_only(*args, **named):
        out = scan(*args, **named)
        return out + 1 if "boundary_states" in named else out

    monkeypatch.setattr(family, "chunk_scan", in_pieces_only)
    with pytest.raises(WrongAnswer, match="two pieces and the whole"):
        family._run_scan(family.Scan(2, 1, 16, 64), False, timer)


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

    row = family._run_decode(family.Decode(2, 1, 16, 1, "chunk", 2), False, Stub())
    assert row["cached_us"] == 9.0
    family._run_decode(family.Decode(2, 1, 16, 1, "mix", 2), False, Stub())
    assert timed == [[32, 16], [2, 1]]


def test_a_picture_needs_a_batch_axis():
    row = {"heads": 16, "chunk": 128, "tokens": 1, "mode": "mix", "us": 6.0, "floor_us": 3.0, "plain_us": None}
    rows = [{**row, "batch": batch, "megatron_us": 9.0 if batch > 1 else None} for batch in (1, 16, 64, 256)]
    (plot,) = family.plots({"exact": rows})
    ours, megatron = plot.panels[0].series
    assert (ours.x, ours.y, ours.ours) == ([1, 16, 64, 256], [2.0] * 4, True)
    assert (megatron.x, megatron.y) == ([16, 64, 256], [3.0] * 3)
    assert family.plots({"exact": rows[:3]}) == []


def test_megatron_and_mamba_ssm_are_measured_where_they_are(monkeypatch):
    """Modules of their names and signatures, with ours behind them."""
    modules = {name: ModuleType(name) for name in (
        "megatron", "megatron.core", "megatron.core.ssm", "megatron.core.ssm.ops", "mamba_ssm", "mamba_ssm.ops",
        "mamba_ssm.ops.triton", "megatron.core.ssm.ops.batch_invariant_decode", "mamba_ssm.ops.triton.ssd_combined",
        *(f"megatron.core.ssm.ops.{beside}" for beside, _ in exact_peers._MEGATRON_TILES),
    )}  # fmt: skip
    for (beside, name), tile in exact_peers._MEGATRON_TILES.items():
        tiles = [SimpleNamespace(kwargs=kwargs) for kwargs in (dict.fromkeys(tile, 16), tile)]
        setattr(modules[f"megatron.core.ssm.ops.{beside}"], name, SimpleNamespace(configs=tiles))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    stepped, scanned = [], []

    def combined(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, dt_softplus=False):
        scanned.append(chunk_size)
        rows = {"x": x, "dt": dt, "B": B, "C": C, "z": z}
        return chunk_scan(**{n: v[0] for n, v in rows.items()}, A=A, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus,
                          chunk_size=chunk_size)  # fmt: skip

    def step(buffers, x, z, dt, B, C, A, D, dt_bias, batch_indices, ssm_state):
        stepped.append((buffers.num_buffered.tolist(), ssm_state))
        return batch_invariant_decode_buffered_scan(buffers, x, z, dt, B, C, A, D, dt_bias, batch_indices, ssm_state)

    megatron = modules["megatron.core.ssm.ops.batch_invariant_decode"]
    megatron.BatchInvariantDecodeBuffers, megatron.batch_invariant_decode_buffered_scan = (
        BatchInvariantDecodeBuffers, step,
    )  # fmt: skip
    modules["mamba_ssm.ops.triton.ssd_combined"].mamba_chunk_scan_combined = combined
    monkeypatch.setattr(exact_peers, "installed", lambda package, module: "9.9")
    monkeypatch.setattr(exact_peers, "_exists", lambda path: path in modules)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    timer, cpu = Timer("cpu", quick=True), torch.device("cpu")
    line = family.Decode(2, 1, 16, 1, "mix", 3)
    steps, live = [family._step_buffers(line, cpu) for _ in range(2)], family._live_rows(line)
    row = exact_peers.beside_decode(timer, True, (16, 2, 1, 3, 1), steps, live, 16)
    assert row["megatron_us"] > 0 and row["peers"] == "Megatron-Core 9.9, this run"
    for (beside, name), tile in exact_peers._MEGATRON_TILES.items():
        (config,) = getattr(modules[f"megatron.core.ssm.ops.{beside}"], name).configs
        assert config.kwargs == tile
    assert [rows for rows, _ in stepped[:2]] == [live.tolist()] * 2
    assert [id(state) for _, state in stepped[:6]] == [id(step["ssm_state"]) for step in steps * 3]  # in turn
    row = exact_peers.beside_scan(timer, True, (16, 2, 1, 40), family._inputs((40,), 2, 1, cpu))
    assert row["mamba_ssm_us"] > 0 and row["peers"] == "mamba_ssm 9.9, this run" and set(scanned) == {16}


def test_published_numbers_are_named_as_such(monkeypatch):
    card = "NVIDIA H200"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: card)
    monkeypatch.setattr(exact_peers, "installed", lambda package, module: pytest.fail("looked for"))
    scan = partial(exact_peers.beside_scan, None, False)
    decode = lambda sizes: exact_peers.beside_decode(None, False, sizes, [], torch.zeros(1), 1)  # noqa: E731
    both = "Megatron-Core, FlashInfer 0.7.4, another run on an H200"
    assert decode((128, 128, 8, 1, 1)) == {"megatron_us": 65.2, "plain_us": 5.6, "peers": both}
    assert decode((128, 16, 1, 16, 1))["peers"] == "Megatron-Core, another run on an H200"
    assert decode((128, 16, 1, 16, 4)) == {"megatron_us": None, "plain_us": None, "peers": None}
    assert scan((128, 64, 8, 8192), {}) == {"mamba_ssm_us": 365.0, "peers": "mamba_ssm, another run on an H200"}
    assert scan((128, 64, 1, 8192), {})["peers"] is None
    card = "NVIDIA A10"
    assert set(decode((128, 128, 8, 1, 1)).values()) == {None} == set(scan((128, 64, 8, 8192), {}).values())
