"""``replayssm info``: versions, devices and what runs where. Works without transformers and without Triton."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch
from rich import box
from rich.table import Table

from replayssm import __version__
from replayssm.cli.console import Console
from replayssm.dispatch import IMPLEMENTATIONS, supported_devices

# What a user calls, and where it lives. The devices come from dispatch.py.
OPS = {
    "replayssm.mamba": ("checkpointing_ssu", "replayssm_materialize"),
    "replayssm.conv": ("causal_conv1d_replay",),
    "replayssm.ssd": ("chunk_scan",),
    "replayssm.batch_invariant_decode": ("batch_invariant_decode_buffered_scan",),
    "replayssm.gdn_decode": (
        "gated_delta_rule_mtp",
        "gated_delta_rule_replayssm_commit",
        "gated_delta_rule_replayssm_materialize",
        "gated_delta_rule_checkpointing",
    ),
    "replayssm.row_product": ("row_product",),
    "replayssm.rms_norm": ("rms_norm",),
    "replayssm.gumbel": ("gumbel_noise",),
}
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "triton", "numpy")


def run(options: argparse.Namespace) -> int:
    """Print the report, as tables or as one JSON object, and return 0."""
    report = collect()
    if options.json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _print(report, Console(highlight=False))
    return 0


def collect() -> dict[str, Any]:
    """Return the report: ``versions``, ``devices``, ``ops``, ``generation`` and ``environment``.

    Example:
        >>> "cpu" in collect()["ops"]["replayssm.mamba.checkpointing_ssu"]
        True
    """
    return {
        "versions": {"replayssm": __version__, "python": platform.python_version()}
        | {name: _version(name) for name in PACKAGES},
        "devices": _devices(),
        "ops": {f"{module}.{op}": _supported(module) for module, ops in OPS.items() for op in ops},
        "generation": _generation(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("REPLAYSSM_")},
    }


def _supported(module: str) -> list[str]:
    """Return the device types that have an implementation of the op family."""
    return list(supported_devices(module.removeprefix("replayssm.")))


def _version(package: str) -> str | None:
    """Return the installed version, or None; nothing is imported."""
    try:
        return metadata.version(package) if find_spec(package) else None
    except (metadata.PackageNotFoundError, ImportError, ValueError):
        return None


def _devices() -> list[dict[str, str | bool]]:
    """Return every device that torch sees here, and whether the ops run on it."""
    names = {"cpu": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s) used"}
    if torch.cuda.is_available():
        names |= {f"cuda:{i}": torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    return [
        {"device": device, "name": name, "supported": device.split(":")[0] in IMPLEMENTATIONS}
        for device, name in names.items()
    ]


def _generation() -> dict[str, Any]:
    """Return which model families ``generate`` takes, or why it cannot run here."""
    if _version("transformers") is None:
        return {"available": False, "reason": "transformers is not installed: pip install 'replayssm[hf]'"}
    from replayssm.hf.mixers import FAMILIES

    return {"available": True, "families": sorted(FAMILIES)}


def _print(report: dict[str, Any], console: Console) -> None:
    console.print_whole(_table("versions", ("package", "version"), report["versions"].items()))
    console.print_whole(
        _table(
            "devices",
            ("device", "what", "replayssm runs on it"),
            ((d["device"], d["name"], "yes" if d["supported"] else "not yet") for d in report["devices"]),
        )
    )
    ops = ((op.removeprefix("replayssm."), ", ".join(on)) for op, on in report["ops"].items())
    console.print_whole(_table("ops", ("replayssm.", "devices"), ops))
    generation = report["generation"]
    if generation["available"]:
        console.print(f"generate: model families {', '.join(generation['families'])}")
    else:
        console.print(f"generate: not available, {generation['reason']}", markup=False)
    for name, value in report["environment"].items():
        console.print(f"{name}={value}", markup=False)


def _table(title: str, columns: tuple[str, ...], rows: Any) -> Table:
    table = Table(*columns, title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*(str(cell) if cell is not None else "not installed" for cell in row))
    return table
