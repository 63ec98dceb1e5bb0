"""The page of a report: one HTML file with every table, chart and word, and the library that draws it inside.

`render` needs run folders and nothing else. Each chart is a function of the points.
`template.html` holds the style and the few lines of JavaScript that hand the charts to plotly, in the colours of the
reader's theme. The page states that it may load nothing (its Content-Security-Policy), so that it works from a file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from html import escape
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from zeroexp.config.keys import ConfigError
from zeroexp.process.locks import temporary_folder
from zeroexp.report.conclusions import Conclusions, conclude
from zeroexp.report.headline import headline_cards, headline_sentences
from zeroexp.report.measured_points import MeasuredPoint
from zeroexp.report.page.byte_charts import causes_chart, memory_chart, traffic_chart
from zeroexp.report.page.chart import Chart
from zeroexp.report.page.html_tables import differences_table, provenance_table, results_table
from zeroexp.report.page.losses import loss_chart
from zeroexp.report.page.step_timeline import timeline_charts
from zeroexp.report.page.time_charts import (
    exposed_chart,
    scaling_chart,
    step_time_chart,
    verdict_chart,
)
from zeroexp.report.writing import writing
from zeroexp.tracking.run import PAGE

TEMPLATES = ("hovertemplate", "texttemplate")  # these are ours, and have plotly's tags
CARD = '<div class="card"><b>{}</b><strong>{}</strong><span>{}</span></div>'
CHARTS: list[Callable[[Sequence[MeasuredPoint]], Chart]] = [
    memory_chart,
    causes_chart,
    step_time_chart,
    exposed_chart,
    scaling_chart,
    traffic_chart,
    loss_chart,
]


def write_into(folder: Path, points: Sequence[MeasuredPoint]) -> None:
    """Write the page of a sweep into its folder and print where it is; a full disk costs one line."""
    path = folder / PAGE
    try:
        save(points, [], path)
    except ConfigError as error:
        print(f"\nno report: {error}")
        return
    print(f"\nReport: {os.path.relpath(path)}")


def save(
    points: Sequence[MeasuredPoint],
    problems: Sequence[str],
    path: Path,
    conclusions: Conclusions | None = None,
) -> None:
    """Write the page. Raises ConfigError if the file cannot be written."""
    text = render(points, problems, conclusions)
    with writing("html", path), temporary_folder(path.parent) as beside:
        (beside / PAGE).write_text(text, encoding="utf-8")
        (beside / PAGE).replace(path)  # it appears whole


def render(
    points: Sequence[MeasuredPoint],
    problems: Sequence[str] = (),
    conclusions: Conclusions | None = None,
) -> str:
    """Return the page about these points; `problems` are lines about runs that are not on it.

    conclusions: what is concluded of them, by default beside the first point.
    """
    conclusions = conclusions or conclude(points)
    verdicts = verdict_chart(conclusions)
    charts = [*(make(points) for make in CHARTS), *timeline_charts(points)]
    claims, lines = (
        _each("<pre>{}</pre>", "\n".join(each)) if each else ""
        for each in (conclusions.claim_lines, conclusions.verdicts)
    )
    sections = [
        *([("claims", "What the study claims", claims)] if claims else []),
        ("results", "Results", results_table(points)),
        ("verdicts", verdicts.title, _figure(verdicts) + lines),
        *((f"s-{chart.name}", chart.title, _figure(chart)) for chart in charts),
        ("differences", "What else differs", differences_table(points)),
        ("provenance", "What was run, and how to repeat it", provenance_table(points)),
    ]
    template = files(__name__).joinpath("template.html").read_text(encoding="utf-8")
    sweeps = dict.fromkeys(run.sweep for point in points for run in point.runs)
    drawn = [_drawn(chart) for chart in [verdicts, *charts] if chart.data]
    values = {
        "title": escape(" and ".join(sweeps)),
        "cards": _each(CARD, *headline_cards(points)),
        "headline": _each("<li>{}</li>", *headline_sentences(points)),
        "doubts": _each('<p class="doubt">{}</p>', *conclusions.doubts),
        "problems": _each('<p class="problem">{}</p>', *conclusions.broken, *problems),
        "links": " ".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, _ in sections),
        "sections": "\n".join(
            f'<section id="{name}"><h2>{escape(title)}</h2>\n{body}</section>'
            for name, title, body in sections
        ),
        # No text of a run can end the script that holds it.
        "charts": json.dumps(drawn).replace("<", "\\u003c"),
        "plotly": get_plotlyjs(),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def chart_of(name: str, points: Sequence[MeasuredPoint], conclusions: Conclusions) -> Chart:
    """Return one chart by its name. Raises ConfigError for a name that none has."""
    makers = {make.__name__.removesuffix("_chart"): partial(make, points) for make in CHARTS}
    makers["verdict"] = partial(verdict_chart, conclusions)
    if name not in makers:
        raise ConfigError(f"--chart {name}: no such chart; use one of {', '.join(makers)}")
    return makers[name]()


def _drawn(chart: Chart) -> dict[str, Any]:
    """Return the chart for JSON: plotly takes tags in names for its own, and JSON has no infinity."""
    content = asdict(chart)
    return {**content, **{part: _plain(content[part]) for part in ("data", "layout")}}


def _plain(part: Any, key: str = "") -> Any:
    if isinstance(part, dict):
        return {name: _plain(value, name) for name, value in part.items()}
    if isinstance(part, list):
        return [_plain(value, key) for value in part]
    if isinstance(part, str) and key not in TEMPLATES:
        return part.replace("&", "&amp;").replace("<", "&lt;")
    return None if isinstance(part, float) and not isfinite(part) else part


def _figure(chart: Chart) -> str:
    figcaption = f"<figcaption>{escape(chart.caption)}</figcaption>"
    if not chart.data:
        return f"<figure>{figcaption}</figure>"
    label = escape(f"{chart.title}. {chart.caption}", quote=True)
    box = f'<div id="{chart.name}" class="chart" role="img" aria-label="{label}" style="--height:{chart.height}px">'
    return f"<figure>{figcaption}{box}</div></figure>"


def _each(form: str, *rows: str | Sequence[str]) -> str:
    """Return the form for each text, or row of texts, escaped."""
    texts = ([row] if isinstance(row, str) else row for row in rows)
    return "".join(form.format(*map(escape, each)) for each in texts)
