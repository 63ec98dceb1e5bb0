"""Tokens per second over the number of ranks, one line per kind of point, beside the ideal."""

from __future__ import annotations

from collections.abc import Sequence

from zeroexp.report.measured_points import Point
from zeroexp.report.page.chart import Chart, Trace
from zeroexp.report.palette import DASHES, SERIES, SYMBOLS

TITLE = "Scaling over ranks"
ALONE = (
    "All points ran with the same number of ranks; sweep world_size=1,2,4 to see how they scale."
)


def scaling_chart(points: Sequence[Point]) -> Chart:
    curves = {name: curve for name, curve in _curves(points).items() if len(curve) > 1}
    if not curves:
        return Chart("scaling", TITLE, ALONE)
    data: list[Trace] = []
    for index, (name, curve) in enumerate(curves.items()):
        colour = SERIES[index % len(SERIES)]
        line = {"color": colour, "dash": DASHES[(index // len(SERIES)) % len(DASHES)]}
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": list(curve),
                "y": list(curve.values()),
                "line": line,
                "marker": {"size": 9, "symbol": SYMBOLS[index % len(SYMBOLS)], "color": colour},
                "hovertemplate": "%{y:,.0f} tokens/s",
            }
        )
    sizes = sorted({size for curve in curves.values() for size in curve})
    layout = {
        "xaxis": {"title": {"text": "ranks"}, "type": "log", "tickvals": sizes, "ticktext": sizes},
        "yaxis": {"title": {"text": "tokens/s of all ranks"}, "rangemode": "tozero"},
        "hovermode": "x unified",
    }
    words = (
        "Tokens per second of all ranks; the grey line is the fastest start times the number of ranks. "
        + _efficiency(curves)
    )
    return Chart("scaling", TITLE, words, [*data, _ideal(curves, sizes)], layout, 440)


def _curves(points: Sequence[Point]) -> dict[str, dict[int, float]]:
    """Return tokens/s by world size, for points that differ in nothing but their number of ranks."""
    curves: dict[str, dict[int, float]] = {}
    for point in points:
        summary = point.pooled_summary.summary
        if summary:
            name = " · ".join(word for word in point.name.split(" · ") if word[:6] != "ranks ")
            curves.setdefault(name, {})[point.run.world_size] = summary.tokens_per_second
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}


def _ideal(curves: dict[str, dict[int, float]], sizes: Sequence[int]) -> Trace:
    first = sizes[0]
    per_rank = max(
        tokens / size
        for curve in curves.values()
        for size, tokens in curve.items()
        if size == first
    )
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "ideal",
        "x": list(sizes),
        "y": [per_rank * size for size in sizes],
        "line": {"color": "#888", "dash": "dash", "width": 2},
        "hovertemplate": "%{y:,.0f} tokens/s",
    }


def _efficiency(curves: dict[str, dict[int, float]]) -> str:
    """Say what each line reaches of its own start times the number of ranks."""
    said: list[str] = []
    for name, curve in curves.items():
        (first, tokens), (last, most) = next(iter(curve.items())), list(curve.items())[-1]
        said.append(f"{name} {100 * most * first / (tokens * last):.0f} % at {last}")
    return f"Of its own ideal reaches, by ranks: {'; '.join(said)}."
