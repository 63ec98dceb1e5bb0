"""Memory against time: points that no other point beats in both lie on the line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroexp.report.columns import MIB
from zeroexp.report.measured_points import Point
from zeroexp.report.page.chart import INK, MANY, Chart, Trace, axis_of, line_chart, scatter
from zeroexp.report.palette import SERIES, SYMBOLS

# Where a name may stand beside its point: the centre of the name, in its own widths and heights.
PLACES = {
    **{"top center": (0.0, 0.9), "bottom center": (0.0, -0.9)},
    **{"middle right": (0.6, 0.0), "middle left": (-0.6, 0.0)},
    **{"top right": (0.55, 0.8), "bottom right": (0.55, -0.8)},
    **{"top left": (-0.55, 0.8), "bottom left": (-0.55, -0.8)},
}
LETTER, LINE = 0.0105, 0.05  # width and height of a letter, as fractions of the chart
Box = tuple[float, float, float, float]  # left, bottom, right, top, as fractions of the chart


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
    """Return where each dot's name stands: at the side where it covers least of other names and dots."""
    left, right = _range([dot.milliseconds for dot in dots])
    bottom, top = _range([dot.mebibytes for dot in dots])
    centres = [
        ((d.milliseconds - left) / (right - left), (d.mebibytes - bottom) / (top - bottom))
        for d in dots
    ]
    taken = [_box(x, y, 0.02, 0.03) for x, y in centres]
    places: dict[str, str] = {}
    for dot, (x, y) in zip(dots, centres, strict=True):
        width = LETTER * len(dot.point.name)
        boxes = {
            place: _box(x + across * width, y + up * LINE, width, LINE)
            for place, (across, up) in PLACES.items()
        }
        cost = {
            place: sum(_shared(box, other) for other in taken) + (box[2] > 1.05 or box[0] < -0.1)
            for place, box in boxes.items()  # a name that leaves the chart would be cut off
        }
        place = min(boxes, key=lambda place: cost[place])
        places[dot.point.name] = place
        taken.append(boxes[place])
    return places


def _box(x: float, y: float, width: float, height: float) -> Box:
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _shared(one: Box, other: Box) -> float:
    """Return the area that two boxes share."""
    across, up = (min(one[n + 2], other[n + 2]) - max(one[n], other[n]) for n in (0, 1))
    return max(0.0, across) * max(0.0, up)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis around values, with room for names on both sides."""
    low, high = min(values), max(values)
    room = 0.15 * (high - low) or 0.1 * (high or 1.0)
    return low - room, high + room
