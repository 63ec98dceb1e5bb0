"""The tables of the page as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from zeroexp.report.columns import (
    ABSENT,
    STATUS,
    describe_peak_flops,
    loss_columns,
    memory_columns,
    time_columns,
    traffic_columns,
)
from zeroexp.report.conclusions import Conclusions
from zeroexp.report.differences import describe_values, differences
from zeroexp.report.explain_difference import explanations
from zeroexp.report.measured_points import Point
from zeroexp.report.spread import step_time_interval
from zeroexp.report.verdict import Comparison

LONG = 40  # characters of a cell that may break into lines


def results_table(points: Sequence[Point]) -> str:
    """Return one row per point: the median of its repeats, the interval of its step time, bytes of the fullest rank."""
    pooled = [point.pooled_summary for point in points]
    columns = [
        *[*time_columns(pooled), *loss_columns(pooled)],
        # How ranks differ is shown rank by rank.
        *(part[0] for part in memory_columns(pooled) if part),
        *(part[0] for part in traffic_columns(pooled)),
        *([STATUS] if any(run.status != "done" or run.reason for run in pooled) else []),
    ]
    heads = [("point", ""), ("step", "95 %, ms"), *((c.name, c.unit) for c in columns)]
    rows = [
        [
            (point.name, True),
            (_interval_cell(point), False),
            *((c.value(run), c.left) for c in columns),
        ]
        for point, run in zip(points, pooled, strict=True)
    ]
    return html_table(heads, rows) + _note_cell(points)


def verdict_table(found: Conclusions) -> str:
    """Return each point's step time over that of the reference, with the verdict in words."""
    if found.reference is None or len(found.judged) < 2:
        return ""
    heads = [("point", ""), ("step time", "of the reference's"), ("interval", ""), ("verdict", "")]
    rows = [
        [(one.point.name, True), *_comparison_cells(one.comparison, one.point is found.reference)]
        for one in found.judged
    ]
    return html_table(heads, rows)


def _comparison_cells(comparison: Comparison | None, is_reference: bool) -> list[tuple[str, bool]]:
    if comparison is None:
        return [("1", False), ("", False), ("the reference" if is_reference else ABSENT, True)]
    low, high = comparison.low, comparison.high
    interval = ABSENT if low is None else f"{low:.3f}–{high:.3f}"
    return [
        (f"{comparison.ratio:.3f}", False),
        (interval, False),
        (comparison.verdict_without_numbers, True),
    ]


def differences_table(points: Sequence[Point]) -> str:
    """Return every fact that differs beside strategy, implementation, ranks and what else was swept."""
    found = differences(points)
    if not found:
        return "<p>Nothing: precision, clipping, batch, versions, machine and load are the same for all points.</p>"
    rows = [[(key, True), (describe_values(values), True)] for key, values in found.items()]
    words = (
        "Beside what is compared, the points differ in this. Defaults of one implementation are among it, since they "
        "are part of what it costs."
    )
    return f"<p>{words}</p>{html_table([('fact', ''), ('values', '')], rows)}"


def explanation_list(points: Sequence[Point]) -> str:
    """Return a list for each point that holds or sends something else than its stage's table says."""
    told = explanations(points)
    if not told:
        return "<p>Every point holds and sends what its stage's table says, within 2 %.</p>"
    lists = (
        f"<h3>{escape(name)}</h3><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"
        for name, lines in told
    )
    return "\n".join(lists)


def html_table(heads: Sequence[tuple[str, str]], rows: Sequence[Sequence[tuple[str, bool]]]) -> str:
    """Return a table that scrolls sideways where it must; each cell is (text, is it words rather than a number)."""
    words = [left for _, left in rows[0]] if rows else [True] * len(heads)
    top = "".join(_head(*head, left) for head, left in zip(heads, words, strict=True))
    body = "\n".join(f"<tr>{''.join(_cell(*cell) for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _head(name: str, unit: str, left: bool) -> str:
    return f"<th{' class=left' if left else ''}>{escape(name)}<small>{escape(unit)}</small></th>"


def _cell(text: str, words: bool) -> str:
    long = " long" if words and len(text) > LONG else ""
    return f'<td class="left{long}">{escape(text)}</td>' if words else f"<td>{escape(text)}</td>"


def _interval_cell(point: Point) -> str:
    found = step_time_interval(point)
    return f"{1e3 * found.low:,.1f}–{1e3 * found.high:,.1f}" if found else ABSENT


def _note_cell(points: Sequence[Point]) -> str:
    over = dict.fromkeys(found.over for point in points if (found := step_time_interval(point)))
    said = {
        "runs": "over runs",
        "steps": "over the steps of one run, which do not know how much runs differ: repeats=5 would",
    }
    intervals = (
        f" The interval of the step is {' or '.join(said[o] for o in over)}." if over else ""
    )
    utilised = escape(f" {describe_peak_flops([point.run for point in points])}").rstrip()
    return (
        "<p>Bytes are MiB of the fullest rank. Step times are medians of rank 0"
        f" over the measured steps.{intervals}{utilised}</p>"
    )
