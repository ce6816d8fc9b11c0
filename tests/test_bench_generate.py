"""``replayssm bench generate``: its rows, what it refuses, and that wrong tokens end it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from cli_models import fails, save_model

from replayssm.bench import GenerateOptions
from replayssm.cli import main

pytest.importorskip("transformers")
from replayssm.bench import generate, ways

pytestmark = pytest.mark.usefixtures("little_timing")
SHORT = ["--device", "cpu", "--prompt-tokens", "13", "--max-new-tokens", "9", "--repeats", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), seed=3)


def _rows(capsys, *arguments):
    assert main(["bench", "generate", *arguments, *SHORT, "--json"]) == 0
    ((name, rows),) = json.loads(capsys.readouterr().out)["tables"].items()
    assert name.startswith("generate-")
    return rows


def test_rows(capsys, model):
    rows = _rows(capsys, model, "--batch", "1,3")
    assert [(row["batch"], row["prompt"], row["written"]) for row in rows] == [(1, 13, 9), (3, 13, 9)]
    for row in rows:
        assert row["gap"] == 0.0 and row["same_drafts"] == row["same_transformers"] == 1.0
        speed = [row[f"{way} tokens/s"] for way in ("transformers", "replay", "look-up")]
        assert min(speed) > 0
        assert row["x transformers"] == pytest.approx(speed[2] / speed[0])
        assert row["x replay"] == pytest.approx(speed[2] / speed[1])
        assert 0 <= row["accepted"] <= 1 <= row["a round"]


def test_exact_decode_beside_the_rest(capsys, model):
    (row,) = _rows(capsys, model, "--batch", "3", "--exact")
    assert row["same_exact"] == row["same_drafts"] == 1.0
    for exact, without in (("exact", "replay"), ("exact look-up", "look-up")):
        speed, other = row[f"{exact} tokens/s"], row[f"{without} tokens/s"]
        assert speed > 0 and row[f"{exact} cost %"] == pytest.approx(100 * (1 - speed / other))


def test_exact_decode_whose_tokens_depend_on_drafts_is_an_error(capsys, monkeypatch, model):
    def other_tokens(model, input_ids, **options):
        result = ways.by_replay(model, input_ids, **options)
        result.ids[-1, -1] += "exact" in options and options["draft"] is not None
        return result

    monkeypatch.setattr(generate, "by_replay", other_tokens)
    monkeypatch.setattr(generate, "measure", lambda *_, **__: pytest.fail("timed"))
    words = "exact decode writes other tokens with drafts"
    fails(capsys, ["bench", "generate", model, "--exact", *SHORT], 1, words)


def test_the_rows_of_a_batch_are_different_texts(model):
    subject = generate._Subject(GenerateOptions(model=model, prompt_tokens=17))
    prompts = subject.prompts(5)
    assert prompts.shape == (5, 17) and len({tuple(row.tolist()) for row in prompts}) == 5


def test_a_shipped_model_goes_by_its_name():
    named, standard = (
        generate._Subject(GenerateOptions(model=name, prompt_tokens=7)) for name in ("tiny-mamba2", None)
    )
    assert named.name == standard.name and torch.equal(named.prompts(2), standard.prompts(2))


def test_weights_in_bfloat16_are_held_to_the_scores(capsys, model):
    (row,) = _rows(capsys, model, "--dtype", "bfloat16")
    assert 0 <= row["gap"] <= 0.5


def test_random_weights_of_a_published_size(capsys, monkeypatch):
    monkeypatch.setattr(generate, "RANDOM_MODELS", {"130m": (64, 1)})
    monkeypatch.setattr(generate, "_VOCABULARY", 97)
    (row,) = _rows(capsys, "--random", "130m", "--batch", "2")
    assert row["model"] == "random 130m" and row["batch"] == 2
    subject = generate._Subject(GenerateOptions(random="130m"))
    sides = subject.theirs, subject.ours, subject.exact  # exact decode in the chunks of the published models
    assert [m.chunk_size for side in sides for m in side.modules() if hasattr(m, "chunk_size")] == [32, 256, 256]
    assert torch.equal(subject.theirs.get_input_embeddings().weight, generate._Subject(
        GenerateOptions(random="130m")).theirs.get_input_embeddings().weight)  # fmt: skip


def _with_another_token(right, ways_changed):
    """``by_replay`` that gives another last token, with drafts or without."""

    def by_replay(model, input_ids, **options):
        result = right(model, input_ids, **options)
        if options["draft"] in ways_changed:
            result.ids[-1, -1] = (result.ids[-1, -1] + 1) % 256
        return result

    return by_replay


@pytest.mark.parametrize(("dtype", "words"), [("float32", "writes other tokens"), ("bfloat16", "standard deviations")])
def test_wrong_tokens_are_an_error(capsys, monkeypatch, model, dtype, words):
    monkeypatch.setattr(generate, "by_replay", _with_another_token(ways.by_replay, ("lookup",)))
    monkeypatch.setattr(generate, "_LARGEST_GAP", {"bfloat16": 1e-3})
    monkeypatch.setattr(generate, "measure", lambda *_, **__: pytest.fail("timed"))
    fails(capsys, ["bench", "generate", model, "--dtype", dtype, *SHORT], 1, words)


def test_transformers_may_be_stopped_early(capsys, model):
    (row,) = _rows(capsys, model, "--patience", "0")
    assert row["same_transformers"] == 1.0 and row["x decode"] is None and row["transformers tokens/s"] > 0


def test_wrong_use(capsys, model, tmp_path):
    fails(capsys, ["bench", "generate", "--random", "130m", model], 2, "--random: expected it alone")
    fails(capsys, ["bench", "generate", "--random", "9t"], 2, "invalid choice")
    fails(capsys, ["bench", "generate", "--max-new-tokens", "1"], 2, "expected an integer of at least 2")
    fails(capsys, ["bench", "generate", model, "--prompt-tokens", "10000000"], 2, "--prompt-tokens: at most")
    fails(capsys, ["bench", "generate", str(tmp_path)], 1, f"cannot load the tokenizer from '{tmp_path}'")


def test_ways_run_in_turn_and_their_medians_count():
    order = []

    def run(name, seconds):
        order.append(name)
        return ways.Generated(torch.zeros(2, 5), seconds, seconds / 4, None)

    times = iter([9.0, 9.0, 1.0, 2.0, 3.0, 2.0, 2.0, 2.0])
    both = [ways.Way(name, lambda name=name: run(name, next(times))) for name in ("a", "b")]
    ways.measure(both, 3)
    assert order == ["a", "b"] * 4
    assert both[0].tokens_per_second == 10 / 2.0 and both[0].decode_seconds == 1.5
    again = [replace(both[0], generate=lambda: run("c", 1.0), results=[])]
    ways.measure(again, 3, patience=-1.0)
    assert len(again[0].results) == 1


def test_a_picture_has_a_panel_per_model_of_several_batches():
    speeds = {"transformers": 2.0, "replay": 6.0, "look-up": 12.0}
    rows = [{"model": "m", "dtype": "float32", "batch": batch, **{f"{way} tokens/s": s for way, s in speeds.items()}}
            for batch in (1, 16)]  # fmt: skip
    (plot,) = generate.plots({"generate-m-float32": rows, "generate-n": [{**rows[0], "model": "n"}], "mamba": []})
    assert [panel.title for panel in plot.panels] == ["m, float32"]  # one batch is no picture
    drafted, plain = plot.panels[0].series
    assert list(drafted.x) == ["batch 1", "batch 16"] and list(drafted.y) == [6.0, 6.0] and list(plain.y) == [3.0, 3.0]
    exact = [row | {"exact tokens/s": 4.0, "exact look-up tokens/s": 10.0} for row in rows]
    (plot,) = generate.plots({"generate-m-float32": exact})
    assert [list(series.y) for series in plot.panels[0].series] == [[6.0] * 2, [3.0] * 2, [5.0] * 2, [2.0] * 2]
    assert generate.plots({}) == []
