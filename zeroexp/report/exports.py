"""A sweep's results for other programs: JSON and CSV, one row for each point, units in the names."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from zeroexp.report.claims import losses_of
from zeroexp.report.columns import Column, exported_columns
from zeroexp.report.compare import Conclusions, conclude, differences
from zeroexp.report.measured_points import Point, points_of
from zeroexp.tracking.json_files import dumps
from zeroexp.tracking.run import Run

FORMAT = 4  # grows when a name of a row changes its meaning or goes


def rows_of(points: Sequence[Point], columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Return the numbers of each point; what is unknown is None. Bytes are the fullest rank's."""
    return [{column.key: column.value(point) for column in columns} for point in points]


def as_json(
    points: Sequence[Point], columns: Sequence[Column], conclusions: Conclusions, **more: Any
) -> str:
    """Return one object: `format`, `points`, what is concluded of them, and whatever else a report knows."""
    content = {
        "format": FORMAT,
        "points": rows_of(points, columns),
        "reference": conclusions.reference and conclusions.reference.name,
        "comparisons": [
            {"point": one.point.name, **asdict(c), "verdict": c.verdict.value}
            for one in conclusions.judged
            if (c := one.comparison)
        ],
        "losses": _losses(points),
        "qualities": [asdict(quality) for quality in conclusions.qualities],
        "differences": differences(points),
        "doubts": conclusions.doubts,
        "broken": conclusions.broken,
    }
    return dumps({**content, **more}, indent=1)


def _losses(points: Sequence[Point]) -> dict[str, Any] | None:
    """Return how far each loss curve lies from the first one; None where no point has a curve."""
    verdict = losses_of(points)
    if verdict is None:
        return None
    curves = [
        {
            "point": curve.name,
            "difference": curve.difference,
            "step": curve.step,
            "falls": curve.falls,
            "agrees": verdict.agrees(curve),
        }
        for curve in verdict.curves
    ]
    return {"reference": verdict.reference, "bound": verdict.bound, "curves": curves}


def runs_as_json(runs: Sequence[Run]) -> str:
    """Return what `zeroexp report --json` says of these runs."""
    points = points_of(runs)
    conclusions = conclude(points)
    return as_json(points, exported_columns(points, conclusions), conclusions, problems=[])


def as_csv(points: Sequence[Point], columns: Sequence[Column]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [column.key for column in columns], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows_of(points, columns))
    return text.getvalue().rstrip("\n")
