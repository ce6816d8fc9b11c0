"""``replayssm bench``: check, time, show a table; write CSV files, JSON and pictures."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from replayssm.bench import BadOption, Case, Options, Tables
from replayssm.bench.apart import Apart, Crashed
from replayssm.bench.plot import draw
from replayssm.bench.report import conditions, table, write_csv
from replayssm.bench.timing import Timer, one_thread
from replayssm.cli.console import Console
from replayssm.cli.errors import CommandError, UsageError

_MOST_CRASHES = 3  # one after the other


def run(options: argparse.Namespace) -> int:
    """Measure what the options name and return the exit code; a wrong answer ends it with an error."""
    options.device = _device(options.device)
    _check_output(options)
    try:
        return _run(options)
    except BadOption as error:
        raise UsageError(str(error)) from None


def _run(options: argparse.Namespace) -> int:
    family = importlib.import_module(f"replayssm.bench.{options.family}")
    asked = options.options_type(
        **{field.name: getattr(options, field.name) for field in dataclasses.fields(options.options_type)}
    )
    peers = getattr(asked, "peers", False)
    if peers and options.device == "cpu":
        raise UsageError("--peers needs a CUDA device, which the other libraries are made for")
    cases = family.cases(dataclasses.replace(asked, peers=False) if peers else asked)
    with one_thread() if options.device == "cpu" else contextlib.nullcontext(), torch.no_grad():
        torch.manual_seed(0)
        timer = Timer(options.device, quick=options.quick)
        facts = conditions(options.device) | {"copy ceiling": f"{timer.ceiling / 1e6:.4g} TB/s"}
        folder = None if options.output is None else Path(options.output)
        tables = measure(cases, timer, facts, folder, {})
        if peers:
            tables = _with_peers(family.__name__, asked, cases, timer, facts, folder, tables)
    if options.json:
        report = {"family": options.family, "conditions": facts, "tables": tables}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _print(tables, facts)
    if folder is not None:
        pictures = [draw(plot, folder) for plot in family.plots(tables)] if options.plot else []
        written = [folder / f"{name}.csv" for name in tables] + pictures
        sys.stderr.write("".join(f"written: {path}\n" for path in written))
        if options.plot and not pictures:
            sys.stderr.write("no picture: these are too few sizes for a curve\n")
    return 0


def _with_peers(
    module: str, asked: Options, cases: Sequence[Case], timer: Timer, facts: dict[str, str], folder: Path | None,
    tables: Tables,
) -> Tables:  # fmt: skip
    """Measure the cases again, beside other libraries, in a process that may crash: our rows are written."""
    with Apart(module, asked) as apart:
        beside = [dataclasses.replace(case, run=partial(apart.run, number)) for number, case in enumerate(cases)]
        return measure(beside, timer, facts, folder, tables)


def measure(cases: Sequence[Case], timer: Timer, facts: dict[str, str], folder: Path | None, earlier: Tables) -> Tables:
    """Run the cases with a line of progress on stderr.

    Args:
        cases: what to run.
        timer: on their device.
        facts: head of the CSV files.
        folder: where each table is written, anew after every row, so that an interrupted run leaves what it measured.
        earlier: rows of the same cases, which the new ones replace one after the other. If a case crashes apart, its
            row stays; after three such cases in turn, all of the rest.

    Returns:
        The rows by table.
    """
    crashes = 0
    tables = {name: list(rows) for name, rows in earlier.items()}
    done: Counter[str] = Counter()
    with _progress(len(cases)) as show:
        for number, case in enumerate(cases):
            show(number + 1, case.label)
            place, rows = done[case.table], tables.setdefault(case.table, [])
            done[case.table] += 1
            try:
                rows[place : place + 1] = [case.run(timer)]
            except Crashed as crash:
                crashes += 1
                warnings.warn(f"{case.label}: no numbers beside ours, {crash}", stacklevel=2)
                if crashes == _MOST_CRASHES:
                    warnings.warn("other libraries are left out of the rest", stacklevel=2)
                    break
                continue
            crashes = 0
            if folder is not None:
                write_csv(folder / f"{case.table}.csv", rows, facts)
    return tables


@contextlib.contextmanager
def _progress(count: int) -> Iterator[Any]:
    """A function of a case's number and label: one line that changes in a terminal, one per case elsewhere."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status("") as status:
            yield lambda number, label: status.update(f"{number} of {count}: {label}")
    else:
        yield lambda number, label: sys.stderr.write(f"{number} of {count}: {label}\n")


def _device(name: str | None) -> str:
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise UsageError(f"--device: expected 'cpu' or 'cuda', got '{name}'")
    if name == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device: torch sees no CUDA device here")
    return name


def _check_output(options: argparse.Namespace) -> None:
    if options.plot and options.output is None:
        raise UsageError("--plot needs --output DIR, where the pictures go")
    if options.plot and find_spec("matplotlib") is None:
        raise CommandError("--plot needs matplotlib: pip install 'replayssm[bench]'")
    if options.output is not None:
        try:
            Path(options.output).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(f"--output: cannot make the folder {options.output}: {error.strerror}") from None


def _print(tables: Tables, facts: dict[str, str]) -> None:
    console = Console(highlight=False)
    for name, rows in tables.items():
        console.print_whole(table(name, rows))
    console.print(" · ".join(f"{key} {value}" for key, value in facts.items()), style="dim", markup=False)
