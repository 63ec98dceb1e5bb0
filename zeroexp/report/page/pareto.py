"""Memory against time: points that no other point beats in both lie on the line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from zeroexp.report.columns import MIB
from zeroexp.report.measured_points import Point
from zeroexp.report.page.chart import MANY, Chart, Trace
from zeroexp.report.palette import SERIES, SYMBOLS

# Where a label may stand beside its point: plotly's word, and the label's centre in label widths and heights.
PLACES = {
    "top center": (0.0, 0.9),
    "bottom center": (0.0, -0.9),
    "middle right": (0.6, 0.0),
    "middle left": (-0.6, 0.0),
    "top right": (0.55, 0.8),
    "bottom right": (0.55, -0.8),
    "top left": (-0.55, 0.8),
    "bottom left": (-0.55, -0.8),
}
LETTER, LINE = 0.0105, 0.05  # width and height of a letter, as fractions of the chart


@dataclass(frozen=True)
class Dot:
    point: Point
    milliseconds: float
    mebibytes: float


def pareto_chart(points: Sequence[Point]) -> Chart:
    dots = _dots(points)
    best = frontier(dots)
    data = [_line(best), *_groups(dots)]
    words = (
        "Peak memory of the fullest rank (the most held at one moment where no peak is known) over median step time. "
        f"No point beats these in both: {', '.join(dot.point.name for dot in best) or 'none'}."
    )
    layout = {
        "xaxis": {
            "title": {"text": "ms per step"},
            "range": _range([dot.milliseconds for dot in dots]),
        },
        "yaxis": {
            "title": {"text": "MiB, peak of the fullest rank"},
            "range": _range([dot.mebibytes for dot in dots]),
        },
        "hovermode": "closest",
        "annotations": _labels(dots if len(dots) <= MANY else best, best),
    }
    return Chart("pareto", "Memory against time", words, data if dots else [], layout, 460)


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


def _line(best: Sequence[Dot]) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "not beaten in both",
        "x": [dot.milliseconds for dot in best],
        "y": [dot.mebibytes for dot in best],
        "line": {"shape": "hv", "dash": "dot", "color": "INK", "width": 1.5},
        "hoverinfo": "skip",
    }


def _groups(dots: Sequence[Dot]) -> list[Trace]:
    """Return one trace per implementation in a colour of its own; the symbol is the strategy's."""
    strategies = list(dict.fromkeys(dot.point.run.strategy for dot in dots))
    implementations = list(dict.fromkeys(dot.point.run.implementation for dot in dots))
    traces: list[Trace] = []
    for number, name in enumerate(implementations):
        mine = [dot for dot in dots if dot.point.run.implementation == name]
        symbols = [SYMBOLS[strategies.index(dot.point.run.strategy) % len(SYMBOLS)] for dot in mine]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [dot.milliseconds for dot in mine],
                "y": [dot.mebibytes for dot in mine],
                "text": [dot.point.name for dot in mine],
                "marker": {
                    "size": 11,
                    "color": SERIES[number % len(SERIES)],
                    "symbol": symbols,
                    "line": {"width": 1, "color": "INK"},
                },
                "hovertemplate": "%{text}<br>%{x:,.1f} ms, %{y:,.1f} MiB<extra></extra>",
            }
        )
    return traces


def _steps(places: Sequence[tuple[float, float]]) -> list[tuple[float, float, float, float]]:
    """Return the boxes of the dotted line's pieces: to the right, then down, from each dot to the next."""
    boxes: list[tuple[float, float, float, float]] = []
    for (x, y), (next_x, next_y) in pairwise(sorted(places)):
        boxes.append(((x + next_x) / 2, y, next_x - x, 0.01))
        boxes.append((next_x, (y + next_y) / 2, 0.005, abs(y - next_y)))
    return boxes


def _labels(dots: Sequence[Dot], best: Sequence[Dot]) -> list[dict[str, object]]:
    """Return the names of dots, each at the side where it covers least of other names and dots."""
    if not dots:
        return []
    left, right = _range([dot.milliseconds for dot in dots])
    bottom, top = _range([dot.mebibytes for dot in dots])
    places = [
        ((d.milliseconds - left) / (right - left), (d.mebibytes - bottom) / (top - bottom))
        for d in dots
    ]
    taken = [(x, y, 0.02, 0.03) for x, y in places]
    taken += _steps([place for dot, place in zip(dots, places, strict=True) if dot in best])
    labels: list[dict[str, object]] = []
    for dot, (x, y) in zip(dots, places, strict=True):
        width = LETTER * len(dot.point.name)
        boxes = {
            place: (x + right_of * width, y + above * LINE, width, LINE)
            for place, (right_of, above) in PLACES.items()
        }
        place = min(boxes, key=lambda place: sum(_covers(boxes[place], box) for box in taken))
        taken.append(boxes[place])
        labels.append(_label(dot, place))
    return labels


def _label(dot: Dot, place: str) -> dict[str, object]:
    vertical, horizontal = place.split()
    return {
        "x": dot.milliseconds,
        "y": dot.mebibytes,
        "text": dot.point.name,
        "showarrow": False,
        "font": {"size": 11},
        "xanchor": {"left": "right", "right": "left", "center": "center"}[horizontal],
        "yanchor": {"top": "bottom", "bottom": "top", "middle": "middle"}[vertical],
        "xshift": {"left": -7, "right": 7, "center": 0}[horizontal],
        "yshift": {"top": 6, "bottom": -6, "middle": 0}[vertical],
    }


def _covers(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Return the area two boxes (centre, width, height) share."""
    wide = min(one[0] + one[2] / 2, other[0] + other[2] / 2) - max(
        one[0] - one[2] / 2, other[0] - other[2] / 2
    )
    high = min(one[1] + one[3] / 2, other[1] + other[3] / 2) - max(
        one[1] - one[3] / 2, other[1] - other[3] / 2
    )
    # A label outside of the chart would be cut off.
    outside = 1.0 if one[0] + one[2] / 2 > 1.05 or one[0] - one[2] / 2 < -0.1 else 0.0
    return max(0.0, wide) * max(0.0, high) + outside


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis around values, with room for labels on both sides."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = 0.15 * (high - low) or 0.1 * (high or 1.0)
    return low - room, high + room
