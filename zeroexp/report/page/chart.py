"""A chart as the page draws it: plotly's data and layout as plain dictionaries, beside a sentence that says the same.

No file of the page imports plotly but `__init__.py`, which takes the library's JavaScript from it. A chart's words are
the page's for readers who see no picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zeroexp.report.columns import MIB
from zeroexp.report.palette import PATTERNS, RED

ROW, BESIDE = 24, 110  # pixels: one bar, and what is above and below all bars
SHORTEST = 240
MANY = 30  # points beyond which labels inside of a chart would only cover each other
NUMBERS = {"size": 10}
Trace = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    name: str  # the HTML id
    title: str
    words: str  # what the chart shows, in a sentence or two
    # Empty: the words say why there is nothing to draw.
    data: list[Trace] = field(default_factory=list[Trace])
    layout: dict[str, Any] = field(default_factory=dict[str, Any])
    height: int = 380  # pixels


def bars_height(num_rows: int) -> int:
    return max(SHORTEST, BESIDE + ROW * num_rows)


def bars_layout(axis: str) -> dict[str, Any]:
    """Return the layout of horizontal bars that are stacked, the first row at the top."""
    return {
        "barmode": "stack",
        "bargap": 0.22,
        "xaxis": {"title": {"text": axis}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "automargin": True, "type": "category"},
        "hovermode": "y unified",
    }


def stacked(
    name: str, rows: Sequence[str], values: Sequence[float | None], colour: str, index: int
) -> Trace:
    """Return one part of every bar, with its number inside of it where it fits and a pattern beside its colour."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": list(rows),
        "x": list(values),
        "text": [_number(value) if len(rows) <= MANY else "" for value in values],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "textfont": {"color": "#000", **NUMBERS},
        "constraintext": "inside",
        "marker": {
            "color": colour,
            "line": {"width": 0.5, "color": "#333"},
            "pattern": {
                "shape": PATTERNS[index % len(PATTERNS)],
                "fgcolor": "rgba(0,0,0,0.35)",
                "fillmode": "overlay",
                "size": 6,
                "solidity": 0.15,
            },
        },
        "hovertemplate": "%{x:,.1f}",
    }


def marks(
    name: str, rows: Sequence[str], values: Sequence[float | None], symbol: str, colour: str
) -> Trace:
    """Return one mark per row that has a value."""
    known = [(row, value) for row, value in zip(rows, values, strict=True) if value is not None]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "y": [row for row, _ in known],
        "x": [value for _, value in known],
        "marker": {
            "symbol": symbol,
            "size": 15 if symbol.startswith("line") else 9,
            "color": colour,
            "line": {"width": 2.5 if symbol.startswith("line") else 1.5, "color": colour},
        },
        "hovertemplate": "%{x:,.1f}",
    }


def form_marks(rows: Sequence[str], known: Mapping[str, Sequence[float | None]]) -> list[Trace]:
    """Return a mark per row for bytes that a form says, by the name of the form."""
    symbols = {"closed form": "diamond-open"}
    return [
        marks(
            name,
            rows,
            [None if number is None else number / MIB for number in numbers],
            symbols.get(name, "square-open"),
            RED,
        )
        for name, numbers in known.items()
    ]


def _number(value: float | None) -> str:
    if not value:
        return ""
    return format(value, ",.0f" if value >= 20 else ",.1f")
