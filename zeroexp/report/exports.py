"""A sweep's results for other programs: CSV, JSON and LaTeX, one row per point, units in the names. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from zeroexp.report.columns import peak_flops_by_name, peak_name, printed_columns, utilisation
from zeroexp.report.compare import Conclusions
from zeroexp.report.differences import differences
from zeroexp.report.measured_points import Point
from zeroexp.report.statistics import step_time_interval, why_unsteady
from zeroexp.report.theory import table_bytes, table_traffic
from zeroexp.tracking.json_files import dumps

FORMAT = 1  # grows when a name of a row changes its meaning or goes
LATEX = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}"}
LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {"·": r"$\cdot$", "–": "--", "…": r"\ldots{}"}


def rows_of(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the numbers of each point; what is unknown is None. Bytes are the fullest rank's."""
    peaks = peak_flops_by_name([point.run for point in points])
    return [_row(point, peaks) for point in points]


def _row(point: Point, peaks: Mapping[str, float]) -> dict[str, Any]:
    run = point.pooled_summary
    row: dict[str, Any] = {
        "point": point.name,
        "sweep": run.sweep,
        "strategy": run.strategy,
        "implementation": run.implementation,
        "world_size": run.world_size,
        "status": run.status,
        "reason": run.reason,
        "num_runs": len(point.runs),
    }
    summary = run.summary
    if summary is None:
        return row
    memory, interval = summary.memory, step_time_interval(point)
    sent, wire = summary.sent_bytes_per_step, summary.wire_bytes_per_step
    held_form, sent_form = table_bytes(run), table_traffic(run)
    return {
        **row,
        "step_seconds": summary.step_seconds_median,
        "step_seconds_low": interval and interval.low,
        "step_seconds_high": interval and interval.high,
        "interval_over": interval and interval.over,
        "step_seconds_p95": summary.step_seconds_p95,
        **{f"{phase}_phase_seconds": s for phase, s in summary.phase_seconds_median.items()},
        "tokens_per_second": summary.tokens_per_second,
        "model_flops_per_second": summary.model_flops_per_second,
        "mfu": utilisation(summary, peaks),
        "peak_flops_per_second": peaks.get(peak_name(summary)),
        "peak_flops": peak_name(summary) or None,
        "final_loss": summary.final_loss,
        "verdict": summary.verdict,
        "unsteady": why_unsteady(point),
        **{f"{kind}_bytes": ranks.fullest for kind, ranks in memory.by_kind.items()},
        "total_bytes": memory.total.fullest,
        "total_bytes_mean": memory.total.mean,
        "peak_bytes": memory.peak and memory.peak.fullest,
        "table_bytes": held_form and sum(held_form.values()),
        "sent_bytes_per_step": sent and sent.fullest,
        "wire_bytes_per_step": wire and wire.fullest,
        "table_sent_bytes_per_step": None if sent_form is None else sum(sent_form.values()),
    }


def as_json(points: Sequence[Point], conclusions: Conclusions, **more: Any) -> str:
    """Return one object: `format`, `points`, what is concluded of them, and whatever else a report knows."""
    content = {
        "format": FORMAT,
        "points": rows_of(points),
        "reference": conclusions.reference and conclusions.reference.name,
        "comparisons": [
            {"point": one.point.name, **asdict(c), "verdict": c.verdict.value}
            for one in conclusions.judged
            if (c := one.comparison)
        ],
        "differences": differences(points),
        "doubts": conclusions.doubts,
        "broken": conclusions.broken,
    }
    return dumps({**content, **more}, indent=1)


def as_csv(points: Sequence[Point]) -> str:
    rows = rows_of(points)
    names = list(dict.fromkeys(name for one in rows for name in one))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip("\n")


def as_latex(points: Sequence[Point]) -> str:
    """Return a `tabular` with three rules of the booktabs package, and the columns of the Markdown table."""
    runs = [point.pooled_summary for point in points]
    columns = printed_columns(runs)
    heads = [", ".join(filter(None, (column.name, column.unit))) for column in columns]
    rows = [[column.value(run) for column in columns] for run in runs]
    lines = [[point.name, *cells] for point, cells in zip(points, rows, strict=True)]
    head, *body = [
        " & ".join(map(_escaped, cells)) + r" \\" for cells in [["point", *heads], *lines]
    ]
    return "\n".join(
        [
            rf"\begin{{tabular}}{{l{'r' * len(columns)}}}",
            *[r"\toprule", head, r"\midrule", *body, r"\bottomrule"],
            r"\end{tabular}",
        ]
    )


def _escaped(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in text)
