"""A sweep's results as Markdown, and pages that have a place for them between two markers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from textwrap import wrap

from zeroexp.config.keys import ConfigError
from zeroexp.process.durable import replace_durably
from zeroexp.report.columns import Column, beside_names, point_columns, status_column
from zeroexp.report.measured_points import MeasuredPoint
from zeroexp.report.statistics import DOUBT, why_doubtful
from zeroexp.report.tables import Table
from zeroexp.report.writing import writing

MEASURED = "measured"
BEGIN, END = (f"<!-- {MEASURED}: {word} -->" for word in ("begin", "end"))
LINE = 100  # characters of prose


def render(points: Sequence[MeasuredPoint], columns: Sequence[Column]) -> str:
    """Return a sentence that says when, where and by which command it ran, then a table of what differs."""
    every = point_columns(points)
    differ = [column for column in every if column.differs(points)]
    models = dict.fromkeys(point.run.config["model.name"] for point in points)
    alike = [f"{c.name} {c.text(points[0])}" for c in every if c not in differ]
    shared = ", ".join([f"model {' and '.join(models)}", *alike])
    sentence = f"{_circumstances(points)} All points: {shared}."
    if any(column.unit == "MiB" for column in columns):
        sentence += " MiB are of the fullest rank."
    if any(why_doubtful(point) for point in points):
        sentence += f" {DOUBT}"
    table = Table.of(points, [*beside_names(differ, columns), *status_column(points)])
    return f"{wrapped(sentence)}\n\n{table.as_markdown()}"


def replace_in(page: Path, text: str, name: str = MEASURED) -> None:
    """Put `text` between the markers of this name. Raises ConfigError if the page has none or cannot be written."""
    begin, end = (f"<!-- {name}: {word} -->" for word in ("begin", "end"))
    with writing("write", page, "use a page that is there, in a folder that you may write to"):
        # In bytes: the ends of lines and the encoding of the rest are the page's own. r+ refuses what is read-only.
        with page.open("r+b") as file:
            before, _, rest = file.read().partition(begin.encode())
        old, marker, after = rest.partition(end.encode())
        if not marker:
            raise ConfigError(
                f"--write {page}: has no place for it; add the lines {begin} and {end}"
            )
        newline = "\r\n" if old.startswith(b"\r\n") else "\n"
        content = newline.join([begin, *text.split("\n"), end]).encode()
        mode = page.stat().st_mode
        replace_durably(page.resolve(), before + content + after)
        page.chmod(mode)


def wrapped(sentence: str) -> str:
    return "\n".join(wrap(sentence, LINE, break_long_words=False, break_on_hyphens=False))


def _circumstances(points: Sequence[MeasuredPoint]) -> str:
    """Return the day, command and versions of the first run that tells, which a sweep shares, and all machines."""
    runs = [point.run for point in points]
    told = [run.environment for run in runs if "command" in run.environment]
    if not told:
        return "No run tells when, where and with which command it ran."
    facts = told[0]
    day = datetime.fromtimestamp(min(runs[0].times.values(), default=0.0), UTC).date()
    machines = dict.fromkeys(
        f"{each.get('machine.processor', each['host'])}, {each['machine.num_cpus']} cores"
        for each in told
    )
    return (
        f"Measured on {day} with `{facts['command']}`; {' and '.join(machines)}; "
        f"Python {facts['versions.python']}, torch {facts['versions.torch']}."
    )
