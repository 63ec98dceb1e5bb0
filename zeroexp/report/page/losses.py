"""The loss curves, and below them how far each lies from the first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from zeroexp.report.loss_agreement import in_order_of_losses, losses_of, relative_distance
from zeroexp.report.measured_points import MeasuredPoint
from zeroexp.report.page.chart import MANY, Chart, Trace, axis_of, line_style, scatter

WIDEST, THIN, MOST_STRIPES = 10.0, 1.5, 12
BELOW = "The lower half shows each step's distance; equal losses leave a gap."


def loss_chart(points: Sequence[MeasuredPoint]) -> Chart:
    recorded, verdict = in_order_of_losses(points), losses_of(points)
    if not recorded:
        return Chart("losses", "Loss curves", "No point recorded a step.")
    lines = {point.name: point.losses for point in recorded}
    apart = [point.name for point in recorded if point.outer_every]
    curves = {name: line for name, line in lines.items() if name not in apart}
    # Of a run that came to its end, where there is one: the verdict is of these alone.
    reference = lines[verdict.reference] if verdict else next(iter(curves.values()), {})
    # A logarithm has no zero.
    away = [
        {
            s: relative_distance(a, reference[s]) or math.inf
            for s, a in curve.items()
            if s in reference
        }
        for curve in curves.values()
    ]
    distances = [d for curve in away for d in curve.values() if math.isfinite(d)]
    # Later lines are narrower, so that equal curves show as stripes.
    stripe = (WIDEST - THIN) / max(1, min(len(curves), MOST_STRIPES) - 1)
    data = [
        _line(name, curve, index, width=max(THIN, WIDEST - index * stripe))
        for index, (name, curve) in enumerate(lines.items())
    ]
    layout: dict[str, Any] = {"xaxis": axis_of("step"), "yaxis": axis_of("loss")}
    caption, height = "One curve has nothing to be compared with.", 380
    if verdict is None:
        caption = "No run has come to its end."
    elif verdict.distance:
        caption = "Beside the first the curves are {}: {}.".format(*verdict.distance)
    if distances:
        caption, height = f"{caption} {BELOW}", 520
        data += [
            _line(name, far, n, below=True)
            for n, (name, far) in enumerate(zip(curves, away, strict=True))
        ]
        layout["xaxis"]["anchor"], layout["yaxis"]["domain"] = "y2", [0.42, 1]
        powers = {"type": "log", "exponentformat": "power", **_decades(distances)}
        layout["yaxis2"] = axis_of("relative distance", domain=[0, 0.32], **powers)
    if apart:
        caption = f"{caption} In no comparison, by design not equal: {', '.join(apart)}."
    others = [point.name for point in points if point.losses and point.name not in lines]
    if others:
        caption = f"{caption} Of another seed, and left out: {', '.join(others)}."
    layout["showlegend"] = len(lines) <= MANY
    return Chart("losses", "Loss curves", caption, data, layout, height)


def _decades(distances: Sequence[float]) -> dict[str, object]:
    """Return the range of a logarithmic axis: whole powers of ten around all distances."""
    low, high = math.floor(math.log10(min(distances))), math.ceil(math.log10(max(distances)))
    low, high = (low, high) if high > low else (low - 1, high + 1)
    return {"range": [low - 0.2, high + 0.2], "dtick": max(1, (high - low) // 4)}


def _line(
    name: str, values: Mapping[int, float], index: int, *, below: bool = False, width: float = 1.5
) -> Trace:
    """Return one line; what is no number leaves a gap."""
    return scatter(
        name,
        [*values],
        [value if math.isfinite(value) else None for value in values.values()],
        "lines+markers" if below else "lines",
        legendgroup=name,
        showlegend=not below,
        yaxis="y2" if below else "y",
        line=line_style(index, width=width),
        marker={"size": 4},
        hovertemplate=f"{'%{y:.1e}' if below else '%{y:.6f}'} at step %{{x}}",
    )
