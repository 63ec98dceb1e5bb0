"""This chart shows how much of a step computes and how much waits for bytes, by verb of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from zeroexp.measure.record import ALL_RANKS, RankTimes, RunSummary
from zeroexp.report.measured_points import Point
from zeroexp.report.page.chart import Chart, Trace, bars_height, bars_layout, marks, stacked
from zeroexp.report.palette import GREY, part_colour

TITLE = "Compute and exposed communication"
NOTHING = "No run tells its time by verb; runs of this version do."
WORDS = (
    "Means over measured steps and ranks, of the repeat whose step time is the median. "
    "A verb's exposed part is the time in which a rank waits for it and "
    "does nothing else; the circle is what communication ran beside compute and cost nothing. "
    "PyTorch's engines show only what the training loop itself sends: what they wait for inside is part of the rest."
)


def exposed_chart(points: Sequence[Point]) -> Chart:
    done = [(point.name, s) for point in points if (s := point.median_run.summary) and s.times]
    if not done:
        return Chart("exposed", TITLE, NOTHING)
    rows = [name for name, _ in done]
    by_verb = [_by_verb(summary.times) for _, summary in done]
    verbs = list(dict.fromkeys(verb for waits in by_verb for verb, s in waits.items() if s > 0))
    rest = [
        fmean(rank.step_seconds for rank in s.times) - sum(waits.values())
        for (_, s), waits in zip(done, by_verb, strict=True)
    ]
    data: list[Trace] = [stacked("all else", rows, [1e3 * seconds for seconds in rest], GREY, 0)]
    for index, verb in enumerate(verbs, start=1):
        waits = [1e3 * waits.get(verb, 0.0) for waits in by_verb]
        data.append(stacked(f"{verb}, exposed", rows, waits, part_colour(verb, index), index))
    hidden = [1e3 * _overlapped(s.times) for _, s in done]
    circles = marks("overlapped with compute", rows, hidden, "circle", "#fff")
    # White with a dark edge is seen on a light bar and beside it, in dark mode too.
    circles["marker"]["line"] = {"width": 1.5, "color": "#1b1b1b"}
    data.append(circles)
    words = f"{WORDS} {_who_waited(done)}".rstrip()
    layout = bars_layout("ms per step")
    return Chart("exposed", TITLE, words, data, layout, bars_height(len(rows)))


def _by_verb(ranks: Sequence[RankTimes]) -> dict[str, float]:
    """Return the exposed seconds of each verb, mean over ranks."""
    verbs = dict.fromkeys(verb for rank in ranks for verb in rank.verbs)
    return {
        verb: fmean(rank.verbs[verb].exposed if verb in rank.verbs else 0.0 for rank in ranks)
        for verb in verbs
    }


def _overlapped(ranks: Sequence[RankTimes]) -> float:
    return fmean(sum(verb.overlapped for verb in rank.verbs.values()) for rank in ranks)


def _who_waited(done: Sequence[tuple[str, RunSummary]]) -> str:
    """Name the longest wait of one rank for another."""
    waits = [
        (seconds, name, rank.rank, peer)
        for name, summary in done
        for rank in summary.times
        for peer, seconds in rank.waited_seconds.items()
        if peer != ALL_RANKS
    ]
    if not waits:
        return ""
    seconds, name, rank, peer = max(waits)
    waited = f"rank {rank} waited {1e3 * seconds:,.1f} ms a step for rank {peer}"
    return f"The longest wait for one rank: in {name} {waited}."
