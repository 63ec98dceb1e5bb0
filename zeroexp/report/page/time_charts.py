"""Charts of time: by phase, by what waits, beside the reference, and over the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10
from statistics import fmean

from zeroexp.measure.record import ALL_RANKS, RankTimes
from zeroexp.report.compare import Conclusions
from zeroexp.report.measured_points import Point
from zeroexp.report.page.chart import (
    INK,
    MANY,
    Chart,
    Trace,
    axis,
    bar_chart,
    line_style,
    row_marks,
    rows_axis,
    rows_height,
    scatter,
    whiskers,
)
from zeroexp.report.palette import GREEN, GREY, NAVY, RED, SYMBOLS, part_colour
from zeroexp.report.statistics import Verdict, step_time_interval

# ---- where the time of a step goes, by phase, with the interval of the whole step

LONGEST = 1.8  # times the slowest median: a longer axis would leave bars too short to read


def step_time_chart(points: Sequence[Point]) -> Chart:
    done = {p.name: s for p in points if (s := p.pooled_summary.summary)}
    medians = {row: 1e3 * summary.step_seconds_median for row, summary in done.items()}
    lows, highs = dict(medians), dict(medians)
    for point in points:
        if point.name in medians and (interval := step_time_interval(point)):
            # Over runs it is the interval of a mean, which may lie beside the median of many skewed runs.
            lows[point.name] = min(1e3 * interval.low, medians[point.name])
            highs[point.name] = max(1e3 * interval.high, medians[point.name])
    longest = LONGEST * max(medians.values(), default=1.0)
    cut = {row: high for row, high in highs.items() if high > longest}
    reach = longest if cut else 1.04 * max(highs.values(), default=1.0)
    caption = (
        "Medians of rank 0 over the measured steps. Backward includes whatever communication runs beside it or is "
        "waited for in it; what follows is clipping, the optimizer, and what publishes its weights. The line is the "
        "median of the whole step, and its whiskers are the 95 % interval of that median."
    )
    whole = row_marks("whole step", medians, "line-ns-open", INK)
    whole["error_x"] = whiskers([*medians.values()], [*lows.values()], [*highs.values()])
    marks = [whole]
    if cut:
        named = len(done) <= MANY
        caption += " An arrow at the edge stands for an interval that goes on beyond it"
        caption += ", to the number beside it." if named else "."
        arrows = {
            **row_marks("interval goes on", dict.fromkeys(cut, reach), "triangle-right", INK),
            "mode": "markers+text" if named else "markers",
            "text": [f"to {high:,.0f}" for high in cut.values()],
            "textposition": "top left",
            "textfont": {"size": 10},
            "cliponaxis": False,
            "hovertemplate": "%{text}",
        }
        marks = [arrows, whole]
    phases = dict.fromkeys(phase for s in done.values() for phase in s.phase_seconds_median)
    return bar_chart(
        "times",
        "Time of a step",
        caption,
        axis="ms per step",
        numbers={row: summary.phase_seconds_median for row, summary in done.items()},
        factor=1e3,
        colours={phase: part_colour(phase, index) for index, phase in enumerate(phases)},
        marks=marks,
        reach=reach,
    )


# ---- how much of a step computes and how much waits for bytes, by verb of the engine


def exposed_chart(points: Sequence[Point]) -> Chart:
    title = "Compute and exposed communication"
    done = {point.name: s.times for point in points if (s := point.median_run.summary) and s.times}
    if not done:
        return Chart("exposed", title, "No run tells its time by verb; runs of this version do.")
    waits = {row: _exposed_seconds(ranks) for row, ranks in done.items()}
    verbs = [verb for one in waits.values() for verb, seconds in one.items() if seconds > 0]
    colours = {"all else": GREY}
    for index, verb in enumerate(dict.fromkeys(verbs), start=1):
        colours[f"{verb}, exposed"] = part_colour(verb, index)
    numbers: dict[str, dict[str, float]] = {}
    hidden: dict[str, float | None] = {}
    for row, ranks in done.items():
        rest = fmean(rank.step_seconds for rank in ranks) - sum(waits[row].values())
        exposed = {f"{verb}, exposed": seconds for verb, seconds in waits[row].items()}
        numbers[row] = {"all else": rest, **exposed}
        overlapped = (sum(verb.overlapped for verb in rank.verbs.values()) for rank in ranks)
        hidden[row] = 1e3 * fmean(overlapped)
    circles = row_marks("overlapped with compute", hidden, "circle", "#fff")
    # White with a dark edge is seen on a light bar and beside it, in dark mode too.
    circles["marker"]["line"] = {"width": 1.5, "color": "#1b1b1b"}
    caption = (
        "Means over measured steps and ranks, of the repeat whose step time is the median. A verb's exposed part is "
        "the time in which a rank waits for it and does nothing else; the circle is what communication ran beside "
        "compute and cost nothing. PyTorch's engines show only what the training loop itself sends: what they wait for "
        "inside is part of the rest."
    )
    return bar_chart(
        "exposed",
        title,
        f"{caption} {_longest_wait(done)}".rstrip(),
        axis="ms per step",
        numbers=numbers,
        factor=1e3,
        colours=colours,
        marks=[circles],
    )


def _exposed_seconds(ranks: Sequence[RankTimes]) -> dict[str, float]:
    """Return the exposed seconds of each verb, mean over ranks."""
    verbs = dict.fromkeys(verb for rank in ranks for verb in rank.verbs)
    return {
        verb: fmean(rank.verbs[verb].exposed if verb in rank.verbs else 0.0 for rank in ranks)
        for verb in verbs
    }


def _longest_wait(done: Mapping[str, Sequence[RankTimes]]) -> str:
    """Name the longest wait of one rank for another."""
    waits = [
        (seconds, name, rank.rank, peer)
        for name, ranks in done.items()
        for rank in ranks
        for peer, seconds in rank.waited_seconds.items()
        if peer != ALL_RANKS
    ]
    if not waits:
        return ""
    seconds, name, rank, peer = max(waits)
    waited = f"rank {rank} waited {1e3 * seconds:,.1f} ms a step for rank {peer}"
    return f"The longest wait for one rank: in {name} {waited}."


# ---- each point's step time over that of the reference, with its interval

LOOKS = {  # verdict -> (symbol, colour)
    Verdict.FASTER: ("triangle-left", GREEN),
    Verdict.SLOWER: ("triangle-right", RED),
    Verdict.SAME: ("square", NAVY),
    Verdict.OPEN: ("circle-open", INK),
}
WIDEST = 8.0  # an axis beyond this ratio, and below its inverse, would leave no room for what intervals say
NO_DIFFERENCE = 1.02
CLOSE = 1.6  # below this reach of the axis, ticks are close together
TICKS = (0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 1.4), (0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 4, 8)


def verdict_chart(conclusions: Conclusions) -> Chart:
    """Return the chart; without an interval there is nothing to draw, and the table says so."""
    title = "Which differences are real"
    compared = [(one.point.name, one.comparison) for one in conclusions.judged if one.comparison]
    if conclusions.reference is None or not compared:
        return Chart("forest", title, "One point has nothing to be compared with.")
    caption = f"Step time over that of {conclusions.reference.name}"
    if all(comparison.low is None for _, comparison in compared):
        too_few = "With fewer than three runs each nobody knows how much runs differ, so nothing is claimed"
        return Chart("forest", title, f"{caption}. {too_few}; repeats=5 would tell.")
    caption += (
        ", from pairs of runs of one round; intervals hold with 95 % for all points together. Left of the line is "
        "faster; within the grey band, ±2 %, counts as no difference."
    )
    ends = [end for _, c in compared for end in (c.low or c.ratio, c.high or c.ratio)]
    reach = min(WIDEST, 1.1 * max(max(end, 1 / end) for end in [*ends, 1.2]))
    if max(*ends, 1 / min(ends)) > reach:
        caption += (
            " An interval without an end in the chart goes on beyond it; the table has its end."
        )
    rows, ticks = [name for name, _ in compared], TICKS[reach > CLOSE]
    whole = {"y0": 0, "y1": 1, "xref": "x", "yref": "paper"}
    band = {"type": "rect", "x0": 1 / NO_DIFFERENCE, "x1": NO_DIFFERENCE, "fillcolor": GREY}
    one = {"type": "line", "x0": 1.0, "x1": 1.0, "line": {"color": INK, "width": 1, "dash": "dot"}}
    layout = {
        "xaxis": axis(
            "times the step of the reference",
            type="log",
            range=[-log10(reach), log10(reach)],
            tickvals=ticks,
            ticktext=[f"{tick:g}" for tick in ticks],
        ),
        "yaxis": rows_axis(rows),
        "shapes": [{**whole, **band, "opacity": 0.35, "line": {"width": 0}}, {**whole, **one}],
        "hovermode": "closest",
        "showlegend": True,
    }
    data: list[Trace] = []
    for verdict, (symbol, colour) in LOOKS.items():
        mine = [(name, c) for name, c in compared if c.verdict is verdict]
        ratios = [c.ratio for _, c in mine]
        lows = [c.low or c.ratio for _, c in mine]
        highs = [c.high or c.ratio for _, c in mine]
        trace = scatter(
            verdict.value,
            ratios,
            [name for name, _ in mine],
            "markers",
            hovertemplate="%{y}: %{text}<extra></extra>",
            marker={"symbol": symbol, "size": 11, "color": colour, "line": {"width": 1.5}},
            error_x=whiskers(ratios, lows, highs, colour, thickness=2),
        )
        data.append({**trace, "text": [c.verdict_with_numbers for _, c in mine]})
    drawn = [trace for trace in data if trace["x"]]
    return Chart("forest", title, caption, drawn, layout, rows_height(rows))


# ---- tokens per second over the number of ranks, one line per kind of point, beside the ideal


def scaling_chart(points: Sequence[Point]) -> Chart:
    title = "Scaling over ranks"
    curves = {name: curve for name, curve in _curves(points).items() if len(curve) > 1}
    if not curves:
        alone = "All points ran with the same number of ranks; sweep world_size=1,2,4 to see how they scale."
        return Chart("scaling", title, alone)
    sizes = sorted({size for curve in curves.values() for size in curve})
    first = sizes[0]
    per_rank = max(curve[first] / first for curve in curves.values() if first in curve)
    ideal = scatter("ideal", sizes, [per_rank * size for size in sizes], "lines")
    ideal["line"] = {"color": "#888", "dash": "dash", "width": 2}
    data = [
        scatter(name, list(curve), list(curve.values()), "lines+markers", line=line_style(index))
        for index, (name, curve) in enumerate(curves.items())
    ]
    for index, line in enumerate(data):
        symbol = SYMBOLS[index % len(SYMBOLS)]
        line["marker"] = {"size": 9, "symbol": symbol, "color": line["line"]["color"]}
    layout = {
        "xaxis": axis("ranks", type="log", tickvals=sizes, ticktext=sizes),
        "yaxis": axis("tokens/s of all ranks", rangemode="tozero"),
        "hovermode": "x unified",
    }
    drawn = [{**line, "hovertemplate": "%{y:,.0f} tokens/s"} for line in [*data, ideal]]
    caption = (
        "Tokens per second of all ranks; the grey line is the fastest start times the number of ranks. "
        f"Of its own ideal reaches, by ranks: {'; '.join(map(_efficiency, curves, curves.values()))}."
    )
    return Chart("scaling", title, caption, drawn, layout, 440)


def _curves(points: Sequence[Point]) -> dict[str, dict[int, float]]:
    """Return tokens/s by world size, for points that differ in nothing but their number of ranks."""
    curves: dict[str, dict[int, float]] = {}
    for point in points:
        summary = point.pooled_summary.summary
        if summary:
            name = " · ".join(word for word in point.name.split(" · ") if word[:6] != "ranks ")
            curves.setdefault(name, {})[point.run.world_size] = summary.tokens_per_second
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}


def _efficiency(name: str, curve: Mapping[int, float]) -> str:
    """Say what a line reaches of its own start times the number of ranks."""
    (first, tokens), *_, (last, most) = curve.items()
    return f"{name} {100 * most * first / (tokens * last):.0f} % at {last}"
