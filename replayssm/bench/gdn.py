"""Gated DeltaNet: verify, commit, and decoding token by token in place and with the lazy ring. K = V = 128, window 16.

Verify is ``gated_delta_rule_mtp`` with frozen states, without and with windows written. Commit applies n of 8 tokens in
all layers. In the table of decoding, ``update`` writes the state in every call and ``lazy`` once per cycle of calls;
its time and bytes are the mean over the cycle, every request at another place in it. Floors are the bytes at the copy
ceiling: states, records that are read or written, tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from replayssm.bench import BadOption, Case, Options, Row, Tables, gdn_peers, vary
from replayssm.bench.gdn_buffers import (
    check_commit,
    check_lazy,
    check_mtp,
    commit_buffers,
    lazy_buffers,
    lazy_cursors,
    lazy_cycle,
    mtp_buffers,
    record_bytes,
    state_bytes,
    token_bytes,
)
from replayssm.bench.plot import Panel, Plot, over_floor
from replayssm.bench.timing import Calls, Timer
from replayssm.gdn_decode import (
    gated_delta_rule_checkpointing,
    gated_delta_rule_mtp,
    gated_delta_rule_replayssm_commit,
)
from replayssm.gdn_decode.arguments import MAX_TOKENS

LAYERS = {"cuda": 36, "cpu": 2}
BATCHES = (1, 16, 64, 256)
MODES = ("frozen", "windows")
BACKENDS = ("simt", "tensor_core")
_WINDOW_ROWS = 8  # rows of the windows that are committed


@dataclass(frozen=True)
class Verify:
    """One line of the table of verify."""

    state: str
    heads: int
    keys: int
    tokens: int
    mode: str
    backend: str
    batch: int


@dataclass(frozen=True)
class Commit:
    """One line of the table of commits."""

    state: str
    heads: int
    keys: int
    accepted: int
    batch: int


@dataclass(frozen=True)
class Decode:
    """One line of the table of decoding."""

    state: str
    heads: int
    keys: int
    tokens: int
    way: str
    batch: int


Line = Verify | Commit | Decode


def cases(options: Options) -> list[Case]:
    """See ``replayssm.bench``."""
    given = {"state": options.state_dtypes, "batch": options.batches, "heads": options.heads, "keys": options.groups}
    ops = options.ops or ("verify", "commit", "lazy", "update")
    result = []
    if "verify" in ops:
        verifies = vary(_standard_verifies(options), **given, tokens=options.tokens, mode=options.modes)
        result += [Case("gdn", _label(line), partial(_run_verify, line, options.peers)) for line in verifies]
    if "commit" in ops:
        commits = vary(_standard_commits(options), **given)
        result += [Case("gdn_commit", _label(line), partial(_run_commit, line)) for line in commits]
    ways = [way for way in ("update", "lazy") if way in ops]
    decodes = vary([line for line in _standard_decodes(options) if line.way in ways], **given, tokens=options.tokens)
    result += [Case("gdn_decode", _label(line), partial(_run_decode, line, options.peers)) for line in decodes]
    for line in [case.run.args[0] for case in result]:  # type: ignore[attr-defined]
        if line.heads % line.keys:
            raise BadOption(f"{line.heads} value heads cannot share {line.keys} key heads evenly")
        if not isinstance(line, Commit) and line.tokens > MAX_TOKENS:
            raise BadOption(f"expected at most {MAX_TOKENS} tokens, got {line.tokens}")
    return result


def _standard_verifies(options: Options) -> list[Verify]:
    if options.device == "cpu" or options.quick:
        sizes, batches = ((8, 4), (1, 4)) if options.device == "cpu" else ((32, 16), (1, 64))
        return [Verify("fp32", *sizes, t, m, c, b) for t in (4, 8) for m in MODES for c in BACKENDS for b in batches]
    lines = [Verify("fp32", 32, 16, t, m, c, b) for t in (4, 8) for m in MODES for c in BACKENDS for b in BATCHES]
    lines += [Verify("fp32", 8, 4, t, "frozen", c, b) for t in (4, 8) for c in BACKENDS for b in BATCHES]
    lines += [Verify("fp32", 32, 16, t, "frozen", c, b) for t in (2, 16) for c in BACKENDS for b in (1, 64)]
    return lines + [Verify(s, 32, 16, 8, "frozen", c, b) for s in ("bf16", "fp16") for c in BACKENDS for b in (1, 64)]


def _standard_commits(options: Options) -> list[Commit]:
    if options.device == "cpu" or options.quick:
        sizes, batches = ((8, 4), (1, 4)) if options.device == "cpu" else ((32, 16), (1, 16))
        return [Commit("fp32", *sizes, n, b) for n in (1, 8) for b in batches]
    return [Commit("fp32", 32, 16, n, b) for n in (1, 2, 4, 8) for b in (1, 16, 64)]


def _standard_decodes(options: Options) -> list[Decode]:
    if options.device == "cpu" or options.quick:
        sizes, batches = ((8, 4), (1, 4)) if options.device == "cpu" else ((32, 16), (1, 64))
        return [Decode("fp32", *sizes, 1, way, b) for way in ("update", "lazy") for b in batches]
    lines = [Decode("fp32", 32, 16, 1, way, b) for way in ("update", "lazy") for b in BATCHES]
    return lines + [Decode("fp32", 32, 16, 4, "lazy", b) for b in BATCHES]


def _label(line: Line) -> str:
    """The line in words, for progress and errors."""
    heads = f"{line.state} state, {line.heads}/{line.keys} heads"
    if isinstance(line, Verify):
        return f"{heads}, verify {line.tokens} token(s), {line.mode}, {line.backend}, batch {line.batch}"
    if isinstance(line, Commit):
        return f"{heads}, commit {line.accepted} token(s), batch {line.batch}"
    return f"{heads}, {line.way}, {line.tokens} token(s), batch {line.batch}"


def _row(line: Line, times: dict[str, float], moved: float, error: float, timer: Timer) -> Row:
    floor = moved / timer.ceiling
    return {field.name: getattr(line, field.name) for field in fields(line)} | {
        "us": times["us"], "cached_us": times.get("cached_us"), "bytes": round(moved), "floor_us": floor,
        "of_ceiling": floor / times["us"], "error": error,
    }  # fmt: skip


def _run_verify(line: Verify, peers: bool, timer: Timer) -> Row:
    """Check and time one verify, with its peers."""
    one = state_bytes(line.state, line.heads) * line.batch
    make = partial(mtp_buffers, line.batch, line.heads, line.keys, line.tokens, line.state, line.mode, timer.device)
    pools = [make() for _ in range(timer.sets(one))]
    error = check_mtp(_label(line), pools[0], line.state, line.backend)
    calls = [partial(gated_delta_rule_mtp, **pool, backend=line.backend) for pool in pools]
    ways: dict[str, Calls] = {"us": calls}
    if cached := timer.cached_sets(one):
        ways["cached_us"] = calls[:cached]
    times = timer.micros(ways)
    width = pools[0]["q"].element_size()
    moved = one + line.batch * line.tokens * token_bytes(line.heads, line.keys, width)
    if line.mode == "windows":
        moved += line.batch * line.tokens * record_bytes(line.heads, line.keys, width)
    row = _row(line, times, moved, error, timer)
    few = pools[: max(1, len(pools) // 2)]
    calls_of = {
        "flashinfer_frozen_us": (
            "flashinfer-python",
            lambda: [partial(gdn_peers.flashinfer_mtp, p, False) for p in few],
        ),
        "flashinfer_snapshots_us": (
            "flashinfer-python",
            lambda: [partial(gdn_peers.flashinfer_mtp, p, True) for p in few],
        ),
        "fla_us": ("fla-core", lambda: [partial(gdn_peers.fla_recurrence, p) for p in few]),
    }
    if timer.device.type == "cpu" or line.state != "fp32":
        return row | dict.fromkeys((*calls_of, "peers"))
    known = gdn_peers.published_mtp(line.heads, line.keys, line.tokens, line.batch)
    return row | gdn_peers.beside(timer, peers, calls_of, known)


def _run_commit(line: Commit, timer: Timer) -> Row:
    """Check and time one commit of all layers."""
    layers = LAYERS[timer.device.type]
    make = partial(commit_buffers, layers, line.batch, line.heads, line.keys, _WINDOW_ROWS, line.accepted, line.state)
    pools = [make(timer.device) for _ in range(timer.sets(layers * line.batch * state_bytes(line.state, line.heads)))]
    error = check_commit(_label(line), pools[0], line.state, "auto")
    times = timer.micros({"us": [partial(gated_delta_rule_replayssm_commit, **pool) for pool in pools]})
    records = line.accepted * record_bytes(line.heads, line.keys, pools[0]["rawk_cache"].element_size())
    states = 2 * layers * line.batch * state_bytes(line.state, line.heads)
    row = _row(line, times, states + layers * line.batch * records, error, timer)
    return row | {"layers": layers, "over_copy": times["us"] / (states / timer.ceiling), "peers": None}


def _run_decode(line: Decode, peers: bool, timer: Timer) -> Row:
    """Check and time steps that go on from each other, with their peers."""
    one = state_bytes(line.state, line.heads) * line.batch
    pools, rounds = _decode_rounds(line, timer)
    check = partial(check_mtp, backend="simt") if line.way == "update" else partial(check_lazy, backend="auto")
    error = check(_label(line), pools[0], line.state)
    ways: dict[str, Calls] = {"us": [call for calls in rounds for call in calls]}
    if few := timer.cached_sets(one):
        ways["cached_us"] = [call for calls in rounds for call in calls[:few]]
    times = timer.micros(ways)
    width = pools[0]["q"].element_size()
    tokens, record = line.tokens * token_bytes(line.heads, line.keys, width), record_bytes(line.heads, line.keys, width)
    moved: float = 2 * one + line.batch * tokens
    if line.way == "lazy":
        steps = lazy_cycle(line.tokens)
        live = lazy_cursors(steps, line.tokens, 0).float().mean().item()
        moved = one * (1 + 1 / steps) + line.batch * (tokens + (live + line.tokens) * record)
    row = _row(line, times, moved, error, timer)
    make = (lambda: pools) if line.way == "update" else (lambda: _decode_rounds(replace(line, way="update"), timer)[0])
    calls_of = {
        "flashinfer_update_us": (
            "flashinfer-python",
            lambda: [partial(gdn_peers.flashinfer_update, p) for p in make()],
        ),
        "fla_us": ("fla-core", lambda: [partial(gdn_peers.fla_recurrence, p) for p in make()]),
    }
    if timer.device.type == "cpu" or line.state != "fp32" or line.tokens > 1:
        return row | dict.fromkeys((*calls_of, "peers"))
    return row | gdn_peers.beside(timer, peers, calls_of, gdn_peers.published_update(line.heads, line.keys, line.batch))


def _decode_rounds(line: Decode, timer: Timer) -> tuple[list[dict[str, Any]], list[list[Callable[[], object]]]]:
    """Buffers, and rounds of one call on each of them: for the lazy ring those of a whole cycle."""
    sizes = line.batch, line.heads, line.keys, line.tokens, line.state
    count = timer.sets(state_bytes(line.state, line.heads) * line.batch)
    if line.way == "update":
        pools = [mtp_buffers(*sizes, "update", timer.device) for _ in range(count)]
        return pools, [[partial(gated_delta_rule_mtp, **pool) for pool in pools]]
    pools = [lazy_buffers(*sizes, timer.device) for _ in range(count)]
    cursors = [lazy_cursors(line.batch, line.tokens, at).to(timer.device) for at in range(lazy_cycle(line.tokens))]
    return pools, [
        [partial(gated_delta_rule_checkpointing, **{**pool, "num_live": live}) for pool in pools] for live in cursors
    ]


def plots(tables: Tables) -> list[Plot]:
    """See ``replayssm.bench``."""
    return [plot for plot in (_verify_plot(tables.get("gdn", [])),) if plot.panels]


def _verify_plot(rows: list[Row]) -> Plot:
    """Time over the byte floor by batch, frozen, at the most heads that were measured."""
    heads = max((row["heads"] for row in rows), default=0)
    chosen = [row for row in rows if row["mode"] == "frozen" and row["heads"] == heads and row["state"] == "fp32"]
    panels = []
    for tokens in dict.fromkeys(row["tokens"] for row in chosen):
        at = [row for row in chosen if row["tokens"] == tokens]
        if len({row["batch"] for row in at}) < 4:
            continue
        series = []
        for backend in reversed(BACKENDS):
            own = [row for row in at if row["backend"] == backend]
            series += over_floor(own, "batch", {"us": f"replayssm, {backend}"})
        first = [row for row in at if row["backend"] == at[0]["backend"]]
        series += over_floor(first, "batch", {"flashinfer_frozen_us": "FlashInfer", "fla_us": "fla"})
        panels.append(Panel(f"T = {tokens}", series))
    title = f"gated_delta_rule_mtp, frozen fp32 states, {heads} value heads of 128 x 128"
    return Plot("gdn", title, "batch", "time over byte floor", panels, limit="byte floor")
