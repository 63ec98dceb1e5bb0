"""A chart of the page on paper: SVG or PDF, drawn by matplotlib from the same traces.

Only this file imports matplotlib, which MLflow depends on, and it is imported only when a figure is wanted. Its text is
text, and its background is opaque, so that it reads the same on a light and on a dark page. The same runs give the same
file, byte for byte, under one version of matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zeroexp.config.keys import ConfigError
from zeroexp.report.page.chart import INK, Chart, Trace
from zeroexp.report.palette import DENSE
from zeroexp.report.writing import writing

SUFFIXES = (".svg", ".pdf")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "pdf.fonttype": 42,  # fonts that journals take
    "svg.hashsalt": "zeroexp",  # fixes the identifiers inside the file
    "font.family": "sans-serif",
    "font.size": 10,
}
# Dates and programs would make two files of the same runs differ.
METADATA: dict[str, dict[str, None]] = {
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
# Inches: the figure, one row, and what is above and below all rows.
WIDTH, ROW, BESIDE = 9.0, 0.26, 1.5
MARKERS = {
    **{"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "triangle-left": "<"},
    **{"triangle-right": ">", "cross": "P", "star": "*", "x": "x", "hexagon": "h", "line-ns": "|"},
}
DASHES: dict[str, Any] = {
    **{"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."},
    **{"longdash": (0, (8, 3)), "longdashdot": (0, (8, 3, 1, 3))},
}
BELOW = 0.45  # of a row: a mark that stands off its bar, whose number it would hide
SMALL = 20  # below this length of the longest row, sums have decimals
NARROWEST = 0.03  # a part narrower than this fraction of the longest bar shows no number


def save_figure(chart: Chart, path: Path) -> None:
    """Write the figure. Raises ConfigError if there is nothing to draw, or the file cannot be written."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--figure {path}: use a name that ends in {' or '.join(SUFFIXES)}")
    if not chart.data:
        raise ConfigError(f"--figure {path}: nothing to draw; {chart.caption}")
    with rc_context(STYLE), writing("figure", path):
        draw_figure(chart).savefig(path, metadata=METADATA[path.suffix])


def draw_figure(chart: Chart) -> Figure:
    """Draw rows with bars and marks, or lines and dots over two numbers."""
    rows: list[str] = chart.layout["yaxis"].get("categoryarray", [])
    height = BESIDE + ROW * len(rows) if rows else chart.height / 100
    figure = Figure(figsize=(WIDTH, height), facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    _set_axis(axes, "x", chart.layout["xaxis"])
    if rows:
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.tick_params(axis="y", left=False)
    else:
        _set_axis(axes, "y", chart.layout["yaxis"])
    for shape in chart.layout.get("shapes", []):
        axes.axvspan(shape["x0"], shape["x1"], color="#888", alpha=shape.get("opacity", 1.0), lw=1)
    ends = dict.fromkeys(rows, 0.0)
    for trace in chart.data:
        if trace["type"] == "bar":
            _draw_bar(axes, trace, rows, ends)
        elif trace.get("yaxis", "y") == "y":  # the lower half of a chart stays on the page
            _draw_marks(axes, trace, rows)
    if any(ends.values()):
        _write_sums(axes, chart, ends)
    handles, labels = axes.get_legend_handles_labels()
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "frameon": False, "fontsize": "small"}
    axes.legend(handles, labels, ncols=4, **place)
    figure.suptitle(chart.title, x=0.01, ha="left", weight="bold", fontsize="medium")
    return figure


def _set_axis(axes: Axes, which: str, words: dict[str, Any]) -> None:
    """Take title, range, scale and ticks from plotly's words for an axis."""
    is_log, limits = words.get("type") == "log", words.get("range")
    looks: dict[str, Any] = {"label": words["title"]["text"]}
    if is_log:
        looks["scale"] = "log"
    if limits:
        looks["lim"] = [10**end for end in limits] if is_log else limits
    if "tickvals" in words:
        looks |= {"ticks": words["tickvals"], "ticklabels": words["ticktext"]}
    axes.set(**{f"{which}{part}": value for part, value in looks.items()})
    axes.minorticks_off()  # a logarithm would name its powers of ten beside the ticks


def _draw_bar(axes: Axes, trace: Trace, rows: Sequence[str], ends: dict[str, float]) -> None:
    """Draw one part of every row behind the parts before it, with its number where it fits."""
    marker, lefts = trace["marker"], [ends[row] for row in trace["y"]]
    places = [rows.index(row) for row in trace["y"]]
    pattern = marker["pattern"]
    hatch = pattern["shape"] * (2 if pattern["size"] == DENSE else 1)
    look = {"color": marker["color"], "hatch": hatch, "edgecolor": "#333"}
    drawn = axes.barh(places, trace["x"], 0.8, lefts, linewidth=0.4, label=trace["name"], **look)
    ends |= {row: ends[row] + length for row, length in zip(trace["y"], trace["x"], strict=True)}
    longest = max(ends.values())
    texts = zip(trace["text"], trace["x"], strict=True)
    fitting = [text if length > NARROWEST * longest else "" for text, length in texts]
    axes.bar_label(drawn, fitting, label_type="center", fontsize="x-small")


def _write_sums(axes: Axes, chart: Chart, ends: Mapping[str, float]) -> None:
    """Write the sum of each row, and what its line marks, behind all that is drawn in it."""
    form = ",.0f" if max(ends.values()) >= SMALL else ",.2f"
    words = {row: [f"{end:{form}}"] for row, end in ends.items()}
    reach = dict(ends)
    for trace in (trace for trace in chart.data if trace["type"] == "scatter"):
        beyond = trace.get("error_x", {}).get("array", [0.0] * len(trace["y"]))
        for row, x, more in zip(trace["y"], trace["x"], beyond, strict=True):
            reach[row] = max(reach[row], x + more)
            mark = f"{x:{form}}"
            if trace["marker"]["symbol"] == "line-ns-open" and words[row] != [mark]:
                words[row].append(f"{trace['name'].split()[0]} {mark}")
    left, right = axes.get_xlim()
    for place, row in enumerate(ends):
        text, end = ", ".join(words[row]), min(reach[row], right)
        axes.text(end, place, f"  {text}", va="center", fontsize="small", clip_on=False)
    axes.set_xlim(left, right)


def _draw_marks(axes: Axes, trace: Trace, rows: Sequence[str]) -> None:
    """Draw dots, lines, or both, with the intervals of dots."""
    across, up = trace["x"], [rows.index(y) if rows else y for y in trace["y"]]
    marker, line, mode = trace.get("marker", {}), trace.get("line", {}), trace["mode"]
    if "standoff" in marker:
        up = [row + BELOW for row in up]
    colour = _ink(marker.get("color") or line.get("color"))
    label = trace["name"]
    if "lines" in mode:
        dash = DASHES[line.get("dash", "solid")]
        axes.plot(across, up, color=colour, ls=dash, lw=line.get("width", 1.5), label=label)
        label = None
    if "markers" in mode:
        symbol = marker.get("symbol", "circle")
        fill = "none" if symbol.endswith("-open") else colour
        look = {"markerfacecolor": fill, "markeredgecolor": colour, "ms": marker.get("size", 6)}
        shape = MARKERS[symbol.removesuffix("-open")]
        clips = trace.get("cliponaxis", True)
        axes.plot(across, up, shape, color=colour, label=label, clip_on=clips, **look)
    if "error_x" in trace:
        ends = [trace["error_x"]["arrayminus"], trace["error_x"]["array"]]
        axes.errorbar(across, up, xerr=ends, fmt="none", ecolor=colour, capsize=3, lw=1.5)


def _ink(colour: str | None) -> str:
    return "#1b1b1b" if colour in (None, INK, "#fff") else str(colour)
