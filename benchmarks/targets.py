"""Targets beside measurements: ``python benchmarks/targets.py`` writes targets.md beside the CSV files of the H200.

A target is a time in microseconds, a multiple of a floor, or a multiple of another row's speed. Those of batch 1 were
set by other libraries' times on so few buffers that the L2 cache held them, so both columns are shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replayssm.bench.report import read_csv, shown

FOLDER = Path(__file__).parent / "results" / "h200"
Row = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """At most ``limit`` in a column of the row that has the values of ``where``; the peer's column stands beside it."""

    table: str
    work: str
    where: dict[str, Any]
    limit: float
    column: str = "us"
    peer: str | None = None
    over: dict[str, Any] = field(default_factory=dict)  # divide by the row that differs in these values


def targets() -> Iterator[Target]:
    """All of them, by table."""
    yield from _mamba()
    yield from _materialize()
    yield from _gdn()
    yield from _exact()


def _mamba() -> Iterator[Target]:
    limits = {
        ("bf16", 1): {1: 4.8, 8: 10.5, 128: 86, 256: 170}, ("bf16", 4): {128: 104, 256: 206},
        ("fp32", 1): {128: 157, 256: 308}, ("fp32", 4): {128: 183, 256: 362},
    }  # fmt: skip
    for (state, tokens), by_batch in limits.items():
        for batch, limit in by_batch.items():
            where = {"state": state, "heads": 128, "tokens": tokens, "mode": "mix", "batch": batch}
            yield Target("mamba", f"{state}, T = {tokens}, batch {batch}", where, limit, peer="flashinfer_us")
    for state in ("int8", "fp8"):
        for tokens in (1, 4):
            where = {"state": state, "heads": 128, "tokens": tokens, "mode": "mix", "batch": 256}
            work = f"{state}, T = {tokens}, batch 256, over bf16"
            yield Target("mamba", work, where, 1 / 1.5, over={"state": "bf16"})


def _materialize() -> Iterator[Target]:
    limits = {"bf16": {1: 1.35, 16: 1.15, 64: 1.15}, "fp32": {1: 1.3, 16: 1.1, 64: 1.1}}
    for state, by_batch in limits.items():
        for batch, limit in by_batch.items():
            where = {"state": state, "heads": 128, "batch": batch}
            yield Target("materialize", f"{state}, prefix 8, batch {batch}", where | {"prefix": 8}, limit, "over_floor",
                         "flashinfer_us")  # fmt: skip
            if batch > 1:
                work = f"{state}, prefix 0, batch {batch}"
                yield Target("materialize", work, where | {"prefix": 0}, 1.05, "over_floor")


def _gdn() -> Iterator[Target]:
    must = {4: (5.3, 22, 64, 235), 8: (7, 24, 68, 250)}
    goal = {4: (4.5, 17, 48, 180), 8: (5.5, 18, 50, 190)}
    theirs = {4: (5.3, 26.3, 79.6, 286), 8: (7.7, 49.8, 165.6, 617)}
    kinds = (("must", "windows", "tensor_core", must), ("goal", "windows", "tensor_core", goal),
             ("FlashInfer's", "frozen", "simt", theirs))  # fmt: skip
    for kind, mode, backend, limits in kinds:
        for tokens, by_batch in limits.items():
            for batch, limit in zip((1, 16, 64, 256), by_batch, strict=True):
                where = {"state": "fp32", "heads": 32, "tokens": tokens, "mode": mode, "backend": backend}
                work = f"verify, {backend}, {mode}, T = {tokens}, batch {batch} ({kind})"
                yield Target("gdn", work, where | {"batch": batch}, limit, peer="flashinfer_frozen_us")
    for accepted in (1, 8):
        for batch, limit in ((1, 1.5), (16, 1.15), (64, 1.15)):
            where = {"accepted": accepted, "batch": batch}
            yield Target("gdn_commit", f"commit of {accepted}, batch {batch}", where, limit, "over_copy")
    for way, by_way in (("update", (68.8, 265)), ("lazy", (45, 170))):
        for batch, limit in zip((64, 256), by_way, strict=True):
            where = {"way": way, "tokens": 1, "batch": batch}
            yield Target("gdn_decode", f"{way}, T = 1, batch {batch}", where, limit, peer="flashinfer_update_us")


def _exact() -> Iterator[Target]:
    for heads, by_batch in ((128, {1: 8, 16: 30, 64: 97}), (16, {1: 6, 16: 9, 64: 18, 256: 52})):
        for batch, limit in by_batch.items():
            where = {"heads": heads, "tokens": 1, "mode": "mix", "batch": batch}
            yield Target("exact", f"{heads} heads, batch {batch}", where, limit, peer="megatron_us")
    where = {"heads": 128, "tokens": 1, "mode": "chunk", "batch": 128}
    yield Target("exact", "128 heads, batch 128, mean over a chunk", where, 205, peer="plain_us")
    for batch in (1, 64):
        where = {"heads": 128, "tokens": 4, "mode": "mix", "batch": batch}
        yield Target("exact", f"128 heads, batch {batch}, T = 4 over T = 1", where, 1.3, over={"tokens": 1})
    for heads, by_length in ((128, (190, 675, 2769)), (64, (110, 365, 1446))):
        for length, limit in zip((2048, 8192, 32768), by_length, strict=True):
            for kind, factor in (("must", 1), ("goal", 1.5)):
                work = f"chunk_scan, {heads} heads, {length} tokens ({kind})"
                where = {"heads": heads, "chunk": 128, "length": length}
                yield Target("chunk_scan", work, where, limit / factor, peer="mamba_ssm_us")


def line(target: Target, rows: list[Row]) -> list[str]:
    """Cells of one target: work, limit, measured, from L2, byte floor, the other library, verdict."""
    row = _find(rows, target.where)
    if row is None:
        return [target.work, shown(target.limit), "", "", "", "", "not measured"]
    value, cached = row[target.column], row.get("cached_us") if target.column == "us" else None
    if target.over:
        other = _find(rows, target.where | target.over)
        value, cached = (value / other["us"], None) if other else (None, None)
    peer = row.get(target.peer) if target.peer else None
    floor = row["floor_us"] if target.column == "us" and not target.over else None
    if value is None:
        verdict = "not measured"
    elif value <= target.limit:
        verdict = "met"
    elif cached is not None and cached <= target.limit:
        verdict = "met from L2"
    else:
        verdict = f"missed by {100 * (min(value, cached or value) / target.limit - 1):.1f} %"
    return [target.work, *(shown(number) for number in (float(target.limit), value, cached, floor, peer)), verdict]


def _find(rows: list[Row], where: dict[str, Any]) -> Row | None:
    return next((row for row in rows if all(row[key] == value for key, value in where.items())), None)


def main() -> None:
    columns = ["target", "at most", "measured", "from L2", "byte floor", "other library, µs", ""]
    text = [
        "# Targets on one NVIDIA H200",
        "",
        "Microseconds, or a quotient where the work says so. Written by `benchmarks/targets.py`.",
        "",
    ]
    table = None
    for target in targets():
        path = FOLDER / f"{target.table}.csv"
        facts, rows = read_csv(path) if path.exists() else ({}, [])
        if target.table != table:
            table = target.table
            origins = sorted({row["peers"] for row in rows if row["peers"]})
            text += ["", f"## `{table}.csv`, commit {facts.get('commit', '')[:7]}", "",
                     f"Other libraries: {'; '.join(origins) or 'none'}.", "",
                     f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]  # fmt: skip
        text.append(f"| {' | '.join(line(target, rows))} |")
    (FOLDER / "targets.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    print("\n".join(text))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help, and nothing else
    main()
