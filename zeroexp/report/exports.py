"""A sweep's results for other programs: JSON and CSV, one row for each point, units in the names."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from zeroexp.report.columns import Column, exported_columns, peaks_of
from zeroexp.report.conclusions import Conclusions, conclude
from zeroexp.report.differences import differences
from zeroexp.report.loss_agreement import losses_of_sweeps
from zeroexp.report.measured_points import MeasuredPoint, points_of
from zeroexp.tracking.json_files import dumps
from zeroexp.tracking.run import Run

FORMAT = 4  # grows when a name of a row changes its meaning or goes


def rows_of(points: Sequence[MeasuredPoint], columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Return the numbers of each point; what is unknown is None. Bytes are the fullest rank's."""
    return [{column.key: column.value(point) for column in columns} for point in points]


def as_json(
    points: Sequence[MeasuredPoint],
    columns: Sequence[Column],
    conclusions: Conclusions,
    problems: Sequence[str] = (),
) -> str:
    """Return one object: `format`, `points`, what is concluded of them, and lines about runs that are left out."""
    losses = losses_of_sweeps(points)
    content = {
        "format": FORMAT,
        "points": rows_of(points, columns),
        "reference": conclusions.reference,
        "comparisons": [
            {"point": name, **asdict(comparison)}
            for name, comparison in conclusions.comparisons.items()
        ],
        "losses": losses and asdict(losses),  # how far each curve lies from the first
        "qualities": [asdict(quality) for quality in conclusions.qualities],
        "differences": differences(points),
        "doubts": conclusions.doubts,
        "claims": [asdict(claim) for claim in conclusions.claims],
        "broken": conclusions.broken,
        "problems": problems,
    }
    return dumps(content, indent=1)


def runs_as_json(runs: Sequence[Run]) -> str:
    """Return what `zeroexp report --json` says of these runs."""
    points = points_of(runs)
    conclusions = conclude(points)
    return as_json(points, exported_columns(points, conclusions), conclusions)


def as_torchtitan(points: Sequence[MeasuredPoint]) -> str:
    """Return a line of JSON for each step of each point, by torchtitan's names of metrics.

    Memory is what is allocated, where torchtitan counts blocks that are still in use; a step is numbered from 1.
    """
    peaks = {name: peak.per_second for name, peak in peaks_of(points).items()}
    rows = (row for point in points for row in _torchtitan_rows(point, peaks.get(point.name)))
    return "\n".join(map(dumps, rows))


def _torchtitan_rows(point: MeasuredPoint, peak: float | None) -> Iterator[dict[str, Any]]:
    ranks, summary = point.run.world_size, point.summary
    flops = summary.model_flops_per_step if summary else None
    for record in point.records:
        seconds, data_seconds = record.step_seconds, record.phase_seconds.get("data", 0.0)
        held, of_rank = record.peak_bytes, flops and flops / record.step_seconds / ranks
        row = {
            "loss_metrics/global_avg_loss": record.loss,
            "grad_norm": record.grad_norm,
            "throughput(tps)": record.num_tokens / seconds / ranks,
            "tflops": of_rank and of_rank / 1e12,
            "mfu(%)": of_rank and peak and 100 * of_rank / peak,
            "time_metrics/end_to_end(s)": seconds,
            "time_metrics/data_loading(s)": data_seconds,
            "time_metrics/data_loading(%)": 100 * data_seconds / seconds,
            "memory/max_active(GiB)": held and held / 2**30,
            "validation_metrics/loss": record.validation_loss,
        }
        known = {name: value for name, value in row.items() if value is not None}
        yield {"run": point.name, "step": record.step + 1, **known}


def as_csv(points: Sequence[MeasuredPoint], columns: Sequence[Column]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [column.key for column in columns], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows_of(points, columns))
    return text.getvalue().rstrip("\n")
