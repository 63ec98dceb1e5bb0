"""This chart shows where the time of a step goes, stacked by phase, with the interval of the whole step."""

from __future__ import annotations

from collections.abc import Sequence

from zeroexp.report.page.chart import Chart, bars_height, bars_layout, marks, stacked
from zeroexp.report.palette import part_colour
from zeroexp.report.points import Point
from zeroexp.report.spread import step_time_interval

LONGEST = 1.8  # times the slowest median
WORDS = (
    "Medians of rank 0 over the measured steps. Backward includes whatever communication runs beside it or is waited "
    "for in it; what follows is clipping, the optimizer, and what publishes its weights. The line is the median of the "
    "whole step, and its "
    "whiskers are the 95 % interval of that median."
)


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
    whole = marks(
        "whole step", rows, [1e3 * s.step_seconds_median for _, s in done], "line-ns-open", "INK"
    )
    whole["error_x"] = _whiskers([point for point, _ in done])
    layout = bars_layout("ms per step")
    layout["xaxis"]["range"] = [0, _axis_range([point for point, _ in done], whole["x"])]
    return Chart("times", "Time of a step", WORDS, [*data, whole], layout, bars_height(len(rows)))


def _axis_range(points: Sequence[Point], medians: Sequence[float]) -> float:
    """Return where the axis ends: behind all whiskers, unless they are so long that bars would be too short to read."""
    ends = [1e3 * found.high for point in points if (found := step_time_interval(point))]
    longest = max(medians, default=1.0)
    return 1.04 * min(max([*ends, longest]), LONGEST * longest)


def _whiskers(points: Sequence[Point]) -> dict[str, object]:
    intervals = [(step_time_interval(point), point.step_seconds or 0.0) for point in points]
    return {
        "type": "data",
        "symmetric": False,
        "array": [1e3 * (i.high - middle) if i else 0 for i, middle in intervals],
        "arrayminus": [1e3 * (middle - i.low) if i else 0 for i, middle in intervals],
        "color": "INK",
        "thickness": 1.5,
        "width": 5,
    }
