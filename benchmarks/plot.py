"""Draw the committed results: ``python benchmarks/plot.py`` writes PNGs beside the CSV files that it knows."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

import generation

from replayssm.bench import FAMILIES
from replayssm.bench.plot import draw
from replayssm.bench.report import read_csv

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    modules = [generation, *(import_module(f"replayssm.bench.{name}") for name in (*FAMILIES, "generate"))]
    for folder in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        tables = {path.stem: read_csv(path)[1] for path in sorted(folder.glob("*.csv"))}
        for module in modules:
            for plot in module.plots(tables):
                print(draw(plot, folder).relative_to(RESULTS.parent.parent))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help, and nothing else
    main()
