"""The loss curves, and below them how far each lies from the first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zeroexp.report.agreement import largest_distance
from zeroexp.report.page.chart import MANY, Chart, Trace
from zeroexp.report.palette import DASHES, SERIES
from zeroexp.report.points import Point

TITLE = "Loss curves"
NOTHING = "No point recorded a step."
WIDEST, THIN, MOST_STRIPES = 10.0, 1.5, 12
BELOW = "The lower half shows each step's distance; equal losses leave a gap."


def loss_chart(points: Sequence[Point]) -> Chart:
    curves = {
        point.name: [record.loss for record in point.records] for point in points if point.records
    }
    if not curves:
        return Chart("losses", TITLE, NOTHING)
    reference = next(iter(curves))
    data: list[Trace] = []
    away = {name: _distances(curve, curves[reference]) for name, curve in curves.items()}
    for index, (name, curve) in enumerate(curves.items()):
        data.append(_line(name, curve, index, width=_width(index, len(curves))))
        data.append(_line(name, away[name], index, below=True))
    layout = {
        "xaxis": {"title": {"text": "step"}, "anchor": "y2"},
        "yaxis": {"title": {"text": "loss"}, "domain": [0.42, 1]},
        "yaxis2": {
            "title": {"text": "relative distance"},
            "domain": [0, 0.32],
            "type": "log",
            "exponentformat": "power",
            **_decades([distance for curve in away.values() for distance in curve if distance]),
        },
        "hovermode": "closest",
        "showlegend": len(curves) <= MANY,
    }
    return Chart("losses", TITLE, f"{largest_distance(curves)} {BELOW}", data, layout, 520)


def _width(index: int, number: int) -> float:
    """Return a width for the line: later ones are narrower, so that equal curves show as stripes."""
    return max(THIN, WIDEST - index * (WIDEST - THIN) / max(1, min(number, MOST_STRIPES) - 1))


def _decades(distances: Sequence[float]) -> dict[str, object]:
    """Return the range of a logarithmic axis: whole powers of ten around all distances."""
    finite = [math.log10(distance) for distance in distances if math.isfinite(distance)]
    if not finite:
        return {"range": [-9, -3], "dtick": 2}
    low, high = math.floor(min(finite)), math.ceil(max(finite))
    low, high = (low, high) if high > low else (low - 1, high + 1)
    return {"range": [low - 0.2, high + 0.2], "dtick": max(1, (high - low) // 4)}


def _line(
    name: str,
    values: Sequence[float | None],
    index: int,
    *,
    below: bool = False,
    width: float = 1.5,
) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines+markers" if below else "lines",
        "name": name,
        "legendgroup": name,
        "showlegend": not below,
        "x": list(range(len(values))),
        "y": [value if value is not None and math.isfinite(value) else None for value in values],
        "yaxis": "y2" if below else "y",
        "line": {
            "color": SERIES[index % len(SERIES)],
            "dash": DASHES[(index // len(SERIES)) % len(DASHES)],
            "width": width,
        },
        "marker": {"size": 4},
        "hovertemplate": f"{'%{y:.1e}' if below else '%{y:.6f}'} at step %{{x}}",
    }


def _distances(curve: Sequence[float], reference: Sequence[float]) -> list[float | None]:
    """Return |loss − reference| / |reference| by step; None where they are equal, as a logarithm has no zero."""
    return [
        abs(a - b) / abs(b) if b and a != b else None
        for a, b in zip(curve, reference, strict=False)
    ]
