"""Each point's step time over that of the reference, with its interval: what is real is seen at a glance."""

from __future__ import annotations

from math import log10

from zeroexp.report.conclusions import Conclusions
from zeroexp.report.page.chart import Chart, Trace, bars_height
from zeroexp.report.palette import GREEN, GREY, NAVY, RED
from zeroexp.report.verdict import Comparison, Verdict

TITLE = "Which differences are real"
LOOKS = {  # verdict -> (symbol, colour)
    Verdict.FASTER: ("triangle-left", GREEN),
    Verdict.SLOWER: ("triangle-right", RED),
    Verdict.SAME: ("square", NAVY),
    Verdict.OPEN: ("circle-open", "INK"),
}
WIDEST = 8.0  # an axis beyond this ratio, and below its inverse, would leave no room for what intervals say
NO_DIFFERENCE = 1.02
CLOSE = 1.6  # below this reach of the axis, ticks are close together
TICKS = (0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 1.4), (0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 4, 8)
WORDS = (
    "Step time over that of {reference}, from pairs of runs of one round; intervals hold with 95 % for all points "
    "together. Left of the line is faster; within the grey band, ±2 %, counts as no difference."
)
CUT = " An interval without an end in the chart goes on beyond it; the table has its end."
TOO_FEW = (
    "Step time over that of {reference}. With fewer than three runs each nobody knows how much runs differ, so nothing "
    "is claimed; repeats=5 would tell."
)
ALONE = "One point has nothing to be compared with."


def forest_chart(found: Conclusions) -> Chart:
    """Return the chart; without an interval there is nothing to draw, and the table says so."""
    compared = [(one.point.name, one.comparison) for one in found.judged if one.comparison]
    if found.reference is None or not compared:
        return Chart("forest", TITLE, ALONE)
    if all(comparison.low is None for _, comparison in compared):
        return Chart("forest", TITLE, TOO_FEW.format(reference=found.reference.name))
    words = WORDS.format(reference=found.reference.name)
    rows = [name for name, _ in compared]
    data = [trace for verdict in Verdict if (trace := _marks(verdict, compared))]
    ends = [end for _, c in compared for end in (c.low or c.ratio, c.high or c.ratio)]
    reach = min(WIDEST, 1.1 * max(max(end, 1 / end) for end in [*ends, 1.2]))
    if max(*ends, 1 / min(ends)) > reach:
        words += CUT
    ticks = TICKS[reach > CLOSE]
    layout = {
        "xaxis": {
            "title": {"text": "times the step of the reference"},
            "type": "log",
            "range": [-log10(reach), log10(reach)],
            "tickvals": ticks,
            "ticktext": [f"{tick:g}" for tick in ticks],
        },
        "yaxis": {
            "autorange": "reversed",
            "automargin": True,
            "type": "category",
            "categoryorder": "array",
            "categoryarray": rows,
        },
        "shapes": [_band(1 / NO_DIFFERENCE, NO_DIFFERENCE), _line(1.0)],
        "hovermode": "closest",
        "showlegend": True,
    }
    return Chart("forest", TITLE, words, data, layout, bars_height(len(rows)))


def _marks(verdict: Verdict, compared: list[tuple[str, Comparison]]) -> Trace | None:
    mine = [(name, c) for name, c in compared if c.verdict is verdict]
    if not mine:
        return None
    symbol, colour = LOOKS[verdict]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": verdict.value,
        "y": [name for name, _ in mine],
        "x": [c.ratio for _, c in mine],
        "text": [c.verdict_with_numbers for _, c in mine],
        "hovertemplate": "%{y}: %{text}<extra></extra>",
        "marker": {"symbol": symbol, "size": 11, "color": colour, "line": {"width": 1.5}},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [(c.high or c.ratio) - c.ratio for _, c in mine],
            "arrayminus": [c.ratio - (c.low or c.ratio) for _, c in mine],
            "color": colour,
            "thickness": 2,
            "width": 4,
        },
    }


def _band(low: float, high: float) -> dict[str, object]:
    place = {"x0": low, "x1": high, "y0": 0, "y1": 1, "xref": "x", "yref": "paper"}
    return {"type": "rect", **place, "fillcolor": GREY, "opacity": 0.35, "line": {"width": 0}}


def _line(at: float) -> dict[str, object]:
    place = {"x0": at, "x1": at, "y0": 0, "y1": 1, "xref": "x", "yref": "paper"}
    return {"type": "line", **place, "line": {"color": "INK", "width": 1, "dash": "dot"}}
