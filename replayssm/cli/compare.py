"""``replayssm generate --compare``: the same text three ways, with speed, state traffic and memory of each."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any

import torch
from rich import box
from rich.table import Table

from replayssm.bench.ways import Generated, Way, by_transformers, measure
from replayssm.cache import plan
from replayssm.cli.console import Console
from replayssm.cli.generate import show, speculate, summary
from replayssm.cli.load import Loaded

REPEATS = 3  # timed runs of each way, interleaved; the median counts
PATIENCE = 20.0  # seconds for one run of all ways, above which the first runs count
CAPTION = "whole calls, {threads}; state: bytes of checkpoint and ring a token\n"


def compare(loaded: Loaded, options: argparse.Namespace) -> int:
    """Show the text with drafts, measure every way, print the table and return the exit code.

    Returns:
        1 when drafts changed the text, which must not happen; else 0.
    """
    console = Console(highlight=False)
    if not options.json:
        console.print(_header(loaded, options.exact), style="bold")
    shown = show(loaded, options)
    if not console.is_terminal and not options.json:
        console.print(f"\n{summary(shown)}")
    ways = [
        Way("transformers", lambda: _transformers(loaded, options)),
        Way("replay", lambda: speculate(loaded, options, drafts=False)),
        Way("replay + drafts", lambda: speculate(loaded, options)),
    ]
    # Ways in turn share the noise of a CPU. On a GPU, attaching anew would throw captured graphs away.
    turns = [ways] if loaded.model.device.type == "cpu" else [ways[:1], ways[1:]]
    with console.status("measuring each way …") if console.is_terminal and not options.json else nullcontext():
        for together in turns:
            measure(together, REPEATS, PATIENCE)
    report = _report(loaded, options, ways)
    if options.json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _print(report, console)
    return 0 if report["equal"] else 1


def _header(loaded: Loaded, exact: bool) -> str:
    size = loaded.model.num_parameters() / 1e6
    return (
        f"{loaded.name}: {size:.1f} M parameters, {type(loaded.model).__name__} of transformers "
        f"{version('transformers')}; prompt: {loaded.input_ids.shape[1]} tokens{'; exact decode' if exact else ''}\n"
    )


def _transformers(loaded: Loaded, options: argparse.Namespace) -> Generated:
    """Run transformers' own generate on the model as it was loaded."""
    from replayssm.hf import detach
    from replayssm.hf.attachment import attachment_of

    if attachment_of(loaded.model) is not None:
        detach(loaded.model)
    return by_transformers(
        loaded.model,
        loaded.input_ids,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )


def _report(loaded: Loaded, options: argparse.Namespace, ways: list[Way]) -> dict[str, Any]:
    layers = _layers(loaded)
    theirs, plain, drafted = ways
    state = plan.slot_bytes(layers).state
    tokens = options.num_draft_tokens + 1
    stats = drafted.results[0].stats
    assert stats is not None
    return {
        "model": loaded.name,
        "draft": options.draft,
        "num_draft_tokens": options.num_draft_tokens,
        "exact": options.exact,
        "prompt_tokens": loaded.input_ids.shape[1],
        "threads": torch.get_num_threads(),
        "equal": bool(torch.equal(plain.results[0].ids, drafted.results[0].ids)),
        # Sampling draws other random numbers there, and lower precision rounds elsewhere.
        "equal_to_transformers": bool(torch.equal(theirs.results[0].ids, drafted.results[0].ids)),
        "greedy": options.temperature == 0,
        "ways": [_way(way, ways[0], state) for way in ways],
        "memory": {
            "state": state,
            "replay": stats.slot_bytes,
            "key_values": stats.key_value_bytes,
            "snapshots": state + plan.snapshot_bytes(layers, num_tokens=tokens),
        },
    }


def _layers(loaded: Loaded) -> list[Any]:
    from replayssm.hf import attach
    from replayssm.hf.attachment import attachment_of

    attachment = attachment_of(attach(loaded.model))
    assert attachment is not None
    return [attachment.family.layer_shape(mixer) for mixer in attachment.mixers]


def _way(way: Way, base: Way, state: int) -> dict[str, Any]:
    result = way.results[0]
    row: dict[str, Any] = {
        "name": way.name,
        "new_tokens": result.ids.numel(),
        "tokens_per_second": way.tokens_per_second,
        "seconds": statistics.median(result.seconds for result in way.results),
        "prompt_seconds": statistics.median(result.prompt_seconds for result in way.results),
        "speedup": way.tokens_per_second / base.tokens_per_second,
        "accept_rate": None,
        # Ordinary decoding reads and writes every state for every token.
        "state_bytes_read_per_token": float(state),
        "state_bytes_written_per_token": float(state),
        # What transformers' caches move is not counted.
        "key_value_bytes_read_per_token": None,
        "key_value_bytes_written_per_token": None,
    }
    if result.stats is not None:
        row["state_bytes_read_per_token"] = result.stats.state_bytes_read_per_token
        row["state_bytes_written_per_token"] = result.stats.state_bytes_written_per_token
        row["key_value_bytes_read_per_token"] = result.stats.key_value_bytes_read / result.stats.new_tokens
        row["key_value_bytes_written_per_token"] = result.stats.key_value_bytes_written / result.stats.new_tokens
        row["accept_rate"] = result.stats.accept_rate if result.stats.drafted else None
    return row


def _print(report: dict[str, Any], console: Console) -> None:
    columns = ("", "tokens/s", "speed", "first\ntoken", "accept\nrate", "state\nread", "state\nwritten")
    threads = f"{report['threads']} thread{'s' if report['threads'] > 1 else ''}"
    table = Table(box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for way in report["ways"]:
        table.add_row(
            way["name"],
            f"{way['tokens_per_second']:.0f}",
            f"{way['speedup']:.2f}x",
            f"{1000 * way['prompt_seconds']:.0f} ms",
            "–" if way["accept_rate"] is None else f"{way['accept_rate']:.0%}",
            _size(way["state_bytes_read_per_token"]),
            _size(way["state_bytes_written_per_token"]),
        )
    console.print_whole(table)
    console.print(CAPTION.format(threads=threads), style="dim")
    memory, tokens = report["memory"], report["num_draft_tokens"] + 1
    console.print(
        f"memory of one sequence: bare state {_size(memory['state'])}, "
        f"with the ring {_size(memory['replay'])} ({memory['replay'] / memory['state']:.2f}x), "
        f"with snapshots of {tokens} tokens {_size(memory['snapshots'])} ({memory['snapshots'] / memory['state']:.2f}x)"
    )
    if memory["key_values"]:
        console.print(_keys(report))
    console.print(_verdict(report))


def _keys(report: dict[str, Any]) -> str:
    """What attention's keys and values take and move, in words; transformers' own cache is not counted."""
    moved = "; ".join(
        f"{way['name']} reads {_size(way['key_value_bytes_read_per_token'])} "
        f"and writes {_size(way['key_value_bytes_written_per_token'])} a token"
        for way in report["ways"]
        if way["key_value_bytes_read_per_token"] is not None
    )
    return f"keys and values of attention: {_size(report['memory']['key_values'])}; {moved}"


def _verdict(report: dict[str, Any]) -> str:
    count = report["ways"][-1]["new_tokens"]
    if not report["equal"]:
        return f"NOT EQUAL: with and without drafts the {count} tokens differ; please report this"
    line = f"token for token equal: yes, all {count} tokens with and without drafts"
    if report["greedy"]:
        line += (
            ", and transformers' own" if report["equal_to_transformers"] else "; transformers' own differ (rounding)"
        )
    return line


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    raise AssertionError
