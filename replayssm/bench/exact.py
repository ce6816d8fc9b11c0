"""Exact decode and the chunk scan of Mamba-2. Head dim 64, state dim 128, fp32 states, z and D inside the scan.

``mix``: rows 0..Q-1 of their chunks spread over the batch, as in a server; with one token every call moves on by a
row, and chunks are folded as they fill. ``chunk``: the mean over as many consecutive steps as a chunk has rows, so that
every lane folds once. The floor is the time of the bytes at the copy ceiling: one read of the states, live rows,
tokens, and of each fold its write of the state and read of the rows. ``workspace_bytes`` is what a step allocates and
gives back, ``sums_bytes`` what its buffers keep of dt between steps. Before anything is timed, steps and one scan over
the same tokens are compared with ``torch.equal``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from replayssm.batch_invariant_decode import BatchInvariantDecodeBuffers, batch_invariant_decode_buffered_scan
from replayssm.bench import BadOption, Case, Options, Row, Tables, WrongAnswer, exact_peers, vary
from replayssm.bench.plot import Panel, Plot, over_floor
from replayssm.bench.timing import Calls, Timer
from replayssm.ssd import chunk_scan

P, N = 64, 128
_CHECKED = 8  # heads' worth of a check, at least one group


@dataclass(frozen=True)
class Decode:
    """One line of the table of steps."""

    heads: int
    groups: int
    chunk: int
    tokens: int
    mode: str
    batch: int


@dataclass(frozen=True)
class Scan:
    """One line of the table of scans over one sequence."""

    heads: int
    groups: int
    chunk: int
    length: int


def cases(options: Options) -> list[Case]:
    """See ``replayssm.bench``."""
    given = {"heads": options.heads, "groups": options.groups}
    ops = options.ops or ("decode", "scan")
    result = []
    if "decode" in ops:
        lines = vary(_standard_decode(options), **given, tokens=options.tokens, mode=options.modes,
                     batch=options.batches)  # fmt: skip
        result += [Case("exact", _label(line), partial(_run_decode, line, options.peers)) for line in lines]
    if "scan" in ops:
        scans = vary(_standard_scan(options), **given)
        result += [Case("chunk_scan", _label(line), partial(_run_scan, line, options.peers)) for line in scans]
    for line in [case.run.args[0] for case in result]:  # type: ignore[attr-defined]
        if line.heads % line.groups:
            raise BadOption(f"{line.heads} heads cannot share {line.groups} groups evenly")
        if isinstance(line, Decode) and line.tokens > line.chunk:
            raise BadOption(f"at most {line.chunk} tokens, a chunk, fit one step, got {line.tokens}")
        if isinstance(line, Decode) and line.tokens > 1 and line.mode == "chunk":
            raise BadOption("mode chunk commits every token: one token a step")
    return result


def _standard_decode(options: Options) -> list[Decode]:
    if options.device == "cpu":
        return [Decode(16, 1, 64, t, "mix", b) for t in (1, 4) for b in ((1,) if options.quick else (1, 4))]
    if options.quick:
        return [Decode(128, 8, 128, t, "mix", b) for t in (1, 4) for b in (1, 64)]
    lines = [Decode(128, 8, 128, t, "mix", b) for t in (1, 4) for b in (1, 16, 64, 128)]
    lines += [Decode(16, 1, 128, t, "mix", b) for t in (1, 4) for b in (1, 16, 64, 256)]
    return [*lines, Decode(128, 8, 128, 1, "chunk", 128), Decode(16, 1, 128, 1, "chunk", 256)]


def _standard_scan(options: Options) -> list[Scan]:
    if options.device == "cpu":
        return [Scan(16, 1, 64, 512)]
    if options.quick:
        return [Scan(128, 8, 128, 8192)]
    return [Scan(h, 8, 128, length) for h in (128, 64) for length in (2048, 8192, 32768)]


def _label(line: Decode | Scan) -> str:
    """The line in words, for progress and errors."""
    what = f"{line.heads}/{line.groups} heads, chunk {line.chunk}"
    if isinstance(line, Scan):
        return f"{what}, scan of {line.length} tokens"
    return f"{what}, {line.tokens} token(s), {line.mode}, batch {line.batch}"


def _columns(line: Decode | Scan) -> Row:
    return {field.name: getattr(line, field.name) for field in fields(line)}


def _inputs(tokens: tuple[int, ...], heads: int, groups: int, device: torch.device) -> dict[str, Any]:
    """Random x, z, dt, B and C, bf16 on a GPU and fp32 on the CPU, and the parameters."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    randn = lambda *shape: torch.randn(*tokens, *shape, device=device).to(dtype)  # noqa: E731
    return {
        "x": randn(heads, P), "z": randn(heads, P), "dt": randn(heads), "B": randn(groups, N), "C": randn(groups, N),
        "A": -torch.rand(heads, device=device) - 0.1, "D": torch.randn(heads, device=device),
        "dt_bias": torch.rand(heads, device=device) - 4,
    }  # fmt: skip


def _check(line: Decode, device: torch.device) -> float:
    """Scan a prompt, then step over a chunk boundary; raise WrongAnswer unless one scan gives the same bits."""
    groups = 1
    heads = max(1, min(line.heads // line.groups, _CHECKED))
    Q, T = line.chunk, line.tokens
    first, steps = Q - 3, 3 + 2 * T
    whole = _inputs((first + steps * T,), heads, groups, device)
    shared = {name: whole.pop(name) for name in ("A", "D", "dt_bias")}
    scan = partial(chunk_scan, chunk_size=Q, dt_softplus=True, **shared)
    expected = scan(**whole)
    buffers = BatchInvariantDecodeBuffers.allocate(
        2, Q, heads, P, groups, N, device, whole["x"].dtype, max_tokens=T, trimmed=True
    )
    state, slots = torch.zeros(2, heads, P, N, device=device), torch.ones(1, dtype=torch.int32, device=device)
    counts = torch.tensor([0, first], dtype=torch.int32, device=device)
    buffers.seed(**{name: value[:first] for name, value in whole.items()}, cu_seqlens=counts, batch_indices=slots)
    for step in range(steps):
        part = slice(first + step * T, first + (step + 1) * T)
        out = batch_invariant_decode_buffered_scan(
            buffers, **{name: value[None, part] for name, value in whole.items()}, **shared, batch_indices=slots,
            ssm_state=state,
        )  # fmt: skip
        if not torch.equal(out[0], expected[part]):
            raise WrongAnswer(f"{_label(line)}: step {step} and one scan over the sequence differ in their bits")
        if T > 1:
            buffers.commit(slots, torch.full_like(slots, T))
    return 0.0


def _step_buffers(line: Decode, device: torch.device) -> dict[str, Any]:
    """Arguments of a step whose lanes have their rows spread over the chunk."""
    inputs = _inputs((line.batch, line.tokens), line.heads, line.groups, device)
    buffers = BatchInvariantDecodeBuffers.allocate(
        line.batch, line.chunk, line.heads, P, line.groups, N, device, inputs["x"].dtype, max_tokens=line.tokens,
        trimmed=True,
    )  # fmt: skip
    for rows in (buffers.x, buffers.dt, buffers.B):
        rows.normal_()
    buffers.num_buffered.copy_(_live_rows(line))
    return {
        "buffers": buffers, **inputs, "batch_indices": torch.randperm(line.batch, device=device).int(),
        "ssm_state": torch.randn(line.batch, line.heads, P, N, device=device),
    }  # fmt: skip


def _live_rows(line: Decode) -> Tensor:
    """Half a chunk for one lane, else spread evenly over the chunk; a draft stays within it."""
    places = line.chunk - line.tokens + 1
    return (torch.arange(line.batch) * places // line.batch + (places // 2 if line.batch == 1 else 0)) % places


def _step_bytes(line: Decode, live: Tensor, element: int) -> int:
    """States once, live rows, tokens in and out, and with one token the folds: as many as rows are added."""
    state = line.heads * P * N * 4
    row = element * (line.heads * P + line.groups * N + line.heads)
    token = element * (3 * line.heads * P + 2 * line.groups * N + line.heads)
    folds = line.batch / line.chunk * (state + line.chunk * row) if line.tokens == 1 else 0
    return int(line.batch * (state + line.tokens * (token + row)) + int(live.sum()) * row + folds)


def _workspace(step: Callable[[], Tensor]) -> int:
    """Most bytes that a step on a GPU holds beside its arguments, among which are the buffers with its output."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


def _run_decode(line: Decode, peers: bool, timer: Timer) -> Row:
    """Check and time one step, or the steps of a chunk."""
    error = _check(line, timer.device)
    state = line.batch * line.heads * P * N * 4
    pools = [_step_buffers(line, timer.device) for _ in range(timer.sets(state))]
    calls = [partial(batch_invariant_decode_buffered_scan, **pool) for pool in pools]
    on_cpu = timer.device.type == "cpu"
    workspace = None if on_cpu else _workspace(calls[0])
    sums = pools[0]["buffers"].sums
    repeats = line.chunk if line.mode == "chunk" else 1
    ways: dict[str, Calls] = {"us": calls * repeats}
    if few := timer.cached_sets(state):
        ways["cached_us"] = calls[:few] * repeats
    times = timer.micros(ways)
    element = pools[0]["x"].element_size()
    moved = _step_bytes(line, _live_rows(line), element)
    floor = moved / timer.ceiling
    row = _columns(line) | {
        "us": times["us"], "cached_us": times.get("cached_us"), "bytes": moved, "floor_us": floor,
        "of_ceiling": floor / times["us"], "workspace_bytes": workspace,
        "sums_bytes": None if sums is None else sums.nbytes, "error": error,
    }  # fmt: skip
    if on_cpu:
        return row | dict.fromkeys(("megatron_us", "plain_us", "peers"))
    sizes = line.chunk, line.heads, line.groups, line.batch, line.tokens
    return row | exact_peers.beside_decode(timer, peers, sizes, pools, _live_rows(line), repeats)


def _run_scan(line: Scan, peers: bool, timer: Timer) -> Row:
    """Check that a split changes no bit, and time the whole."""
    inputs = _inputs((line.length,), line.heads, line.groups, timer.device)
    state = torch.empty(1, line.heads, P, N, device=timer.device)
    run = partial(chunk_scan, chunk_size=line.chunk, dt_softplus=True)
    whole = run(**inputs)
    cut = line.length // (2 * line.chunk) * line.chunk
    per_token = ("x", "z", "dt", "B", "C")
    parts = [{n: v[part] if n in per_token else v for n, v in inputs.items()}
             for part in (slice(0, cut), slice(cut, None))]  # fmt: skip
    pieces = [run(**parts[0], boundary_states=state), run(**parts[1], initial_states=state)]
    if not torch.equal(torch.cat(pieces), whole):
        raise WrongAnswer(f"{_label(line)}: two pieces and the whole differ in their bits")
    moved = sum(inputs[name].nbytes for name in per_token) + whole.nbytes
    calls: list[Callable[[], object]] = [partial(run, **inputs, final_states=state) for _ in range(2)]
    micros = timer.micros({"us": calls})["us"]
    floor = moved / timer.ceiling
    row = _columns(line) | {
        "us": micros, "bytes": moved, "floor_us": floor, "of_ceiling": floor / micros, "error": 0.0,
    }  # fmt: skip
    if timer.device.type == "cpu":
        return row | dict.fromkeys(("mamba_ssm_us", "peers"))
    sizes = line.chunk, line.heads, line.groups, line.length
    return row | exact_peers.beside_scan(timer, peers, sizes, inputs)


def plots(tables: Tables) -> list[Plot]:
    """See ``replayssm.bench``."""
    steps = [row for row in tables.get("exact", []) if row["mode"] == "mix" and row["tokens"] == 1]
    labels = {"us": "replayssm", "megatron_us": "Megatron-Core", "plain_us": "ordinary update"}
    decode = Plot("exact", "Exact decode, one token, fp32 state", "batch", "time over byte floor",
                  _panels(steps, "batch", labels, 4), limit="byte floor")  # fmt: skip
    scans = _panels(tables.get("chunk_scan", []), "length", {"us": "replayssm", "mamba_ssm_us": "mamba_ssm"}, 3)
    scan = Plot("chunk_scan", "chunk_scan of one sequence", "tokens", "time over byte floor", scans, limit="byte floor")
    return [plot for plot in (decode, scan) if plot.panels]


def _panels(rows: list[Row], axis: str, labels: dict[str, str], least: int) -> list[Panel]:
    """A panel for each number of heads and chunk size that has at least so many points."""
    panels = []
    for heads, chunk in dict.fromkeys((row["heads"], row["chunk"]) for row in rows):
        chosen = [row for row in rows if (row["heads"], row["chunk"]) == (heads, chunk)]
        if len(chosen) >= least:
            panels.append(Panel(f"{heads} heads, chunk {chunk}", over_floor(chosen, axis, labels)))
    return panels
