"""Memory against time: points that no other point beats in both lie on the line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot

from zeroexp.report.columns import MIB
from zeroexp.report.measured_points import Point
from zeroexp.report.page.chart import INK, MANY, Chart, Trace, axis_of, line_chart, scatter
from zeroexp.report.palette import SERIES, SYMBOLS


@dataclass(frozen=True)
class Dot:
    point: Point
    milliseconds: float
    mebibytes: float


def pareto_chart(points: Sequence[Point]) -> Chart:
    dots = _dots(points)
    best = frontier(dots)
    caption = (
        "Peak memory of the fullest rank (the most held at one moment where no peak is known) over median step time. "
        f"No point beats these in both: {', '.join(dot.point.name for dot in best) or 'none'}."
    )
    if not dots:
        return Chart("pareto", "Memory against time", caption)
    across, up = ([dot.milliseconds for dot in dots], [dot.mebibytes for dot in dots])
    line = scatter(
        "not beaten in both",
        [dot.milliseconds for dot in best],
        [dot.mebibytes for dot in best],
        "lines",
        line={"shape": "hv", "dash": "dot", "color": INK, "width": 1.5},
        hoverinfo="skip",
    )
    places = _places(dots if len(dots) <= MANY else best)
    return line_chart(
        "pareto",
        "Memory against time",
        caption,
        [line, *_groups(dots, places)],
        460,
        xaxis=axis_of("ms per step", range=_range(across)),
        yaxis=axis_of("MiB, peak of the fullest rank", range=_range(up)),
    )


def frontier(dots: Sequence[Dot]) -> list[Dot]:
    """Return the dots, by time, that no other dot beats in memory without being slower."""
    best: list[Dot] = []
    for dot in sorted(dots, key=lambda dot: (dot.milliseconds, dot.mebibytes)):
        if not best or dot.mebibytes < best[-1].mebibytes:
            best.append(dot)
    return best


def _dots(points: Sequence[Point]) -> list[Dot]:
    dots: list[Dot] = []
    for point in points:
        if point.summary and point.step_seconds:
            memory = point.summary.memory
            held = (memory.peak or memory.total).fullest
            dots.append(Dot(point, 1e3 * point.step_seconds, held / MIB))
    return dots


def _groups(dots: Sequence[Dot], places: dict[str, str]) -> list[Trace]:
    """Return one trace per implementation in a colour of its own; the symbol is the strategy's."""
    strategies = list(dict.fromkeys(dot.point.run.strategy for dot in dots))
    implementations = dict.fromkeys(dot.point.run.implementation for dot in dots)
    traces: list[Trace] = []
    for number, name in enumerate(implementations):
        mine = [dot for dot in dots if dot.point.run.implementation == name]
        names = [dot.point.name for dot in mine]
        order = [strategies.index(dot.point.run.strategy) for dot in mine]
        marker = {
            **{
                "size": 11,
                "color": SERIES[number % len(SERIES)],
                "line": {"width": 1, "color": INK},
            },
            "symbol": [SYMBOLS[each % len(SYMBOLS)] for each in order],
        }
        words = {
            "text": [name if name in places else "" for name in names],
            "textposition": [places.get(name, "top center") for name in names],
            **{"textfont": {"size": 11}, "hovertext": names},
            "hovertemplate": "%{hovertext}<br>%{x:,.1f} ms, %{y:,.1f} MiB<extra></extra>",
        }
        across, up = [dot.milliseconds for dot in mine], [dot.mebibytes for dot in mine]
        traces.append(scatter(name, across, up, "markers+text", marker=marker, **words))
    return traces


def _places(dots: Sequence[Dot]) -> dict[str, str]:
    """Return where each dot's name stands: above or below it, away from the nearest other dot."""
    left, right = _range([dot.milliseconds for dot in dots])
    bottom, top = _range([dot.mebibytes for dot in dots])
    places: dict[str, str] = {}
    for dot in dots:
        distances = {
            hypot(
                (other.milliseconds - dot.milliseconds) / (right - left),
                (other.mebibytes - dot.mebibytes) / (top - bottom),
            ): other
            for other in dots
            if other is not dot
        }
        nearest = distances[min(distances)] if distances else dot
        above = (dot.mebibytes, dot.milliseconds) >= (nearest.mebibytes, nearest.milliseconds)
        places[dot.point.name] = "top center" if above else "bottom center"
    return places


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis around values, with room for names on both sides."""
    low, high = min(values), max(values)
    room = 0.15 * (high - low) or 0.1 * (high or 1.0)
    return low - room, high + room
