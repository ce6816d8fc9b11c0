"""Tokens per second of the shipped models on one pinned CPU thread: transformers' own generate, and ours both ways.

``python benchmarks/generation.py`` runs each model's demo prompt and 20 held-out prompts, greedily. Every way must give
the same ids before anything is timed; timed runs are interleaved and the median counts. Speed is new tokens by the time
of the whole call, prompt included; "x decode" compares the time from the first new token to the last alone. Prints a
table for each model, compares the medians with the targets, and writes benchmarks/results/cpu/generation.csv.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from results import pin_to_one_core, write_csv
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import replayssm.hf
import replayssm.models
from replayssm.cli.stream import Clock
from replayssm.hf.drafts import MOST_LOOKUP_TOKENS

# The targets for look-up drafts: over transformers, and over replay without drafts.
TARGETS = {"tiny-mamba2": (4.0, 1.5), "tiny-gdn-hybrid": (3.0, 1.4)}
WAYS = ("transformers", "replay", "look-up")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--num-draft-tokens", type=int, default=MOST_LOOKUP_TOKENS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=20, help="held-out prompts beside the demo prompt")
    options = parser.parse_args()
    pin_to_one_core()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_grad_enabled(False)

    rows = [row for name in replayssm.models.NAMES for row in run(name, options)]
    path = write_csv("generation.csv", rows)
    for name in replayssm.models.NAMES:
        report(name, [row for row in rows if row["model"] == name], Console(width=140))
    print(f"written to {path.relative_to(path.parents[3])}")
    return 0


def run(name: str, options: argparse.Namespace) -> list[dict[str, object]]:
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
        label = f"held-out {number}" if number else "demo"
        rows.append({"model": name} | measure(label, ids, ways(theirs, ours, ids, options), options.repeats))
        sys.stderr.write(f"\r{name}: {number + 1} of {len(prompts)} prompts")
    sys.stderr.write("\n")
    return rows


def ways(theirs, ours, ids: torch.Tensor, options: argparse.Namespace) -> dict[str, Callable]:
    """Return the three ways to continue ``ids``; each takes a clock and gives ids and our statistics, or None."""
    count = options.new_tokens

    def replay(draft: str | None, clock: Clock):
        drafts = options.num_draft_tokens
        return replayssm.hf.generate(
            ours,
            ids,
            draft=draft,
            num_draft_tokens=drafts,
            max_new_tokens=count,
            streamer=clock,
            return_stats=True,
        )

    def transformers(clock: Clock):
        mask = torch.ones_like(ids)
        return theirs.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, streamer=clock), None

    return dict(zip(WAYS, (transformers, partial(replay, None), partial(replay, "lookup")), strict=True))


def measure(name: str, ids: torch.Tensor, calls: dict[str, Callable], repeats: int) -> dict[str, object]:
    """Check that all ways agree, then time them in turn; return one row of the table."""
    results = {way: call(Clock()) for way, call in calls.items()}
    expected, _ = results[WAYS[1]]
    for way, (sequences, _) in results.items():
        if not torch.equal(sequences, expected):
            raise SystemExit(f"{name}: {way} gives other ids than {WAYS[1]}; nothing was timed")
    decoding: dict[str, list[float]] = {way: [] for way in calls}
    whole: dict[str, list[float]] = {way: [] for way in calls}
    for _ in range(repeats):
        for way, call in calls.items():
            clock, started = Clock(), time.perf_counter()
            call(clock)
            whole[way].append(time.perf_counter() - started)
            decoding[way].append(clock.last - clock.first)
    new = expected.shape[1] - ids.shape[1]
    speed = {way: new / statistics.median(times) for way, times in whole.items()}
    seconds = {way: statistics.median(times) for way, times in decoding.items()}
    stats = results[WAYS[2]][1]
    return {
        "prompt": name,
        "read": ids.shape[1],
        "written": new,
        **speed,
        "x transformers": speed[WAYS[2]] / speed[WAYS[0]],
        "x replay": speed[WAYS[2]] / speed[WAYS[1]],
        "x decode": seconds[WAYS[0]] / seconds[WAYS[2]],
        "accepted": stats.accept_rate,
        "a round": (new - 1) / max(stats.rounds, 1),
    }


def report(name: str, rows: list[dict[str, object]], console: Console) -> None:
    """Print every row of a model, the medians, and how they stand against the targets."""
    numbers = [key for key, value in rows[0].items() if isinstance(value, float)]
    heldout = rows[1:]
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=f"{name}: tokens/s on one CPU thread, greedy, float32"
    )
    columns = [key for key in rows[0] if key != "model"]
    for key in columns:
        table.add_column(key, justify="left" if key == "prompt" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(f"{row[key]:.2f}" if key in numbers else str(row[key]) for key in columns))
    if heldout:
        middle = {key: statistics.median(row[key] for row in heldout) for key in numbers}
        table.add_section()
        table.add_row("median of those", *(f"{middle[key]:.2f}" if key in middle else "" for key in columns[1:]))
    console.print(table)
    for what, row in [("demo prompt", rows[0])] + ([("held-out, median", middle)] if heldout else []):
        for key, target in zip(("x transformers", "x replay"), TARGETS[name], strict=True):
            verdict = "reached" if row[key] >= target else "missed"
            console.print(f"{what}: {row[key]:.2f} {key}, target {target}: {verdict}")


if __name__ == "__main__":
    sys.exit(main())
