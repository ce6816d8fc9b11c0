"""What becomes of the rows: a table to read, CSV files with the conditions on top, JSON."""

from __future__ import annotations

import csv
import datetime
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from replayssm import __version__
from replayssm.bench import Row

COMMIT = "REPLAYSSM_COMMIT"  # names the commit where the sources are a copy without a repository
_PACKAGE = Path(__file__).parent


def conditions(device: str) -> dict[str, str]:
    """Return what a number depends on: commit, versions, processor, threads, date.

    Args:
        device: ``"cpu"`` or ``"cuda"``, where the measuring happened.

    Example:
        >>> conditions("cpu")["replayssm"] == __version__
        True
    """
    cuda = torch.device(device).type == "cuda"
    return {
        "replayssm": __version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": torch.cuda.get_device_name() if cuda else f"{_processor()}, {torch.get_num_threads()} thread(s)",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
    }


def commit() -> str:
    """The commit of the package's sources, "-dirty" when a tracked file other than a result differs from it.

    The variable ``REPLAYSSM_COMMIT`` goes first; "unknown" means that there is no repository.
    """
    if named := os.environ.get(COMMIT):
        return named
    if not _git("ls-files", "__init__.py"):  # an installed package may lie inside somebody else's repository
        return "unknown"
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)benchmarks/results")
    return _git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")


def write_csv(path: Path, rows: Sequence[Row], facts: dict[str, str]) -> None:
    """Write rows with equal columns, the facts as comment lines above them; make the folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        file.writelines(f"# {key}: {value}\n" for key, value in facts.items())
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: shown(value) for key, value in row.items()} for row in rows)


def read_csv(path: Path) -> tuple[dict[str, str], list[Row]]:
    """Return the facts and the rows of a file that `write_csv` wrote; numbers are numbers again, None is None."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = file.read().splitlines()
    comments = [line.removeprefix("# ").partition(": ") for line in lines if line.startswith("#")]
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    facts = {key: value for key, _, value in comments}
    return facts, [{key: _value(text) for key, text in row.items()} for row in rows]


def table(title: str, rows: Sequence[Row]) -> Group:
    """Return a title, with what all rows share, and a table of the rest, for a terminal or a pipe.

    A few long rows stand beside each other instead of below each other.
    """
    shared = {key: value for key, value in rows[0].items() if len(rows) > 1 and all(row[key] == value for row in rows)}
    common = ", ".join(f"{key} {shown(value)}" for key, value in shared.items() if value is not None)
    columns = [key for key in rows[0] if key not in shared]
    cells = [columns, *([shown(row[column]) for column in columns] for row in rows)]
    upright = 2 * len(rows) < len(columns)
    if upright:
        cells = [list(line) for line in zip(*cells, strict=True)]
    result = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_header=not upright)
    for number, header in enumerate(cells[0]):
        text = number == 0 if upright else any(isinstance(row[columns[number]], str) for row in rows)
        result.add_column(header, justify="left" if text else "right", no_wrap=True)
    for line in cells[0 if upright else 1 :]:
        result.add_row(*line)
    return Group(Text(f"{title}: {common}" if common else title, style="bold"), result)


def shown(value: object) -> str:
    """Return a value as tables show it: numbers with four digits, nothing for None.

    Example:
        >>> [shown(value) for value in (1234.56, 0.000123456, 7, None)]
        ['1235', '0.0001235', '7', '']
    """
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text or None


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=_PACKAGE, capture_output=True, text=True, check=False)
    except OSError:  # there is no git
        return ""
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
