"""Mamba-2: a step over checkpoint and ring, and materialize. Head dim 64, state dim 128, window 16.

``hold``: 8 live rows, no state is written. ``flush``: every request writes its state. ``mix``: 0, 1, ..., 16,
0, ... live rows through the batch, as in a server. The floor of a step is the time of its bytes at the copy ceiling:
states, live rows, tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from replayssm.bench import BadOption, Case, Options, Row, Tables, flashinfer, vary
from replayssm.bench.mamba_buffers import (
    WINDOW,
    check_materialize,
    check_step,
    live_rows,
    materialize_arguments,
    ordinary_step,
    state_bytes,
    step_buffers,
    step_bytes,
)
from replayssm.bench.peers import THIS_RUN, on_an_h200, timed
from replayssm.bench.plot import Panel, Plot, over_floor
from replayssm.bench.timing import Calls, Timer
from replayssm.mamba import checkpointing_ssu, replayssm_materialize

LAYERS = {"cuda": 24, "cpu": 2}
BATCHES = (1, 8, 16, 32, 64, 128, 256, 512)
HEADS = ((128, 8), (16, 1))


@dataclass(frozen=True)
class Step:
    """One line of the table of steps."""

    state: str
    heads: int
    groups: int
    tokens: int
    mode: str
    batch: int


@dataclass(frozen=True)
class Materialize:
    """One line of the table of materialize."""

    state: str
    heads: int
    groups: int
    prefix: int
    batch: int


def cases(options: Options) -> list[Case]:
    """See ``replayssm.bench``."""
    given = {"state": options.state_dtypes, "batch": options.batches, "heads": options.heads, "groups": options.groups}
    ops = options.ops or ("step", "materialize")
    result = []
    if "step" in ops:
        steps = vary(_standard_steps(options), **given, tokens=options.tokens, mode=options.modes)
        result += [Case("mamba", _label(line), partial(_run_step, line, options.peers)) for line in steps]
    if "materialize" in ops:
        lines = vary(_standard_materialize(options), **given)
        result += [Case("materialize", _label(line), partial(_run_materialize, line, options.peers)) for line in lines]
    for line in [case.run.args[0] for case in result]:  # type: ignore[attr-defined]
        if line.heads % line.groups:
            raise BadOption(f"{line.heads} heads cannot share {line.groups} groups evenly")
        if isinstance(line, Step) and line.tokens > WINDOW:
            raise BadOption(f"at most {WINDOW} tokens fit the window, got {line.tokens}")
    return result


def _standard_steps(options: Options) -> list[Step]:
    if options.device == "cpu":
        batches = (1,) if options.quick else (1, 4)
        return [Step(s, 16, 1, t, m, b) for s in ("fp32", "bf16") for t in (1, 4) for m in ("hold", "mix", "flush")
                for b in batches if m != "mix" or b > 1 or options.quick]  # fmt: skip
    if options.quick:
        return [Step(s, 128, 8, t, "mix", b) for s in ("bf16", "fp32") for t in (1, 4) for b in (1, 32, 256)]
    wide, few = ("bf16", "fp32"), (1, 32, 256)
    lines = [Step(s, 128, 8, t, "mix", b) for s in wide for t in (1, 4, 8) for b in BATCHES]
    lines += [Step(s, 128, 8, t, m, b) for s in wide for t in (1, 4, 8) for m in ("hold", "flush") for b in few]
    lines += [Step(s, 128, 8, t, "mix", b) for s in ("fp16", "int8", "fp8") for t in (1, 4, 8) for b in (*few, 512)]
    lines += [Step(s, 128, 8, t, m, 256) for s in ("int8", "fp8") for t in (1, 4) for m in ("hold", "flush")]
    return lines + [Step(s, 16, 1, t, "mix", b) for s in wide for t in (1, 4, 8) for b in (1, 16, 64, 256)]


def _standard_materialize(options: Options) -> list[Materialize]:
    if options.device == "cpu" or options.quick:
        heads, batches = ((16, 1), (2,)) if options.device == "cpu" else ((128, 8), (1, 16))
        return [Materialize(s, *heads, c, b) for s in ("fp32", "bf16") for b in batches for c in (0, 8)]
    lines = [Materialize(s, 128, 8, c, b) for s in ("bf16", "fp32") for b in (1, 16, 64) for c in (0, 1, 8, 16)]
    return lines + [Materialize(s, *h, 8, 16) for s, h in (("int8", HEADS[0]), ("fp8", HEADS[0]), ("bf16", HEADS[1]))]


def _label(line: Step | Materialize) -> str:
    """The line in words, for progress and errors."""
    what = f"{line.tokens} token(s), {line.mode}" if isinstance(line, Step) else f"materialize, prefix {line.prefix}"
    return f"{line.state} state, {line.heads}/{line.groups} heads, {what}, batch {line.batch}"


def _columns(line: Step | Materialize) -> Row:
    return {field.name: getattr(line, field.name) for field in fields(line)}


def _run_step(line: Step, peers: bool, timer: Timer) -> Row:
    """Check and time one step, with its peers."""
    live = live_rows(line.mode, line.batch).to(timer.device)
    one = state_bytes(line.state, line.heads) * line.batch
    pools = [step_buffers(line.batch, line.heads, line.groups, line.tokens, line.state, live)
             for _ in range(timer.sets(one))]  # fmt: skip
    error = check_step(_label(line), pools[0])
    calls = [partial(checkpointing_ssu, **pool) for pool in pools]
    ways: dict[str, Calls] = {"us": calls}
    if few := timer.cached_sets(one):
        ways["cached_us"] = calls[:few]
    on_cpu = timer.device.type == "cpu"
    if on_cpu and pools[0]["state_scale"] is None:
        ways["plain_us"] = [ordinary_step(pool) for pool in pools]
    times = timer.micros(ways)
    moved = step_bytes(line.heads, line.groups, line.tokens, line.state, live, pools[0]["x"].element_size())
    floor = moved / timer.ceiling
    row = _columns(line) | {
        "us": times["us"], "cached_us": times.get("cached_us"), "bytes": moved, "floor_us": floor,
        "of_ceiling": floor / times["us"], "error": error,
    }  # fmt: skip
    if not on_cpu:
        return row | _step_peers(line, pools, peers, timer)
    plain = times.get("plain_us")
    return row | {"flashinfer_us": None, "plain_us": plain, "peers": plain and "torch operations, this run"}


def _step_peers(line: Step, pools: list[dict[str, Any]], peers: bool, timer: Timer) -> Row:
    """FlashInfer's ``checkpointing_ssu`` (the best of its kernels) and its update without a ring."""
    found = flashinfer.version() if peers else None
    if found is not None:
        scaled = pools[0]["state_scale"] is not None
        kernels = ("monolith",) if scaled else ("monolith", "two-kernel")
        theirs = partial(timed, timer, "FlashInfer")
        ring = [theirs([partial(flashinfer.checkpointing_ssu, p, kernel) for p in pools]) for kernel in kernels]
        best = min((micros for micros in ring if micros is not None), default=None)
        plain = None if scaled else theirs([partial(flashinfer.selective_state_update, pool) for pool in pools])
        if best is not None:
            return {"flashinfer_us": best, "plain_us": plain, "peers": f"FlashInfer {found}, {THIS_RUN}"}
    known = partial(
        flashinfer.published_step, line.state, line.tokens, batch=line.batch, heads=line.heads, groups=line.groups
    )
    best, plain = (known(mode=mode) if on_an_h200() else None for mode in (line.mode, "plain"))
    return {"flashinfer_us": best, "plain_us": plain, "peers": best and flashinfer.PUBLISHED}


def _run_materialize(line: Materialize, peers: bool, timer: Timer) -> Row:
    """Check and time one materialize of all layers."""
    layers = LAYERS[timer.device.type]
    live = torch.full((2 * line.batch,), line.prefix, device=timer.device)
    pool = [step_buffers(2 * line.batch, line.heads, line.groups, 1, line.state, live) for _ in range(layers)]
    tables, options = materialize_arguments(pool, line.batch, line.prefix)
    error = check_materialize(_label(line), pool, tables, options)
    calls: list[Callable[[], object]] = [partial(replayssm_materialize, *tables, **options)] * 3
    micros = timer.micros({"us": calls})["us"]
    moved = 2 * layers * line.batch * state_bytes(line.state, line.heads)
    floor = moved / timer.ceiling
    row = _columns(line) | {
        "layers": layers, "us": micros, "bytes": moved, "floor_us": floor, "of_ceiling": floor / micros,
        "over_floor": micros / floor, "error": error,
    }  # fmt: skip
    if timer.device.type == "cpu":
        return row | {"flashinfer_us": None, "peers": None}
    found = flashinfer.version() if peers else None
    if found is not None:
        theirs = timed(timer, "FlashInfer", [partial(flashinfer.replayssm_materialize, tables, options)] * 3)
        if theirs is not None:
            return row | {"flashinfer_us": theirs, "peers": f"FlashInfer {found}, {THIS_RUN}"}
    known = None
    if on_an_h200():
        known = flashinfer.published_materialize(line.state, line.prefix, line.batch, line.heads, layers)
    return row | {"flashinfer_us": known, "peers": known and flashinfer.PUBLISHED}


def plots(tables: Tables) -> list[Plot]:
    """See ``replayssm.bench``."""
    return [plot for plot in (_step_plot(tables.get("mamba", [])),) if plot.panels]


def _step_plot(rows: list[Row]) -> Plot:
    """Time over the byte floor by batch, at the most heads that were measured, where most batches were."""
    heads = max((row["heads"] for row in rows), default=0)
    mixes: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if row["mode"] == "mix" and row["heads"] == heads:
            mixes.setdefault((row["state"], row["tokens"]), []).append(row)
    most = max(map(len, mixes.values()), default=0)
    labels = {"us": "replayssm", "flashinfer_us": "FlashInfer", "plain_us": "no ring"}
    panels = [
        Panel(f"{state} state, T = {tokens}", over_floor(chosen, "batch", labels))
        for (state, tokens), chosen in mixes.items()
        if len(chosen) == most >= 4
    ]
    title = f"checkpointing_ssu, mixed batch, {heads} heads of 64 x 128"
    return Plot("mamba", title, "batch", "time over byte floor", panels, limit="byte floor")
