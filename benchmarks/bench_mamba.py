"""The Mamba-2 ops on one GPU: time, share of the copy ceiling of the same run, and FlashInfer's times beside them.

``python benchmarks/bench_mamba.py`` checks an answer, then times ``checkpointing_ssu`` (hold: 8 live rows and no flush;
mix: live rows spread over 0..16, as in a server; flush: every request) and ``replayssm_materialize``. FlashInfer's
columns are what 0.7.4 took on an H200 (best of its kernels, same shapes and way of timing); they are blank for other
shapes. Head dim 64, state dim 128, window 16, bf16 inputs. Writes benchmarks/results/h200/mamba.csv and
materialize.csv.
"""

from __future__ import annotations

import argparse
import csv
from functools import partial

import torch
from results import ROOT
from timing import copy_ceiling, graph_time

from replayssm.mamba import checkpointing_ssu, replayssm_materialize
from replayssm.rounding import encode
from replayssm.testing import using

P, N, WINDOW, LAYERS = 64, 128, 16, 24
BATCHES = (1, 8, 32, 128, 256)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
# FlashInfer 0.7.4, microseconds: mix by batch; hold and flush at batch 256.
FLASHINFER = {
    ("bf16", 1): ((5.2, 12.9, 36.4, 119.6, 233.1), 221.8, 375.8),
    ("bf16", 4): ((5.1, 12.6, 38.0, 131.9, 261.4), 225.3, 381.4),
    ("fp32", 1): ((5.7, 17.2, 53.9, 180.5, 348.6), 328.4, 654.1),
    ("fp32", 4): ((5.7, 18.0, 53.9, 194.8, 383.7), 327.0, 657.6),
}
# Its time for prefix 8 over the time that a copy of the states takes, by batch.
FLASHINFER_MATERIALIZE = {"bf16": {1: 1.66, 16: 1.29, 64: 1.29}, "fp32": {1: 1.49, 16: 1.23, 64: 1.22}}


def peer(state: str, seq_len: int, mode: str, batch: int, heads: int) -> float | str:
    if (state, seq_len) not in FLASHINFER or heads != 128 or (mode != "mix" and batch != 256):
        return ""
    mix, hold, flush = FLASHINFER[state, seq_len]
    return mix[BATCHES.index(batch)] if mode == "mix" else hold if mode == "hold" else flush


def step_arguments(batch: int, heads: int, groups: int, seq_len: int, state: str) -> dict:
    d, ring_len = {"device": "cuda"}, WINDOW + seq_len
    bf16 = lambda *shape: torch.randn(*shape, **d).bfloat16()  # noqa: E731
    codes, scale = encode(torch.randn(batch, heads, P, N, **d), DTYPES[state])
    return {
        "state": codes, "state_scale": scale, "x_cache": bf16(batch, heads, ring_len, P),
        "B_cache": bf16(batch, groups, ring_len, N), "dt_cache": torch.rand(batch, heads, ring_len, **d) * 0.1,
        "ring_start": torch.zeros(batch, dtype=torch.int32, **d), "x": bf16(batch, seq_len, heads, P),
        "prev_num_accepted_tokens": torch.zeros(batch, dtype=torch.int32, **d),
        "dt": bf16(batch, seq_len, heads, 1).expand(-1, -1, -1, P),
        "A": (-torch.rand(heads, 1, 1, **d) - 1).expand(-1, P, N), "B": bf16(batch, seq_len, groups, N),
        "C": bf16(batch, seq_len, groups, N), "out": bf16(batch, seq_len, heads, P),
        "D": bf16(heads, 1).expand(-1, P), "dt_bias": (torch.rand(heads, 1, **d) - 4).bfloat16().expand(-1, P),
        "dt_softplus": True, "state_batch_indices": torch.randperm(batch, **d).to(torch.int32),
    }  # fmt: skip


def live_rows(mode: str, batch: int) -> torch.Tensor:
    rows = torch.arange(batch, device="cuda") % (WINDOW + 1)
    return rows if mode == "mix" else torch.full_like(rows, 8 if mode == "hold" else WINDOW)


def step_bytes(mode: str, batch: int, heads: int, groups: int, seq_len: int, state: str) -> float:
    """Bytes that a step must move: states, live rows and their dt, tokens in, rows and outputs out."""
    live = live_rows(mode, batch).double()
    passes = batch + int((live + seq_len > WINDOW).sum())
    rows = float(live.sum()) * (heads * (2 * P + 4) + groups * 2 * N)
    tokens = batch * seq_len * (heads * (3 * 2 * P + 8) + groups * 4 * 2 * N)
    return (
        passes * heads * (P * N * DTYPES[state].itemsize + (4 * P if state in ("int8", "fp8") else 0)) + rows + tokens
    )


def check() -> None:
    """Compare one small mixed batch with the fp64 reference before anything is timed."""
    arguments = step_arguments(5, 16, 2, 4, "bf16")
    arguments["prev_num_accepted_tokens"] = torch.tensor([16, 0, 5, 13, 12], dtype=torch.int32, device="cuda")
    host = {
        k: v.cpu().clone() if isinstance(v, torch.Tensor) and 0 not in v.stride() else v for k, v in arguments.items()
    }
    for name in ("dt", "A", "D", "dt_bias"):
        core = arguments[name][(..., *(slice(0, 1) if s == 0 else slice(None) for s in arguments[name].stride()))]
        host[name] = core.cpu().expand(arguments[name].shape)
    with using("reference"):
        expected = checkpointing_ssu(**host)
    actual = checkpointing_ssu(**arguments).cpu()
    error = float((actual.double() - expected.double()).norm() / expected.double().norm())
    print(f"checked: relative error {error:.1e} against fp64")
    assert error < 4e-3


def bench_step(ceiling: float) -> list[dict]:
    cases = [(s, t, m, b, 128, 8) for s in ("bf16", "fp32") for t in (1, 4) for m, b in step_points()]
    cases += [(s, t, "mix", 256, 128, 8) for s in ("int8", "fp8") for t in (1, 4)]
    cases += [("bf16", t, "mix", b, 16, 1) for t in (1, 4) for b in (1, 16, 64, 256)]
    rows, pools, made = [], [], None
    for state, seq_len, mode, batch, heads, groups in cases:
        shape = (batch, heads, groups, seq_len, state)
        if made != shape:
            one = batch * heads * P * N * DTYPES[state].itemsize
            pools = []  # frees the last ones first
            pools = [step_arguments(*shape) for _ in range(max(1, min(24, int(4e8 // one) + 1)))]
            made = shape
        for pool in pools:
            pool["prev_num_accepted_tokens"].copy_(live_rows(mode, batch))
        micro = graph_time([lambda pool=pool: checkpointing_ssu(**pool) for pool in pools])
        floor = step_bytes(mode, batch, heads, groups, seq_len, state) / ceiling
        rows.append({
            "state": state, "heads": heads, "groups": groups, "tokens": seq_len, "mode": mode, "batch": batch,
            "us": round(micro, 2), "byte_floor_us": round(floor, 2), "of_ceiling": round(floor / micro, 3),
            "flashinfer_us": peer(state, seq_len, mode, batch, heads),
        })  # fmt: skip
        print(*rows[-1].values(), sep="\t", flush=True)
    return rows


def step_points() -> list[tuple[str, int]]:
    return [*(("mix", batch) for batch in BATCHES), ("hold", 256), ("flush", 256)]


def bench_materialize(ceiling: float, heads: int = 128, groups: int = 8) -> list[dict]:
    rows = []
    for state in ("bf16", "fp32"):
        for batch in (1, 16, 64):
            pool = [step_arguments(2 * batch, heads, groups, 1, state) for _ in range(LAYERS)]
            a = [layer["A"][:, 0, 0].contiguous() for layer in pool]
            int64 = lambda values: torch.tensor(values, device="cuda")  # noqa: E731
            tables: list[torch.Tensor] = []
            for name in ("state", "x_cache", "B_cache", "dt_cache"):
                tables += [
                    int64([layer[name].data_ptr() for layer in pool]),
                    int64([layer[name].stride(0) for layer in pool]),
                ]
            tables += [int64([t.data_ptr() for t in a]), int64([0] * LAYERS), int64([0] * LAYERS)]
            request = torch.arange(batch, dtype=torch.int32, device="cuda")
            src = request.repeat(LAYERS, 1).contiguous()
            sizes = {"dim": P, "dstate": N, "num_heads": heads, "heads_per_group": heads // groups}
            for prefix in (0, 1, 8, 16):
                count = torch.full_like(request, prefix)
                call = partial(
                    replayssm_materialize, *tables, src, src + batch, torch.zeros_like(request), count, request,
                    state_dtype=DTYPES[state], input_dtype=torch.bfloat16, matrixA_dtype=torch.float32,
                    max_window=16, ring_buffer_len=17, **sizes,
                )  # fmt: skip
                micro = graph_time([call] * 3)
                floor = 2 * LAYERS * batch * heads * P * N * DTYPES[state].itemsize / ceiling
                rows.append({
                    "state": state, "layers": LAYERS, "heads": heads, "prefix": prefix, "batch": batch,
                    "us": round(micro, 1), "copy_floor_us": round(floor, 1), "over_floor": round(micro / floor, 3),
                    "flashinfer_over_floor": FLASHINFER_MATERIALIZE[state][batch] if prefix == 8 else "",
                })  # fmt: skip
                print(*rows[-1].values(), sep="\t", flush=True)
    return rows


def write(name: str, rows: list[dict], ceiling: float, folder: str) -> None:
    path = ROOT / "benchmarks" / "results" / folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.write(
            f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, copy ceiling {ceiling / 1e6:.3f} TB/s\n"
        )
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="h200", help="of the results")
    folder = parser.parse_args().folder
    torch.manual_seed(0)
    check()
    ceiling = copy_ceiling()
    print(f"copy ceiling {ceiling / 1e6:.3f} TB/s")
    write("mamba.csv", bench_step(ceiling), ceiling, folder)
    write("materialize.csv", bench_materialize(ceiling), ceiling, folder)


if __name__ == "__main__":
    main()
