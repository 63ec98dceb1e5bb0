"""Memory against time: points that no other point beats in both lie on the line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from zeroexp.report.columns import MIB
from zeroexp.report.measured_points import Point
from zeroexp.report.page.chart import INK, MANY, Chart, Trace, axis, scatter
from zeroexp.report.palette import SERIES, SYMBOLS

# Where a name may stand beside its point: plotly's word, and the centre of the name in its own widths and heights.
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
Box = tuple[float, float, float, float]  # centre, width and height, as fractions of the chart


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
    layout = {
        "xaxis": axis("ms per step", range=_range(across)),
        "yaxis": axis("MiB, peak of the fullest rank", range=_range(up)),
        "hovermode": "closest",
    }
    line = scatter(
        "not beaten in both",
        [dot.milliseconds for dot in best],
        [dot.mebibytes for dot in best],
        "lines",
        line={"shape": "hv", "dash": "dot", "color": INK, "width": 1.5},
        hoverinfo="skip",
    )
    places = _places(dots if len(dots) <= MANY else best, best)
    return Chart(
        "pareto", "Memory against time", caption, [line, *_groups(dots, places)], layout, 460
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
        symbols = [SYMBOLS[strategies.index(dot.point.run.strategy) % len(SYMBOLS)] for dot in mine]
        trace = scatter(
            name,
            [dot.milliseconds for dot in mine],
            [dot.mebibytes for dot in mine],
            "markers+text",
            textposition=[places.get(name, "top center") for name in names],
            textfont={"size": 11},
            hovertext=names,
            hovertemplate="%{hovertext}<br>%{x:,.1f} ms, %{y:,.1f} MiB<extra></extra>",
            marker={
                "size": 11,
                "color": SERIES[number % len(SERIES)],
                "symbol": symbols,
                "line": {"width": 1, "color": INK},
            },
        )
        traces.append({**trace, "text": [name if name in places else "" for name in names]})
    return traces


def _places(dots: Sequence[Dot], best: Sequence[Dot]) -> dict[str, str]:
    """Return where each dot's name stands: at the side where it covers least of other names, dots and the line."""
    left, right = _range([dot.milliseconds for dot in dots])
    bottom, top = _range([dot.mebibytes for dot in dots])
    centres = [
        ((d.milliseconds - left) / (right - left), (d.mebibytes - bottom) / (top - bottom))
        for d in dots
    ]
    taken: list[Box] = [(x, y, 0.02, 0.03) for x, y in centres]
    corners = sorted(centre for dot, centre in zip(dots, centres, strict=True) if dot in best)
    for (x, y), (next_x, next_y) in pairwise(corners):
        # The line goes to the right, then down, from each dot to the next.
        taken.append(((x + next_x) / 2, y, next_x - x, 0.01))
        taken.append((next_x, (y + next_y) / 2, 0.005, abs(y - next_y)))
    places: dict[str, str] = {}
    for dot, (x, y) in zip(dots, centres, strict=True):
        width = LETTER * len(dot.point.name)
        boxes = {
            place: (x + right_of * width, y + above * LINE, width, LINE)
            for place, (right_of, above) in PLACES.items()
        }
        place = min(boxes, key=lambda place: sum(_covers(boxes[place], box) for box in taken))
        places[dot.point.name] = place
        taken.append(boxes[place])
    return places


def _covers(one: Box, other: Box) -> float:
    """Return the area that two boxes share; a name outside of the chart, which would be cut off, covers all of it."""
    outside = one[0] + one[2] / 2 > 1.05 or one[0] - one[2] / 2 < -0.1
    shared = 1.0
    for centre, size in ((0, 2), (1, 3)):
        ends = [(box[centre] - box[size] / 2, box[centre] + box[size] / 2) for box in (one, other)]
        shared *= max(0.0, min(ends[0][1], ends[1][1]) - max(ends[0][0], ends[1][0]))
    return shared + outside


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis around values, with room for names on both sides."""
    low, high = min(values), max(values)
    room = 0.15 * (high - low) or 0.1 * (high or 1.0)
    return low - room, high + room
