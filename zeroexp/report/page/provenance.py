"""This table tells what was run, where and with which versions, and gives the commands that run it again."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from shlex import quote

from zeroexp.report.measured_points import Point
from zeroexp.report.page.html_tables import html_table
from zeroexp.tracking.run import Run

FACTS = {
    "host": "host",
    "machine.processor": "processor",
    "machine.num_cpus": "cores",
    "machine.platform": "system",
    "device": "device asked for",
    "git.commit": "commit",
    "git.dirty": "files differ from the commit",
}


def provenance_table(points: Sequence[Point]) -> str:
    """Return a table of facts, with every value that any run has, then the commands and the folders."""
    runs = [run for point in points for run in point.runs]
    versions = dict.fromkeys(
        key for run in runs for key in run.environment if key.startswith("versions.")
    )
    names = {**FACTS, **{key: key.removeprefix("versions.") for key in versions}}
    rows = [("measured", " to ".join(_days(runs)))]
    rows += [(name, _values(runs, key)) for key, name in names.items() if _values(runs, key)]
    rows += [("data", ", ".join(dict.fromkeys(_data(run) for run in runs if _data(run))))]
    facts = html_table(
        [("", ""), ("", "")], [[(name, True), (value, True)] for name, value in rows if value]
    )
    return f"{facts}<h3>To run it again</h3><pre>{escape(_commands(runs))}</pre>{_question(runs)}"


def _days(runs: Sequence[Run]) -> list[str]:
    times = [time for run in runs for time in run.times.values()]
    days = (datetime.fromtimestamp(time, UTC) for time in (min(times), max(times))) if times else ()
    return list(dict.fromkeys(f"{day:%Y-%m-%d}" for day in days))


def _values(runs: Sequence[Run], key: str) -> str:
    return ", ".join(dict.fromkeys(run.environment[key] for run in runs if key in run.environment))


def _data(run: Run) -> str:
    return run.summary.data_source if run.summary else ""


def _commands(runs: Sequence[Run]) -> str:
    said = dict.fromkeys(run.environment["command"] for run in runs if "command" in run.environment)
    folders = dict.fromkeys("/".join(run.folder.absolute().parts[-3:-1]) for run in runs)
    again = (f"python -m zeroexp.report {quote(folder)} --html report.html" for folder in folders)
    return "\n".join([*said, *again])


def _question(runs: Sequence[Run]) -> str:
    questions = dict.fromkeys(run.config.get("study.question", "null") for run in runs)
    asked = [question for question in questions if question != "null"]
    return f"<p>The question of the study: {escape(' '.join(asked))}</p>" if asked else ""
