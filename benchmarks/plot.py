"""Draw the committed results: ``python benchmarks/plot.py`` writes a PNG beside each CSV that it knows."""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
OURS, OTHERS, FLOOR = "#1b6ca8", "#9aa5b1", "#d98324"


def main() -> None:
    for draw, source in ((generation, "cpu/generation.csv"), (step, "h200/mamba.csv")):
        path = RESULTS / source
        rows = read(path)
        figure = draw(rows)
        figure.savefig(path.with_suffix(".png"), dpi=130, bbox_inches="tight")
        print(path.with_suffix(".png").relative_to(RESULTS.parent.parent))


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def generation(rows: list[dict[str, str]]) -> plt.Figure:
    """Speed of every prompt, in units of transformers' own generate, the slowest first; a panel per model."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = plt.subplots(1, len(names), figsize=(8 * len(names), 3.6), squeeze=False, sharey=True)
    for axes, name in zip(panels[0], names, strict=True):
        chosen = sorted((row for row in rows if row["model"] == name), key=lambda row: float(row["x transformers"]))
        drafts = [float(row["x transformers"]) for row in chosen]
        plain = [d / float(row["x replay"]) for d, row in zip(drafts, chosen, strict=True)]
        places = range(len(chosen))
        axes.bar(places, drafts, color=OURS, label="replay with look-up drafts")
        axes.bar(places, plain, color=OTHERS, label="replay without drafts")
        axes.axhline(1, color=FLOOR, linewidth=1.2, label="transformers' own generate")
        axes.set_xticks(places, [row["prompt"].replace("held-out ", "") for row in chosen], fontsize=8)
        axes.set_xlabel("held-out prompt")
        axes.set_title(f"{name}, one CPU thread, greedy, 256 new tokens", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("tokens/s over transformers")
    panels[0][0].legend(frameon=False, fontsize=8)
    return figure


def step(rows: list[dict[str, str]]) -> plt.Figure:
    """Time of a Mamba-2 step over the byte floor, ours and FlashInfer's, by state type and tokens."""
    cases = [("bf16", "1"), ("bf16", "4"), ("fp32", "1"), ("fp32", "4")]
    figure, panels = plt.subplots(1, len(cases), figsize=(11, 3), sharey=True)
    for axes, (state, tokens) in zip(panels, cases, strict=True):
        chosen = [
            row for row in rows
            if (row["state"], row["tokens"], row["mode"], row["heads"]) == (state, tokens, "mix", "128")
        ]  # fmt: skip
        batches = [int(row["batch"]) for row in chosen]
        for column, colour, label in (("flashinfer_us", OTHERS, "FlashInfer 0.7.4"), ("us", OURS, "replayssm")):
            ratio = [float(row[column]) / float(row["byte_floor_us"]) for row in chosen]
            axes.plot(batches, ratio, "o-", color=colour, label=label, markersize=4)
        axes.axhline(1, color=FLOOR, linewidth=1.2, label="byte floor")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        axes.set_xticks(batches, map(str, batches), fontsize=7)
        axes.set_title(f"{state} state, {tokens} token{'s' if tokens != '1' else ''}", fontsize=10)
        axes.set_xlabel("batch")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("time over byte floor")
    panels[-1].legend(frameon=False, fontsize=8)
    figure.suptitle("checkpointing_ssu, 128 heads, 8 groups, 64 x 128, one NVIDIA H200", fontsize=10, y=1.04)
    return figure


if __name__ == "__main__":
    main()
