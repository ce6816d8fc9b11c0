"""Tokens per second of the shipped models on one pinned CPU thread: transformers' own generate, and ours both ways.

``python benchmarks/generation.py`` runs each model's demo prompt and 20 held-out prompts, greedily. Every way must give
the same ids before anything is timed; timed runs are interleaved and the median counts. Speed is new tokens by the time
of the whole call, prompt included; "x decode" compares the time from the first new token to the last alone. Prints a
table for each model, compares the medians with the targets, and writes benchmarks/results/cpu/generation-MODEL.csv.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import replayssm.hf
import replayssm.models
from replayssm.bench import Row, Tables
from replayssm.bench.plot import Panel, Plot, Series
from replayssm.bench.report import conditions, table, write_csv
from replayssm.bench.timing import one_thread
from replayssm.bench.ways import Way, by_replay, by_transformers, measure
from replayssm.hf.drafts import MOST_LOOKUP_TOKENS

RESULTS = Path(__file__).parent / "results" / "cpu"
_TABLE = "generation-"  # a table, and a CSV file, per model
# The targets for look-up drafts: over transformers, and over replay without drafts.
TARGETS = {"tiny-mamba2": (4.0, 1.5), "tiny-gdn-hybrid": (3.0, 1.4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=replayssm.models.NAMES, help="this one alone")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--num-draft-tokens", type=int, default=MOST_LOOKUP_TOKENS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=20, help="held-out prompts beside the demo prompt")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for name in [options.model] if options.model else replayssm.models.NAMES:
        with one_thread(), torch.no_grad():
            facts, rows = conditions("cpu"), run(name, options)
        write_csv(RESULTS / f"{_TABLE}{name}.csv", rows, facts)
        report(name, rows, Console(width=160))
    return 0


def run(name: str, options: argparse.Namespace) -> list[Row]:
    """Measure one model on all prompts."""
    folder = replayssm.models.path(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # Two copies, so that ours is attached and transformers' untouched while the runs interleave.
    theirs, ours = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2))
    replayssm.hf.attach(ours)
    prompts = [replayssm.models.demo_prompt(name), *replayssm.models.heldout_prompts(name)[: options.prompts]]
    rows = []
    for number, prompt in enumerate(prompts):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        replay = partial(
            by_replay, ours, ids, num_draft_tokens=options.num_draft_tokens, max_new_tokens=options.new_tokens
        )
        ways = [
            Way("transformers", partial(by_transformers, theirs, ids, max_new_tokens=options.new_tokens)),
            Way("replay", partial(replay, draft=None)),
            Way("look-up", partial(replay, draft="lookup")),
        ]
        label = f"held-out {number}" if number else "demo"
        rows.append({"prompt": label, "read": ids.shape[1]} | row(label, ways, options.repeats))
        sys.stderr.write(f"\r{name}: {number + 1} of {len(prompts)} prompts")
    sys.stderr.write("\n")
    return rows


def row(label: str, ways: list[Way], repeats: int) -> Row:
    """Check that all ways agree, then time them in turn."""
    for way in ways:
        way.results = [way.generate()]
    expected = ways[1].results[0].ids
    for way in ways:
        if not torch.equal(way.results[0].ids, expected):
            raise SystemExit(f"{label}: {way.name} gives other ids than {ways[1].name}; nothing was timed")
    measure(ways, repeats, warm=True)
    speed = [way.tokens_per_second for way in ways]
    stats = ways[2].results[0].stats
    return {
        "written": expected.numel(),
        **{way.name: each for way, each in zip(ways, speed, strict=True)},
        "x transformers": speed[2] / speed[0],
        "x replay": speed[2] / speed[1],
        "x decode": ways[0].decode_seconds / ways[2].decode_seconds,
        "accepted": stats.accept_rate,
        "a round": (expected.numel() - 1) / max(stats.rounds, 1),
    }


def report(name: str, rows: list[Row], console: Console) -> None:
    """Print every row of a model, the medians, and how they stand against the targets."""
    middle = {
        key: statistics.median(row[key] for row in rows[1:]) if isinstance(value, float) and rows[1:] else None
        for key, value in rows[0].items()
    } | {"prompt": "median of those"}
    console.print(table(f"{name}: tokens/s on one CPU thread, greedy, float32", [*rows, middle]))
    for what, each in (("demo prompt", rows[0]), ("held-out, median", middle)):
        for key, target in zip(("x transformers", "x replay"), TARGETS[name], strict=True):
            if each[key] is not None:
                verdict = "reached" if each[key] >= target else "missed"
                console.print(f"{what}: {each[key]:.2f} {key}, target {target}: {verdict}")


def plots(tables: Tables) -> list[Plot]:
    """Speed of every prompt, in units of transformers' own generate, the slowest first; a panel per model."""
    panels = []
    for name in replayssm.models.NAMES:
        chosen = sorted(tables.get(f"{_TABLE}{name}", []), key=lambda row: row["x transformers"])
        places = [row["prompt"].replace("held-out ", "") for row in chosen]
        drafts = [row["x transformers"] for row in chosen]
        plain = [row["x transformers"] / row["x replay"] for row in chosen]
        series = [Series("look-up drafts", places, drafts, ours=True), Series("no drafts", places, plain)]
        if chosen:
            panels.append(Panel(name, series))
    if not panels:
        return []
    title = "Greedy generation of 256 tokens on one CPU thread"
    return [
        Plot("generation", title, "held-out prompt", "tokens/s over transformers", panels, "transformers", bars=True)
    ]


if __name__ == "__main__":
    sys.exit(main())
