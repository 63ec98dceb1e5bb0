"""This chart shows where the time of a step goes, stacked by phase, with the interval of the whole step."""

from __future__ import annotations

from collections.abc import Sequence

from zeroexp.report.measured_points import Point
from zeroexp.report.page.chart import (
    MANY,
    NUMBERS,
    Chart,
    Trace,
    bars_height,
    bars_layout,
    marks,
    stacked,
)
from zeroexp.report.palette import part_colour
from zeroexp.report.spread import step_time_interval

LONGEST = 1.8  # times the slowest median: a longer axis would leave bars too short to read
WORDS = (
    "Medians of rank 0 over the measured steps. Backward includes whatever communication runs beside it or is waited "
    "for in it; what follows is clipping, the optimizer, and what publishes its weights. The line is the median of the "
    "whole step, and its whiskers are the 95 % interval of that median."
)
CUT = (
    " An arrow at the edge stands for an interval that goes on beyond it, to the number beside it."
)
CUT_OF_MANY = " An arrow at the edge stands for an interval that goes on beyond it."


def step_time_chart(points: Sequence[Point]) -> Chart:
    done = [(point, run.summary) for point in points if (run := point.pooled_summary).summary]
    rows = [point.name for point, _ in done]
    phases = list(dict.fromkeys(phase for _, s in done for phase in s.phase_seconds_median))
    data = [
        stacked(
            phase,
            rows,
            [1e3 * s.phase_seconds_median.get(phase, 0.0) for _, s in done],
            part_colour(phase, index),
            index,
        )
        for index, phase in enumerate(phases)
    ]
    medians = [1e3 * s.step_seconds_median for _, s in done]
    intervals = [_interval(point, middle) for (point, _), middle in zip(done, medians, strict=True)]
    longest = LONGEST * max(medians, default=1.0)
    ends = [high for _, high in intervals]
    whole = marks("whole step", rows, medians, "line-ns-open", "INK")
    whole["error_x"] = _whiskers(medians, intervals)
    cut = [(row, end) for row, end in zip(rows, ends, strict=True) if end > longest]
    words, last = WORDS, 1.04 * max(ends, default=1.0)
    if cut:
        last = longest
        data.append(_arrows(cut, last, named=len(rows) <= MANY))
        words += CUT if len(rows) <= MANY else CUT_OF_MANY
    layout = bars_layout("ms per step")
    layout["xaxis"]["range"] = [0, last]
    return Chart("times", "Time of a step", words, [*data, whole], layout, bars_height(len(rows)))


def _interval(point: Point, median: float) -> tuple[float, float]:
    """Return the ends of the median's interval in milliseconds; the median itself where no interval is known."""
    found = step_time_interval(point)
    if found is None:
        return median, median
    # Over runs it is the interval of a mean, which may lie beside the median of many skewed runs.
    return min(1e3 * found.low, median), max(1e3 * found.high, median)


def _arrows(cut: Sequence[tuple[str, float]], edge: float, *, named: bool) -> Trace:
    """Return an arrow at the edge of the axis for each row whose interval ends behind it."""
    ends = [f"to {end:,.0f}" for _, end in cut]
    arrows = marks(
        "interval goes on", [row for row, _ in cut], [edge] * len(cut), "triangle-right", "INK"
    )
    return {
        **arrows,
        "mode": "markers+text" if named else "markers",
        "text": ends,
        "textposition": "top left",
        "textfont": NUMBERS,
        "cliponaxis": False,
        "hovertemplate": "%{text}",
    }


def _whiskers(
    medians: Sequence[float], intervals: Sequence[tuple[float, float]]
) -> dict[str, object]:
    known = list(zip(medians, intervals, strict=True))
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - middle for middle, (_, high) in known],
        "arrayminus": [middle - low for middle, (low, _) in known],
        "color": "INK",
        "thickness": 1.5,
        "width": 5,
    }
