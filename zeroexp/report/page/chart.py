"""A chart as the page draws it: plotly's data and layout as plain dictionaries, beside a sentence that says the same.

Charts have a row for each point, with bars that are stacked from parts and marks (`row_chart`), or lines and dots over
two numbers. How all bars look is said once, in `template.html`. The colour INK is that of the text, which depends on
the reader's theme. A chart's caption is all that readers have who see no picture. No file of the page imports plotly
but `__init__.py`, which takes the library's JavaScript from it; `report/figure.py` draws the same charts on paper.
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
    scale: float = 1.0,  # to the unit that the axis names
    colours: Mapping[str, str] | None = None,  # of all parts, in their order
    marks: Sequence[Trace] = (),
    nothing: str = "No point came to its end.",  # where there is no row
    **more: Any,  # of the layout
) -> Chart:
    """Return horizontal bars that are stacked from their parts, the first row at the top; empty parts are left out.

    Each part has a pattern beside its colour, and its number inside of it where it fits.
    """
    rows = list(numbers)
    if not rows:
        return Chart(name, title, nothing)
    bars: list[Trace] = []
    for index, (part, colour) in enumerate((colours or {}).items()):
        lengths = [scale * each.get(part, 0) for each in numbers.values()]
        bar = {
            **{"type": "bar", "orientation": "h", "name": part, "y": rows, "x": lengths},
            "text": [_number(length) if len(rows) <= MANY else "" for length in lengths],
            "marker": {"color": colour, "pattern": PATTERNS[index % len(PATTERNS)]},
        }
        bars += [bar] if any(lengths) else []
    order = {"categoryorder": "array", "categoryarray": rows}
    layout: dict[str, Any] = {
        "barmode": "stack",
        "bargap": 0.22,
        "xaxis": axis_of(axis, rangemode="tozero") if isinstance(axis, str) else axis,
        "yaxis": {"autorange": "reversed", "automargin": True, "type": "category", **order},
        "hovermode": "y unified" if bars else "closest",
        **more,
    }
    height = max(SHORTEST, BESIDE + ROW * len(rows))
    return Chart(name, title, caption, [*bars, *marks], layout, height)


def axis_of(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **more}


def row_marks(
    name: str,
    values: Mapping[str, float],
    symbol: str,
    colour: str,
    ends: Mapping[str, tuple[float, float]] | None = None,
    **more: Any,
) -> Trace:
    """Return one mark for each row that has a value, with its interval where it has `ends`."""
    size, width = (15, 2.5) if symbol.startswith("line") else (9, 1.5)
    line = {"width": width, "color": colour}
    marker = {"symbol": symbol, "size": size, "color": colour, "line": line}
    looks = {"marker": marker, "hovertemplate": "%{x:,.1f}"}
    if ends:
        looks["error_x"] = {
            **{"type": "data", "symmetric": False, "color": colour, "thickness": 2, "width": 5},
            "array": [max(0.0, ends[row][1] - middle) for row, middle in values.items()],
            "arrayminus": [max(0.0, middle - ends[row][0]) for row, middle in values.items()],
        }
    return scatter(name, list(values.values()), list(values), "markers", **{**looks, **more})


def scatter(name: str, x: Sequence[Any], y: Sequence[Any], mode: str, **more: Any) -> Trace:
    return {"type": "scatter", "mode": mode, "name": name, "x": list(x), "y": list(y), **more}


def line_style(index: int, **more: Any) -> dict[str, Any]:
    dash = DASHES[(index // len(SERIES)) % len(DASHES)]
    return {"color": SERIES[index % len(SERIES)], "dash": dash, **more}


def _number(value: float) -> str:
    return format(value, ",.0f" if value >= 20 else ",.1f") if value else ""
