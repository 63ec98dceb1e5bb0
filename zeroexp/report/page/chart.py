"""A chart as the page draws it: plotly's data and layout as plain dictionaries, beside a sentence that says the same.

Charts have one of two forms: a row for each point, with bars that are stacked from parts and marks (`row_chart`), or
lines and dots over two numbers (`line_chart`). What all of a form share is said once, in DEFAULTS, which plotly takes
as the template of each. The colour INK is that of the text, which depends on the reader's theme. A chart's caption is
all that readers have who see no picture. No file of the page imports plotly but `__init__.py`, which takes the
library's JavaScript from it; `report/figure.py` draws the same charts on paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zeroexp.report.palette import DASHES, PATTERNS, SERIES

ROW, BESIDE = 24, 110  # pixels: one bar, and what is above and below all bars
SHORTEST = 240
MANY = 30  # points beyond which labels inside of a chart would only cover each other
INK = "INK"
Trace = dict[str, Any]
# Traces that say nothing else of these.
DEFAULTS: dict[str, list[Trace]] = {
    "bar": [
        {
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "insidetextfont": {"color": "#000", "size": 10},
            "constraintext": "inside",
            "marker": {
                "line": {"width": 0.5, "color": "#333"},
                "pattern": {
                    "fgcolor": "rgba(0,0,0,0.35)",
                    "fillmode": "overlay",
                    "solidity": 0.15,
                },
            },
            "hovertemplate": "%{x:,.1f}",
        }
    ]
}


@dataclass(frozen=True)
class Chart:
    name: str  # the HTML id
    title: str
    caption: str  # what the chart shows, in a sentence or two
    # Empty: the caption says why there is nothing to draw.
    data: list[Trace] = field(default_factory=list[Trace])
    layout: dict[str, Any] = field(default_factory=dict[str, Any])
    height: int = 380  # pixels


def row_chart(
    name: str,
    title: str,
    caption: str,
    *,
    axis: str | Mapping[str, Any],  # its title, or all of it
    numbers: Mapping[str, Mapping[str, float]],  # row -> part -> number
    colours: Mapping[str, str] | None = None,  # of all parts, in their order
    marks: Sequence[Trace] = (),
    **more: Any,  # of the layout
) -> Chart:
    """Return horizontal bars that are stacked from their parts, the first row at the top; empty parts are left out.

    Each part has a pattern beside its colour, and its number inside of it where it fits.
    """
    rows = list(numbers)
    if not rows:
        return Chart(name, title, "No point came to its end.")
    bars: list[Trace] = []
    for index, (part, colour) in enumerate((colours or {}).items()):
        lengths = [each.get(part, 0) for each in numbers.values()]
        pattern = PATTERNS[index % len(PATTERNS)]
        bar = {
            **{"type": "bar", "orientation": "h", "name": part, "y": rows, "x": lengths},
            "text": [_number(length) if len(rows) <= MANY else "" for length in lengths],
            "marker": {"color": colour, "pattern": pattern},
        }
        bars += [bar] if any(lengths) else []
    layout: dict[str, Any] = {
        "barmode": "stack",
        "bargap": 0.22,
        "xaxis": axis_of(axis, rangemode="tozero") if isinstance(axis, str) else axis,
        "yaxis": rows_axis(rows),
        "hovermode": "y unified" if bars else "closest",
        **more,
    }
    return Chart(name, title, caption, [*bars, *marks], layout, rows_height(rows))


def line_chart(
    name: str, title: str, caption: str, data: Sequence[Trace], height: int = 380, **layout: Any
) -> Chart:
    """Return lines and dots over two numbers."""
    return Chart(name, title, caption, list(data), {"hovermode": "closest", **layout}, height)


def scaled(parts: Mapping[str, float], factor: float) -> dict[str, float]:
    """Return the numbers of a row's parts in the unit that its axis names."""
    return {part: factor * number for part, number in parts.items()}


def rows_axis(rows: Sequence[str]) -> dict[str, Any]:
    order = {"categoryorder": "array", "categoryarray": list(rows)}
    return {"autorange": "reversed", "automargin": True, "type": "category", **order}


def rows_height(rows: Sequence[str]) -> int:
    return max(SHORTEST, BESIDE + ROW * len(rows))


def axis_of(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **more}


def row_marks(
    name: str, values: Mapping[str, float | None], symbol: str, colour: str, **more: Any
) -> Trace:
    """Return one mark per row that has a value."""
    marked = {row: value for row, value in values.items() if value is not None}
    size, width = (15, 2.5) if symbol.startswith("line") else (9, 1.5)
    line = {"width": width, "color": colour}
    marker = {"symbol": symbol, "size": size, "color": colour, "line": line}
    template = {"marker": marker, "hovertemplate": "%{x:,.1f}"}
    return scatter(name, list(marked.values()), list(marked), "markers", **{**template, **more})


def scatter(name: str, x: Sequence[Any], y: Sequence[Any], mode: str, **more: Any) -> Trace:
    return {"type": "scatter", "mode": mode, "name": name, "x": list(x), "y": list(y), **more}


def whiskers(
    middles: Sequence[float],
    lows: Sequence[float],
    highs: Sequence[float],
    colour: str = INK,
    thickness: float = 1.5,
) -> dict[str, Any]:
    """Return what draws an interval at each mark, as plotly's `error_x`."""
    return {
        **{"type": "data", "symmetric": False, "color": colour, "thickness": thickness, "width": 5},
        "array": [high - middle for middle, high in zip(middles, highs, strict=True)],
        "arrayminus": [middle - low for middle, low in zip(middles, lows, strict=True)],
    }


def line_style(index: int, **more: Any) -> dict[str, Any]:
    """Return colour and dash of the line of this number."""
    dash = DASHES[(index // len(SERIES)) % len(DASHES)]
    return {"color": SERIES[index % len(SERIES)], "dash": dash, **more}


def _number(value: float) -> str:
    return format(value, ",.0f" if value >= 20 else ",.1f") if value else ""
