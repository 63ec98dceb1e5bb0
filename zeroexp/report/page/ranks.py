"""This chart has one square per rank and point, and shows who holds or sends more than the others."""

from __future__ import annotations

from collections.abc import Sequence

from zeroexp.measure.record import RunSummary, Spread
from zeroexp.report.columns import MIB
from zeroexp.report.measured_points import Point
from zeroexp.report.page.chart import MANY, Chart, Trace, bars_height

TITLE = "Rank by rank"
MANY_RANKS = 12


def ranks_chart(points: Sequence[Point]) -> Chart:
    """Draw three heat maps of which the reader chooses one: bytes held, peak, bytes sent."""
    done = [(point, point.summary) for point in points if point.summary]
    maps = {
        "most held at one moment": [s.memory.total for _, s in done],
        "peak": [s.memory.peak for _, s in done],
        "sent per step": [s.sent_bytes_per_step for _, s in done],
    }
    maps = {name: spreads for name, spreads in maps.items() if any(spreads)}
    rows, size = [point.name for point, _ in done], max((s.world_size for _, s in done), default=0)
    data = [
        _map(name, rows, spreads, size, shown=not i)
        for i, (name, spreads) in enumerate(maps.items())
    ]
    layout = {
        "xaxis": {"title": {"text": "rank"}, "dtick": 1 if size <= MANY_RANKS else None},
        "yaxis": {"autorange": "reversed", "automargin": True, "type": "category"},
        "updatemenus": [_menu(list(maps))],
    }
    words = f"MiB of each rank, the same scale for all; a choice above shows what. {_skew(done)}"
    return Chart("ranks", TITLE, words, data, layout, bars_height(len(rows)) + 60)


def _map(
    name: str, rows: Sequence[str], spreads: Sequence[Spread | None], size: int, *, shown: bool
) -> Trace:
    values = [
        [value / MIB for value in spread.per_rank] + [None] * (size - len(spread.per_rank))
        if spread
        else [None] * size
        for spread in spreads
    ]
    return {
        "type": "heatmap",
        "name": name,
        "y": list(rows),
        "x": list(range(size)),
        "z": values,
        "colorscale": "Cividis",
        "colorbar": {"title": {"text": "MiB"}, "thickness": 12},
        "texttemplate": "%{z:,.1f}" if size <= MANY_RANKS and len(rows) <= MANY else "",
        "xgap": 2,
        "ygap": 2,
        "visible": shown,
        "hovertemplate": "%{y}, rank %{x}: %{z:,.2f} MiB<extra></extra>",
    }


def _menu(names: Sequence[str]) -> dict[str, object]:
    buttons = [
        {
            "label": name,
            "method": "restyle",
            "args": ["visible", [other == name for other in names]],
        }
        for name in names
    ]
    place = {"x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}
    return {"type": "dropdown", "buttons": buttons, "showactive": True, "pad": {"b": 4}, **place}


def _skew(done: Sequence[tuple[Point, RunSummary]]) -> str:
    skews = {point.name: s.memory.total.fullest / (s.memory.total.mean or 1) for point, s in done}
    if not skews:
        return ""
    worst = max(skews, key=skews.__getitem__)
    if skews[worst] < 1.005:
        return "In every point all ranks hold the same, within half a percent."
    more = 100 * (skews[worst] - 1)
    return (
        f"The least even point is {worst}: its fullest rank holds {more:.1f} % more than the mean."
    )
