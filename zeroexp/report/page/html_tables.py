"""The tables and lists of the page as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from shlex import quote

from zeroexp.report.columns import POINT, Column, columns_to_show, of_parts, status_column
from zeroexp.report.differences import describe_values, differences
from zeroexp.report.meanings import meanings_of
from zeroexp.report.measured_points import MeasuredPoint
from zeroexp.report.statistics import step_time_interval
from zeroexp.report.tables import Table
from zeroexp.tracking.run import Run

# What the page says of where a run ran: key of its environment -> name.
FACTS = {
    "host": "host",
    "machine.processor": "processor",
    "machine.num_cpus": "cores",
    "machine.platform": "system",
    "device": "device asked for",
    "git.commit": "commit",
    "git.dirty": "files differ from the commit",
}


def results_table(points: Sequence[MeasuredPoint]) -> str:
    """Return one row per point: the median of its repeats, the interval of its step time, bytes of the fullest rank."""
    columns = columns_to_show(points)
    times, losses = (of_parts(columns, part) for part in ("times", "losses"))
    results = of_parts(columns, "memory", "plan", "traffic")
    shown = [POINT, INTERVAL, *times, *losses, *results, *status_column(points)]
    meanings = {
        "runs": "over runs",
        "steps": "over the steps of one run, which do not know how much runs differ: repeats=5 would",
    }
    intervals = filter(None, map(step_time_interval, points))
    over = dict.fromkeys(meanings[each.over] for each in intervals)
    notes = [f"The interval of the step is {' or '.join(over)}."] if over else []
    notes += meanings_of(points, shown)
    return f"{Table.of(points, shown).as_html()}<p>{escape(' '.join(notes))}</p>"


def differences_table(points: Sequence[MeasuredPoint]) -> str:
    """Return every fact that differs beside strategy, implementation, ranks and what else was swept."""
    facts = differences(points)
    if not facts:
        return "<p>Nothing: precision, clipping, batch, versions, machine and load are the same for all points.</p>"
    rows = [(key, describe_values(values)) for key, values in facts.items()]
    introduction = (
        "Beside what is compared, the points differ in this. Defaults of one implementation are among it, since they "
        "are part of what it costs."
    )
    return f"<p>{introduction}</p>{Table.of_words(('fact', 'values'), rows).as_html()}"


def provenance_table(points: Sequence[MeasuredPoint]) -> str:
    """Return what was run, where and with which versions, then the commands that run it again."""
    runs = [run for point in points for run in point.runs]
    facts = (key for run in runs for key in run.environment)
    versions = {k: k.removeprefix("versions.") for k in facts if k.startswith("versions.")}
    names = {**FACTS, **versions}
    rows = {"measured": " to ".join(_days(runs))}
    rows |= {name: ", ".join(_environment(runs, key)) for key, name in names.items()}
    sources = (run.summary.data_source for run in runs if run.summary)
    rows["data"] = ", ".join(dict.fromkeys(filter(None, sources)))
    folders = dict.fromkeys(map(_sweep_of, runs))
    again = (f"zeroexp report {quote(folder)} --html report.html" for folder in folders)
    commands = "\n".join([*_environment(runs, "command"), *again])
    questions = dict.fromkeys(run.config.get("study.question", "null") for run in runs)
    asked = escape(" ".join(question for question in questions if question != "null"))
    return (
        f"{Table.of_words(('', ''), [row for row in rows.items() if row[1]]).as_html()}"
        f"<h3>To run it again</h3><pre>{escape(commands)}</pre>"
        f"{f'<p>The question of the study: {asked}</p>' if asked else ''}"
    )


def _sweep_of(run: Run) -> str:
    """Return the sweep's folder as its command named it; by its own names where it was moved since."""
    *_, parent, sweep = ("", *run.folder.absolute().parent.parts)  # of /run: nothing, and the root
    outputs = run.config.get("outputs", "")
    return str(Path(outputs if Path(outputs).name == parent else parent, sweep))


def _environment(runs: Sequence[Run], key: str) -> list[str]:
    return list(dict.fromkeys(run.environment[key] for run in runs if key in run.environment))


def _days(runs: Sequence[Run]) -> list[str]:
    times = [time for run in runs for time in run.times.values()]
    days = (datetime.fromtimestamp(time, UTC) for time in (min(times), max(times))) if times else ()
    return list(dict.fromkeys(f"{day:%Y-%m-%d}" for day in days))


def _interval_text(point: MeasuredPoint) -> str | None:
    interval = step_time_interval(point)
    return f"{1e3 * interval.low:,.1f}–{1e3 * interval.high:,.1f}" if interval else None


INTERVAL = Column("interval", _interval_text, "step", "95 %, ms", "s")
