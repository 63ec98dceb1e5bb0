"""The loss curves, and below them how far each lies from the first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from zeroexp.report.agreement import largest_distance, numbers_first
from zeroexp.report.measured_points import Point
from zeroexp.report.page.chart import MANY, Chart, Trace
from zeroexp.report.palette import DASHES, SERIES

TITLE = "Loss curves"
NOTHING = "No point recorded a step."
WIDEST, THIN, MOST_STRIPES = 10.0, 1.5, 12
BELOW = "The lower half shows each step's distance; equal losses leave a gap."


def loss_chart(points: Sequence[Point]) -> Chart:
    curves = numbers_first({p.name: [r.loss for r in p.records] for p in points if p.records})
    if not curves:
        return Chart("losses", TITLE, NOTHING)
    words, reference = largest_distance(curves), next(iter(curves.values()))
    away = {name: _distances(curve, reference) for name, curve in curves.items()}
    distances = [d for curve in away.values() for d in curve if d and math.isfinite(d)]
    data = [
        _line(name, curve, index, width=_width(index, len(curves)))
        for index, (name, curve) in enumerate(curves.items())
    ]
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": "loss"}},
        "hovermode": "closest",
        "showlegend": len(curves) <= MANY,
    }
    if not distances:
        return Chart("losses", TITLE, words, data, layout)
    data += [_line(name, curve, i, below=True) for i, (name, curve) in enumerate(away.items())]
    layout["xaxis"]["anchor"] = "y2"
    layout["yaxis"]["domain"] = [0.42, 1]
    layout["yaxis2"] = {
        "title": {"text": "relative distance"},
        "domain": [0, 0.32],
        "type": "log",
        "exponentformat": "power",
        **_decades(distances),
    }
    return Chart("losses", TITLE, f"{words} {BELOW}", data, layout, 520)


def _width(index: int, number: int) -> float:
    """Return a width for the line: later ones are narrower, so that equal curves show as stripes."""
    return max(THIN, WIDEST - index * (WIDEST - THIN) / max(1, min(number, MOST_STRIPES) - 1))


def _decades(distances: Sequence[float]) -> dict[str, object]:
    """Return the range of a logarithmic axis: whole powers of ten around all distances."""
    low, high = (math.log10(end(distances)) for end in (min, max))
    low, high = math.floor(low), math.ceil(high)
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
