"""The results as other programs read them."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from tests.run_folders import PARAMETER_BYTES, write_run
from zeroexp.report import exports
from zeroexp.report.columns import columns_of
from zeroexp.report.compare import conclude
from zeroexp.report.markdown import render
from zeroexp.report.measured_points import Point, points_of
from zeroexp.report.reading import read_runs


@pytest.fixture
def points(tmp_path: Path) -> list[Point]:
    write_run(tmp_path / "sweep/a", "zero2")
    write_run(tmp_path / "sweep/b", "zero1", status="failed", reason="a & b_c", num_steps=0)
    return points_of(read_runs([tmp_path / "sweep"])[0])


def test_json_holds_bytes_and_seconds_and_null_where_nothing_is_known(points: list[Point]) -> None:
    told = json.loads(exports.as_json(points, conclude(points), problems=[]))
    done, failed = told["points"]
    assert (told["format"], told["problems"]) == (1, [])
    assert done["total_bytes"] == 2.5 * PARAMETER_BYTES
    assert done["table_bytes"] == 2.5 * PARAMETER_BYTES
    assert done["step_seconds"] == pytest.approx(0.31)
    assert done["step_phase_seconds"] == pytest.approx(0.2 * 0.31)
    assert failed["status"] == "failed" and "step_seconds" not in failed


def test_the_share_of_the_peak_is_that_of_the_table(tmp_path: Path) -> None:
    """A busy machine measures a smaller peak, so that the largest of one name holds for all points."""
    for name, peak in (("ddp", 4e12), ("zero3", 1e12)):
        summary = write_run(tmp_path / "sweep" / name, name) / "summary.json"
        told = json.loads(summary.read_text())
        summary.write_text(json.dumps({**told, "peak_flops_per_second": peak}))
    runs, _ = read_runs([tmp_path / "sweep"])
    rows = exports.rows_of(points_of(runs))
    assert [row["peak_flops_per_second"] for row in rows] == [4e12, 4e12]
    (column,) = [column for column in columns_of(runs).times if column.name == "MFU"]
    assert [f"{100 * row['mfu']:.1f}" for row in rows] == [column.value(run) for run in runs]


def test_a_point_of_which_a_repeat_failed_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "sweep/a")
    write_run(tmp_path / "sweep/b", status="failed", reason="rank 0 died")
    (row,) = exports.rows_of(points_of(read_runs([tmp_path / "sweep"])[0]))
    assert (row["status"], row["reason"]) == ("failed", "1 of 2 runs: rank 0 died")
    assert row["step_seconds"] > 0


def test_csv_has_a_row_for_each_point(points: list[Point]) -> None:
    done, failed = csv.DictReader(io.StringIO(exports.as_csv(points)))
    assert float(done["total_bytes"]) == 2.5 * PARAMETER_BYTES
    assert (failed["reason"], failed["total_bytes"]) == ("a & b_c", "")


def test_latex_escapes_what_it_would_take_for_commands(points: list[Point]) -> None:
    lines = exports.as_latex(points).splitlines()
    assert lines[0] == r"\begin{tabular}{lrrrrrrrrr}"
    markdown = render([point.pooled_summary for point in points]).splitlines()
    heads = [head.split(",")[0] for head in lines[2].removesuffix(r" \\").split(" & ")[1:]]
    table = next(line for line in markdown if line.startswith("| strategy"))
    assert [head.split(",")[0] for head in table.strip("| ").split(" | ")][1:-1] == heads
    assert lines[4].startswith(r"zero2 $\cdot$ buffer & 96.0 & 48.0 & 96.0 & 240.0 & ")
    assert lines[5].startswith(r"zero1 $\cdot$ buffer & -- & ")
    assert exports._escaped("a_b & 5 %") == r"a\_b \& 5 \%"
