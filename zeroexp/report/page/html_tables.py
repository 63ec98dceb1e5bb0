"""The tables and lists of the page as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from shlex import quote

from zeroexp.report.columns import columns_of, describe_peak_flops
from zeroexp.report.compare import Conclusions, Judged
from zeroexp.report.differences import describe_values, differences
from zeroexp.report.explain_difference import explanations
from zeroexp.report.measured_points import Point
from zeroexp.report.settings import ABSENT
from zeroexp.report.statistics import step_time_interval
from zeroexp.tracking.run import Run

LONG = 40  # characters of a cell that may break into lines
Cell = tuple[str, bool]  # the text, and whether it is aligned left, as words are
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


def results_table(points: Sequence[Point]) -> str:
    """Return one row per point: the median of its repeats, the interval of its step time, bytes of the fullest rank."""
    pooled = [point.pooled_summary for point in points]
    intervals = [step_time_interval(point) for point in points]
    groups = columns_of(pooled)
    # How ranks differ is shown rank by rank.
    columns = [*groups.times, *groups.losses, *groups.fullest]
    if any(run.status != "done" or run.reason for run in pooled):
        columns.append(groups.status)
    heads = [("point", ""), ("step", "95 %, ms"), *((c.name, c.unit) for c in columns)]
    rows: list[list[Cell]] = []
    for point, run, each in zip(points, pooled, intervals, strict=True):
        interval = f"{1e3 * each.low:,.1f}–{1e3 * each.high:,.1f}" if each else ABSENT
        cells = [(column.value(run), column.left) for column in columns]
        rows.append([(point.name, True), (interval, False), *cells])
    meanings = {
        "runs": "over runs",
        "steps": "over the steps of one run, which do not know how much runs differ: repeats=5 would",
    }
    over = dict.fromkeys(meanings[each.over] for each in intervals if each)
    notes = [
        "Bytes are MiB of the fullest rank. Step times are medians of rank 0 over the measured steps.",
        f"The interval of the step is {' or '.join(over)}." if over else "",
        escape(describe_peak_flops([point.run for point in points])),
    ]
    return f"{html_table(heads, rows)}<p>{' '.join(filter(None, notes))}</p>"


def verdict_table(conclusions: Conclusions) -> str:
    """Return each point's step time over that of the reference, with the verdict in words."""
    if conclusions.reference is None or len(conclusions.judged) < 2:
        return ""
    heads = [("point", ""), ("step time", "of the reference's"), ("interval", ""), ("verdict", "")]
    return html_table(
        heads,
        [[(one.point.name, True), *_verdict_cells(one, conclusions)] for one in conclusions.judged],
    )


def _verdict_cells(one: Judged, conclusions: Conclusions) -> list[Cell]:
    comparison = one.comparison
    if comparison is None:
        verdict = "the reference" if one.point is conclusions.reference else ABSENT
        return [("1", False), ("", False), (verdict, True)]
    low, high = comparison.low, comparison.high
    interval = ABSENT if low is None else f"{low:.3f}–{high:.3f}"
    verdict = comparison.verdict_without_numbers
    return [(f"{comparison.ratio:.3f}", False), (interval, False), (verdict, True)]


def differences_table(points: Sequence[Point]) -> str:
    """Return every fact that differs beside strategy, implementation, ranks and what else was swept."""
    facts = differences(points)
    if not facts:
        return "<p>Nothing: precision, clipping, batch, versions, machine and load are the same for all points.</p>"
    rows = [(key, describe_values(values)) for key, values in facts.items()]
    introduction = (
        "Beside what is compared, the points differ in this. Defaults of one implementation are among it, since they "
        "are part of what it costs."
    )
    return f"<p>{introduction}</p>{_table_of_words(('fact', 'values'), rows)}"


def explanation_list(points: Sequence[Point]) -> str:
    """Return a list for each point that holds or sends something else than its stage's table says."""
    lists = [
        f"<h3>{escape(name)}</h3><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"
        for name, lines in explanations(points)
    ]
    nothing = "<p>Every point holds and sends what its stage's table says, within 2 %.</p>"
    return "\n".join(lists) or nothing


def provenance_table(points: Sequence[Point]) -> str:
    """Return what was run, where and with which versions, then the commands that run it again."""
    runs = [run for point in points for run in point.runs]
    versions = dict.fromkeys(
        k for run in runs for k in run.environment if k.startswith("versions.")
    )
    names = {**FACTS, **{key: key.removeprefix("versions.") for key in versions}}
    rows = {"measured": " to ".join(_days(runs))}
    rows |= {name: ", ".join(_environment(runs, key)) for key, name in names.items()}
    rows["data"] = ", ".join(
        dict.fromkeys(
            run.summary.data_source for run in runs if run.summary and run.summary.data_source
        )
    )
    folders = dict.fromkeys("/".join(run.folder.absolute().parts[-3:-1]) for run in runs)
    again = (f"zeroexp report {quote(folder)} --html report.html" for folder in folders)
    commands = "\n".join([*_environment(runs, "command"), *again])
    questions = dict.fromkeys(run.config.get("study.question", "null") for run in runs)
    asked = escape(" ".join(question for question in questions if question != "null"))
    return (
        f"{_table_of_words(('', ''), [row for row in rows.items() if row[1]])}"
        f"<h3>To run it again</h3><pre>{escape(commands)}</pre>"
        f"{f'<p>The question of the study: {asked}</p>' if asked else ''}"
    )


def _environment(runs: Sequence[Run], key: str) -> list[str]:
    return list(dict.fromkeys(run.environment[key] for run in runs if key in run.environment))


def _days(runs: Sequence[Run]) -> list[str]:
    times = [time for run in runs for time in run.times.values()]
    days = (datetime.fromtimestamp(time, UTC) for time in (min(times), max(times))) if times else ()
    return list(dict.fromkeys(f"{day:%Y-%m-%d}" for day in days))


def _table_of_words(heads: Sequence[str], rows: Sequence[tuple[str, str]]) -> str:
    cells = [[(text, True) for text in row] for row in rows]
    return html_table([(head, "") for head in heads], cells)


def html_table(heads: Sequence[tuple[str, str]], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table that scrolls sideways where it must, under heads of (name, unit)."""
    lefts = [left for _, left in rows[0]] if rows else [True] * len(heads)
    top = "".join(
        f"<th{' class=left' if left else ''}>{escape(name)}<small>{escape(unit)}</small></th>"
        for (name, unit), left in zip(heads, lefts, strict=True)
    )
    body = "\n".join(f"<tr>{''.join(_cell(*cell) for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _cell(text: str, left: bool) -> str:
    long = " long" if left and len(text) > LONG else ""
    return f'<td class="left{long}">{escape(text)}</td>' if left else f"<td>{escape(text)}</td>"
