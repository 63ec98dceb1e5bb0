"""A sweep's results for other programs: CSV, JSON and LaTeX, one row per point, units in the names. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from zeroexp.report.against_reference import Judged
from zeroexp.report.columns import peak_flops_by_name, peak_name, utilisation
from zeroexp.report.conclusions import Conclusions
from zeroexp.report.differences import differences
from zeroexp.report.measured_points import Point
from zeroexp.report.spread import step_time_interval, why_unsteady
from zeroexp.report.theory import table_bytes, table_traffic
from zeroexp.tracking.json_files import dumps

FORMAT = 1  # grows when a name of a row changes its meaning or goes
# The columns of a printed table: heading, key of a row, factor to the heading's unit, digits.
MIB, MS = 2.0**-20, 1e3
PRINTED = (
    ("params, MiB", "parameters_bytes", MIB, 1),
    ("grads, MiB", "gradients_bytes", MIB, 1),
    ("optimizer, MiB", "optimizer_bytes", MIB, 1),
    ("total, MiB", "total_bytes", MIB, 1),
    ("peak, MiB", "peak_bytes", MIB, 1),
    ("sent, MiB", "sent_bytes_per_step", MIB, 1),
    ("step, ms", "step_seconds", MS, 1),
    ("tokens/s", "tokens_per_second", 1, 0),
    ("loss", "final_loss", 1, 4),
)
LATEX = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}"}
LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {"·": r"$\cdot$", "–": "--", "…": r"\ldots{}"}


def rows_of(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the numbers of each point; what is unknown is None. Bytes are the fullest rank's."""
    peaks = peak_flops_by_name([point.run for point in points])
    return [_row(point, peaks) for point in points]


def _row(point: Point, peaks: Mapping[str, float]) -> dict[str, Any]:
    run = point.pooled_summary
    summary = run.summary
    told = {
        "point": point.name,
        "sweep": run.sweep,
        "strategy": run.strategy,
        "implementation": run.implementation,
        "world_size": run.world_size,
        "status": run.status,
        "reason": run.reason,
        "num_runs": len(point.runs),
    }
    if summary is None:
        return told
    memory, known, form = summary.memory, step_time_interval(point), table_bytes(run)
    sent, wire, traffic = (
        summary.sent_bytes_per_step,
        summary.wire_bytes_per_step,
        table_traffic(run),
    )
    return {
        **told,
        "step_seconds": summary.step_seconds_median,
        "step_seconds_low": known and known.low,
        "step_seconds_high": known and known.high,
        "interval_over": known and known.over,
        "step_seconds_p95": summary.step_seconds_p95,
        **{f"{phase}_phase_seconds": s for phase, s in summary.phase_seconds_median.items()},
        "tokens_per_second": summary.tokens_per_second,
        "model_flops_per_second": summary.model_flops_per_second,
        "mfu": utilisation(summary, peaks),
        "peak_flops_per_second": peaks.get(peak_name(summary)),
        "peak_flops": summary.peak_flops_name or summary.peak_flops_source or None,
        "final_loss": summary.final_loss,
        "verdict": summary.verdict,
        "unsteady": why_unsteady(point),
        **{f"{kind}_bytes": ranks.fullest for kind, ranks in memory.by_kind.items()},
        "total_bytes": memory.total.fullest,
        "total_bytes_mean": memory.total.mean,
        "peak_bytes": memory.peak and memory.peak.fullest,
        "table_bytes": form and sum(form.values()),
        "sent_bytes_per_step": sent and sent.fullest,
        "wire_bytes_per_step": wire and wire.fullest,
        "table_sent_bytes_per_step": None if traffic is None else sum(traffic.values()),
    }


def as_json(points: Sequence[Point], found: Conclusions, **more: Any) -> str:
    """Return one object: `format`, `points`, what is concluded of them, and whatever else a report knows."""
    concluded = {
        "reference": found.reference and found.reference.name,
        "comparisons": [_comparison(one) for one in found.judged if one.comparison],
        "differences": differences(points),
        "doubts": found.doubts,
        "broken": found.broken,
    }
    rows = rows_of(points)
    return dumps({"format": FORMAT, "points": rows, **concluded, **more}, indent=1)


def _comparison(one: Judged) -> dict[str, Any]:
    assert one.comparison is not None
    told = asdict(one.comparison)
    return {"point": one.point.name, **told, "verdict": one.comparison.verdict.value}


def as_csv(points: Sequence[Point]) -> str:
    rows = rows_of(points)
    names = list(dict.fromkeys(name for one in rows for name in one))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip("\n")


def as_latex(points: Sequence[Point]) -> str:
    """Return a `tabular` with three rules of the booktabs package."""
    heads = ["point", *(head for head, *_ in PRINTED)]
    lines = [[row["point"], *_latex_cells(row)] for row in rows_of(points)]
    body = [" & ".join(map(_escaped, cells)) + r" \\" for cells in [heads, *lines]]
    return "\n".join(
        [
            rf"\begin{{tabular}}{{l{'r' * len(PRINTED)}}}",
            *[r"\toprule", body[0], r"\midrule", *body[1:], r"\bottomrule"],
            r"\end{tabular}",
        ]
    )


def _latex_cells(values: dict[str, Any]) -> list[str]:
    numbers = [(values.get(key), factor, digits) for _, key, factor, digits in PRINTED]
    return ["–" if n is None else f"{n * factor:,.{digits}f}" for n, factor, digits in numbers]


def _escaped(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in text)
