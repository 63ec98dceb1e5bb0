"""Draw a sweep's memory after backward, per point and kind, as an SVG made only from run folders.

Only this file imports matplotlib, which MLflow depends on, and it is imported only when a
picture is wanted. The text of the SVG is text, and its background is opaque, so that it reads the same on a light and
on a dark page. The same runs give the same file, byte for byte, under one version of matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zeroexp.config.keys import ConfigError
from zeroexp.measure.record import KINDS
from zeroexp.report.columns import MIB
from zeroexp.report.measured_points import MOMENT, Point
from zeroexp.report.palette import KIND_COLOURS, KIND_NAMES

PEAK = "peak of any step"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "zeroexp",  # fixes the identifiers inside the file
    "font.family": "sans-serif",
    "font.size": 10,
}
BAR, GAP = 0.8, 0.6  # heights in rows: a bar, and the space between two strategies
SMALL = 20  # MiB: below this length of the longest bar, numbers have decimals
NARROWEST = 0.03  # a part narrower than this fraction of the longest bar shows no number


@dataclass(frozen=True)
class Bar:
    """The memory of one point of the sweep, under a name that identifies it."""

    name: str
    bytes_by_kind: dict[str, int]
    peak: float | None  # most bytes allocated at once in any step; None if unknown

    @property
    def total(self) -> int:
        return sum(self.bytes_by_kind.values())


def save_figure(points: Sequence[Point], path: Path) -> None:
    """Write the picture of one sweep. Raises ConfigError if the runs allow no picture or the file cannot be written."""
    write_figure(lambda: draw_figure(points), path)


def write_figure(draw: Callable[[], Figure], path: Path) -> None:
    """Write what `draw` makes in the style of this file. Raises ConfigError if `path` cannot be written."""
    if path.suffix != ".svg":
        raise ConfigError(f"--figure {path}: the picture is an SVG; use a name that ends in .svg")
    with rc_context(STYLE):
        figure = draw()
        try:
            figure.savefig(path, metadata={"Date": None, "Creator": None})
        except OSError as error:
            raise ConfigError(
                f"--figure {path}: {error.strerror}; use a file in a folder that you may write to"
            ) from None


def bars(points: Sequence[Point]) -> list[list[Bar]]:
    """Return the finished points in the order of `points`: one list for each strategy.

    Raises ConfigError if there is none, or if a summary does not hold the memory at MOMENT.
    """
    groups: dict[str, list[Bar]] = {}
    for point in points:
        if point.summary is None:
            continue
        memory = point.summary.memory
        if MOMENT not in memory.fullest_at:
            raise ConfigError(
                f"--figure: {point.run.folder}/summary.json does not say what was held after backward; "
                "run the sweep again with this version"
            )
        peak = memory.peak.fullest if memory.peak else None
        bar = Bar(point.name, memory.fullest_at[MOMENT], peak)
        groups.setdefault(point.run.strategy, []).append(bar)
    if not groups:
        raise ConfigError("--figure: no run of the sweep came to its end; run them again first")
    return list(groups.values())


def draw_figure(points: Sequence[Point]) -> Figure:
    """Draw horizontal bars, cut by kind, with a space between two strategies and a line at each peak; see `bars`."""
    groups = bars(points)
    shown = [bar for group in groups for bar in group]
    rows: list[float] = []
    for number, group in enumerate(groups):
        rows += [len(rows) + index + GAP * number for index in range(len(group))]
    longest = max(max(bar.total, bar.peak or 0) for bar in shown) / MIB
    figure = Figure(figsize=(9, 1.3 + 0.26 * rows[-1]), facecolor="white", layout="constrained")
    axes = figure.add_subplot(frame_on=False)
    axes.set_title(_title(points), loc="left", pad=26, weight="bold", fontsize="medium")
    axes.set(yticks=rows, yticklabels=[bar.name for bar in shown], xlim=(0, 1.13 * longest))
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    axes.set_ylim(rows[-1] + 0.5, rows[0] - 0.5)
    _stack(axes, shown, rows, longest)
    axes.legend(
        handles=[*axes.containers, *axes.collections],
        **{"ncols": len(KINDS) + 1, "columnspacing": 1.2, "handlelength": 1.2, "fontsize": "small"},
        **{"loc": "lower left", "bbox_to_anchor": (-0.015, 0.99), "frameon": False},
    )
    return figure


def _stack(axes: Axes, shown: Sequence[Bar], rows: Sequence[float], longest: float) -> None:
    """Draw the kinds that any point holds one after the other, each with its MiB; sum and peak stand behind them."""
    form = ",.0f" if longest >= SMALL else ",.2f"
    ends = [0.0] * len(shown)
    for kind in KINDS:
        held = [bar.bytes_by_kind.get(kind, 0) / MIB for bar in shown]
        if any(held):
            drawn = axes.barh(
                rows, held, BAR, ends, color=KIND_COLOURS[kind], label=KIND_NAMES[kind]
            )
            numbers = [format(mib, form) if mib > NARROWEST * longest else "" for mib in held]
            axes.bar_label(drawn, numbers, label_type="center", fontsize="small")
            ends = [end + mib for end, mib in zip(ends, held, strict=True)]
    peaks = {row: bar.peak / MIB for row, bar in zip(rows, shown, strict=True) if bar.peak}
    axes.scatter(list(peaks.values()), list(peaks), marker="|", s=180, color="black", label=PEAK)
    for row, end in zip(rows, ends, strict=True):
        peak = f", peak {peaks[row]:{form}}" if row in peaks else ""
        axes.text(max(end, peaks.get(row, 0)), row, f"  {end:{form}}{peak}", va="center")


def _title(points: Sequence[Point]) -> str:
    """Return the title: moment, rank, model and world size. Whatever differs between bars stands beside them."""
    done = [point.run for point in points if point.summary]
    models = " and ".join(dict.fromkeys(run.config["model.name"] for run in done))
    sizes = sorted({run.world_size for run in done})
    rank = f"world size {' and '.join(map(str, sizes))}, the rank that holds most"
    return f"Memory after backward, before the optimizer step\nMiB, model {models}, {rank}"
