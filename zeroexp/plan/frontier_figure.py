"""`--figure FILE.svg`: planned peaks over planned step times as a picture, with the frontier as a line."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from matplotlib.figure import Figure

from zeroexp.config.keys import ConfigError
from zeroexp.plan.frontier import Dot, Work, frontier
from zeroexp.report.figure import write_figure
from zeroexp.report.palette import SERIES

GIB = 2**30


def save_frontier(dots: Sequence[Dot], path: Path) -> None:
    """Write the picture. Raises ConfigError if the file can not be written, or if there is nothing to draw."""
    if not dots:
        raise ConfigError(f"--figure {path}: no point was rehearsed, so there is nothing to draw")
    write_figure(lambda: draw_frontier(dots), path)


def draw_frontier(dots: Sequence[Dot]) -> Figure:
    """Draw a dot for each point under its name, and for each work the line that no point lies left below of."""
    figure = Figure(figsize=(9, 5.5), facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    best = frontier(dots)
    works = list(dict.fromkeys(dot.work for dot in best))
    for work, line in groupby(best, key=lambda dot: dot.work):
        mine, colour = list(line), SERIES[works.index(work) % len(SERIES)]
        times, peaks = _milliseconds(mine), _gibibytes(mine)
        axes.plot(times, peaks, ":", drawstyle="steps-post", color=colour, label=_name(work))
        every = [dot for dot in dots if dot.work == work]
        axes.plot(_milliseconds(every), _gibibytes(every), "o", color=colour)
    for dot in dots:
        weight = "bold" if dot in best else "normal"
        at = (1e3 * dot.seconds, dot.peak_bytes / GIB)
        axes.annotate(f" {dot.outcome.name}", at, weight=weight, fontsize="small")
    for limit in {dot.outcome.memory_gib for dot in dots if dot.outcome.memory_gib}:
        axes.axhline(limit, color="black", linewidth=0.8)
        axes.annotate(f"limit, {limit:g} GiB", (0.0, limit), xycoords=("axes fraction", "data"))
    axes.set(
        xlabel="ms of a step, predicted", ylabel="GiB at the peak of the fullest rank, predicted"
    )
    axes.legend(frameon=False, fontsize="small")
    return figure


def _name(work: Work) -> str:
    samples = f"{work.global_batch_size} samples of {work.seq_len} a step"
    return f"{work.model}, {work.world_size} ranks, {samples}"


def _milliseconds(dots: Sequence[Dot]) -> list[float]:
    return [1e3 * dot.seconds for dot in dots]


def _gibibytes(dots: Sequence[Dot]) -> list[float]:
    return [dot.peak_bytes / GIB for dot in dots]
