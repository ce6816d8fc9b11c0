"""Pictures of tables. Only `draw` needs matplotlib, the extra ``bench``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from replayssm.bench import Row

_OURS, _LIMIT = ("#1b6ca8", "#7db3dc"), "#d98324"
_PEERS = ("#9aa5b1", "#5f6b7a", "#c3cad3")


@dataclass(frozen=True)
class Series:
    """One curve or one colour of bars.

    Attributes:
        label: its name in the legend.
        x: places on the horizontal axis; for bars, their names.
        y: values.
        ours: drawn in a colour of this library, others in shades of grey.
    """

    label: str
    x: Sequence[float | str]
    y: Sequence[float]
    ours: bool = False


@dataclass(frozen=True)
class Panel:
    """One diagram of a picture: its title and its series."""

    title: str
    series: Sequence[Series]


@dataclass(frozen=True)
class Plot:
    """One picture: panels side by side with the same axes.

    Attributes:
        name: name of the file, without the ending.
        title: above everything.
        x_label: of every panel.
        y_label: of the first one.
        panels: from left to right.
        limit: name of the line at 1, if there is one.
        bars: bars at named places instead of curves over logarithmic axes.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    panels: Sequence[Panel]
    limit: str | None = None
    bars: bool = False


def over_floor(rows: Sequence[Row], axis: str, labels: Mapping[str, str]) -> list[Series]:
    """Return a curve of time over byte floor for each column that has numbers.

    Args:
        rows: of a table, in any order.
        axis: the column of the horizontal axis.
        labels: names of the curves by column; that of column ``us`` is ours.

    Example:
        >>> rows = [{"batch": 4, "us": 6.0, "floor_us": 3.0}, {"batch": 1, "us": 5.0, "floor_us": 1.0}]
        >>> [(curve.x, curve.y) for curve in over_floor(rows, "batch", {"us": "ours"})]
        [([1, 4], [5.0, 2.0])]
    """
    ordered, curves = sorted(rows, key=lambda row: row[axis]), []
    for column, label in labels.items():
        timed = [row for row in ordered if row[column] is not None]
        places, heights = [row[axis] for row in timed], [row[column] / row["floor_us"] for row in timed]
        curves += [Series(label, places, heights, ours=column == "us")] if timed else []
    return curves


def draw(plot: Plot, folder: Path) -> Path:
    """Write the picture as a PNG and return its path.

    Args:
        plot: what to draw.
        folder: where; it must exist.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    count = len(plot.panels)
    width = 6.0 if count == 1 else 2.75
    if plot.bars:
        width = max(2.75, 0.35 * max(len(series.x) for panel in plot.panels for series in panel.series))
    figure, panels = plt.subplots(1, count, figsize=(width * count, 3.3), sharey=True, squeeze=False)
    colours = _colours(plot)
    for axes, panel in zip(panels[0], plot.panels, strict=True):
        thickness = 0.8 / len(panel.series)
        for number, series in enumerate(panel.series):
            colour = colours[series.label]
            if plot.bars:
                places = [place + (number + 0.5) * thickness - 0.4 for place in range(len(series.x))]
                axes.bar(places, series.y, thickness, color=colour, label=series.label)
                axes.set_xticks(range(len(series.x)), series.x, fontsize=8)
            else:
                axes.plot(series.x, series.y, "o-", color=colour, label=series.label, markersize=4)
        if plot.limit is not None:
            axes.axhline(1, color=_LIMIT, linewidth=1.2, label=plot.limit)
        if not plot.bars:
            _logarithmic(axes, panel)
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlabel(plot.x_label)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel(plot.y_label)
    known = {
        label: handle for axes in panels[0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    panels[0][-1].legend(known.values(), known, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(plot.title, fontsize=10, y=1.02)
    path = folder / f"{plot.name}.png"
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
    return path


def _colours(plot: Plot) -> dict[str, str]:
    """One colour for each label, in all panels."""
    shades = {True: itertools.cycle(_OURS), False: itertools.cycle(_PEERS)}
    labels = {series.label: series.ours for panel in plot.panels for series in panel.series}
    return {label: next(shades[ours]) for label, ours in labels.items()}


def _logarithmic(axes, panel: Panel) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    places = sorted({place for series in panel.series for place in series.x})
    axes.set_xscale("log", base=2)
    crowded = len(places) > 6
    axes.set_xticks(places, ["" if crowded and number % 2 else str(p) for number, p in enumerate(places)], fontsize=7)
    axes.minorticks_off()
    axes.set_yscale("log", base=2)
    highest = max((value for series in panel.series for value in series.y), default=1)
    ticks = [2**power for power in range(12) if 2 ** (power - 1) < highest]
    axes.set_yticks(ticks, map(str, ticks))
