"""Charts of time: by phase, by what waits, beside the reference, and over the number of ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import log10
from statistics import fmean

from zeroexp.measure.record import RunSummary, mean_verb_seconds
from zeroexp.report.conclusions import Conclusions
from zeroexp.report.measured_points import MeasuredPoint
from zeroexp.report.page.chart import (
    INK,
    Chart,
    Trace,
    axis_of,
    line_style,
    row_chart,
    row_marks,
    scatter,
)
from zeroexp.report.palette import GREEN, GREY, NAVY, RED, SYMBOLS, part_colour
from zeroexp.report.statistics import Comparison, TimeVerdict, step_time_interval

# ---- where the time of a step goes, by phase, with the interval of the whole step


def step_time_chart(points: Sequence[MeasuredPoint]) -> Chart:
    done = {point.name: s for point in points if (s := point.pooled.summary)}
    medians = {row: 1e3 * summary.step_seconds_median for row, summary in done.items()}
    # Over runs it is the interval of a mean, which may lie beside the median of many skewed runs.
    ends = {row: (middle, middle) for row, middle in medians.items()}
    ends |= {
        point.name: (1e3 * interval.low, 1e3 * interval.high)
        for point in points
        if point.name in done and (interval := step_time_interval(point))
    }
    caption = (
        "The median step of rank 0, in the proportions of its phases' medians. Backward includes whatever "
        "communication runs beside it or is waited for in it; what follows is clipping, the optimizer, and what "
        "publishes its weights. The whiskers of the line, where it ends, are the 95 % interval of that median."
    )
    phases = dict.fromkeys(phase for s in done.values() for phase in s.phase_seconds_median)
    return row_chart(
        "times",
        "Time of a step",
        caption,
        axis="ms per step",
        numbers={row: _parts_of_median_step(s) for row, s in done.items()},
        scale=1e3,
        colours={phase: part_colour(phase, index) for index, phase in enumerate(phases)},
        marks=[row_marks("whole step", medians, "line-ns-open", INK, ends)],
    )


def _parts_of_median_step(summary: RunSummary) -> dict[str, float]:
    """Medians of phases are no parts of the median of their sum."""
    phases = summary.phase_seconds_median
    scale = summary.step_seconds_median / (sum(phases.values()) or 1)
    return {phase: scale * seconds for phase, seconds in phases.items()}


# ---- how much of a step computes and how much waits for bytes, by verb of the engine


def exposed_chart(points: Sequence[MeasuredPoint]) -> Chart:
    done = {point.name: s.times for point in points if (s := point.median_run.summary) and s.times}
    waits = {row: mean_verb_seconds(ranks, "exposed") for row, ranks in done.items()}
    verbs = dict.fromkeys(verb for one in waits.values() for verb in one if one[verb] > 0)
    exposed = {f"{verb}, exposed": part_colour(verb, n) for n, verb in enumerate(verbs, start=1)}
    numbers: dict[str, dict[str, float]] = {}
    for row, ranks in done.items():
        rest = fmean(rank.step_seconds for rank in ranks) - sum(waits[row].values())
        parts = {f"{verb}, exposed": seconds for verb, seconds in waits[row].items()}
        numbers[row] = {"all else": rest, **parts}
    hidden = {row: 1e3 * fmean(r.overlapped_seconds for r in ranks) for row, ranks in done.items()}
    arrows = row_marks("overlapped with compute", hidden, "triangle-up", "#fff", cliponaxis=False)
    # From under the bar, whose numbers a mark inside would hide. White with a dark edge is seen on a light bar and
    # beside it, in dark mode too.
    arrows["marker"] |= {"standoff": 10, "line": {"width": 1.5, "color": "#1b1b1b"}}
    caption = (
        "Means over measured steps and ranks, of the repeat whose step time is the median. A verb's exposed part is "
        "the time in which a rank waits for it and does nothing else; the triangle is what communication ran beside "
        "compute and cost nothing. PyTorch's engines show only what the training loop itself sends: what they wait for "
        "inside is part of the rest."
    )
    return row_chart(
        "exposed",
        "Compute and exposed communication",
        caption,
        axis="ms per step",
        numbers=numbers,
        scale=1e3,
        colours={"all else": GREY, **exposed},
        marks=[arrows],
        nothing="No run tells its time by verb; runs of this version do.",
    )


# ---- each point's step time over that of the reference, with its interval

LOOKS = {  # verdict -> (symbol, colour)
    TimeVerdict.FASTER: ("triangle-left", GREEN),
    TimeVerdict.SLOWER: ("triangle-right", RED),
    TimeVerdict.SAME: ("square", NAVY),
    TimeVerdict.OPEN: ("circle-open", INK),
}
WIDEST = 8.0  # an axis beyond this ratio, and below its inverse, would leave no room for what intervals say
NO_DIFFERENCE = 1.02
CLOSE = 1.6  # below this reach of the axis, ticks are close together
TICKS = (0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 1.4), (0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 4, 8)


def verdict_chart(conclusions: Conclusions) -> Chart:
    """Return the chart; without an interval there is nothing to draw, and the table says so."""
    title = "Which differences are real"
    compared = conclusions.comparisons
    if not compared:
        return Chart("forest", title, "One point of a sweep has nothing to be compared with.")
    caption = f"Step time over that of {conclusions.reference}"
    if all(comparison.low is None for comparison in compared.values()):
        too_few = (
            "In fewer than three rounds nobody knows how much runs differ, so nothing is claimed"
        )
        return Chart("forest", title, f"{caption}. {too_few}; repeats=5 would tell.")
    caption += (
        ", from pairs of runs of one round; intervals hold with 95 % for all points together. Left of the line is "
        "faster; within the grey band, ±2 %, counts as no difference."
    )
    ends = [end for c in compared.values() for end in (c.low or c.ratio, c.high or c.ratio)]
    reach = min(WIDEST, 1.1 * max(max(end, 1 / end) for end in [*ends, 1.2]))
    if max(*ends, 1 / min(ends)) > reach:
        caption += (
            " An interval without an end in the chart goes on beyond it; the table has its end."
        )
    ticks = TICKS[reach > CLOSE]
    scale = {"type": "log", "range": [-log10(reach), log10(reach)]}
    names = {"tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    whole = {"y0": 0, "y1": 1, "xref": "x", "yref": "paper"}
    band = {"type": "rect", "x0": 1 / NO_DIFFERENCE, "x1": NO_DIFFERENCE, "fillcolor": GREY}
    one = {"type": "line", "x0": 1.0, "x1": 1.0, "line": {"color": INK, "width": 1, "dash": "dot"}}
    return row_chart(
        "forest",
        title,
        caption,
        axis=axis_of("times the step of the reference", **scale, **names),
        numbers={name: {} for name in compared},
        marks=[mark for verdict in LOOKS if (mark := _verdict_marks(compared, verdict))["x"]],
        shapes=[{**whole, **band, "opacity": 0.35, "line": {"width": 0}}, {**whole, **one}],
        showlegend=True,
    )


def _verdict_marks(compared: Mapping[str, Comparison], verdict: TimeVerdict) -> Trace:
    """Return a mark with its interval for each point of this verdict."""
    symbol, colour = LOOKS[verdict]
    mine = {name: c for name, c in compared.items() if c.verdict is verdict}
    return row_marks(
        verdict,
        {name: c.ratio for name, c in mine.items()},
        symbol,
        colour,
        {name: (c.low or c.ratio, c.high or c.ratio) for name, c in mine.items()},
        **{"text": [c.text for c in mine.values()]},
        hovertemplate="%{y}: %{text}<extra></extra>",
    )


# ---- tokens per second over the number of ranks, one line per kind of point, beside the ideal


def scaling_chart(points: Sequence[MeasuredPoint]) -> Chart:
    title = "Scaling over ranks"
    curves = {name: curve for name, curve in _curves(points).items() if len(curve) > 1}
    if not curves:
        alone = "All points ran with the same number of ranks; sweep world_size=1,2,4 to see how they scale."
        return Chart("scaling", title, alone)
    sizes = sorted({size for curve in curves.values() for size in curve})
    first = sizes[0]
    per_rank = max(curve[first] / first for curve in curves.values() if first in curve)
    shown = {"hovertemplate": "%{y:,.0f} tokens/s"}
    lines: list[Trace] = []
    for index, (name, curve) in enumerate(curves.items()):
        line, symbol = line_style(index), SYMBOLS[index % len(SYMBOLS)]
        marker = {"size": 9, "symbol": symbol, "color": line["color"]}
        style = {"line": line, "marker": marker, **shown}
        lines.append(scatter(name, list(curve), list(curve.values()), "lines+markers", **style))
    grey = {"color": "#888", "dash": "dash", "width": 2}
    ideal = [per_rank * size for size in sizes]
    return Chart(
        "scaling",
        title,
        "Tokens per second of all ranks; the grey line is the fastest start times the number of ranks. "
        f"Of its own ideal reaches, by ranks: {'; '.join(map(_efficiency, curves, curves.values()))}.",
        [*lines, scatter("ideal", sizes, ideal, "lines", line=grey, **shown)],
        {
            "xaxis": axis_of("ranks", type="log", tickvals=sizes, ticktext=sizes),
            "yaxis": axis_of("tokens/s of all ranks", rangemode="tozero"),
            "hovermode": "x unified",
        },
        440,
    )


def _curves(points: Sequence[MeasuredPoint]) -> dict[str, dict[int, float]]:
    """Return tokens/s by world size, for points that differ in nothing but their number of ranks."""
    curves: dict[str, dict[int, float]] = {}
    for point in points:
        if summary := point.pooled.summary:
            size = point.run.world_size
            name = re.sub(rf"-n{size}\b", "", point.name)
            curves.setdefault(name, {})[size] = summary.tokens_per_second
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}


def _efficiency(name: str, curve: Mapping[int, float]) -> str:
    """Say what a line reaches of its own start times the number of ranks."""
    (first, tokens), *_, (last, most) = curve.items()
    return f"{name} {100 * most * first / (tokens * last):.0f} % at {last}"
