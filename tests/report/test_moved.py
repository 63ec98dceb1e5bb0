"""Two sweeps before and after a change: which points moved, by verdict and by exact numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.run_folders import write_run
from zeroexp.report.compare import describe_moved, points_that_moved
from zeroexp.report.measured_points import Point, points_of
from zeroexp.report.reading import read_runs


def points(folder: Path) -> list[Point]:
    return points_of(read_runs([folder])[0])


@pytest.fixture
def sweeps(tmp_path: Path) -> Path:
    """Three repeats of ddp and zero3 in each; `after` has zero2 too, and zero3 takes three quarters of the time."""
    for sweep in ("before", "after"):
        for strategy in ("ddp", "zero3"):
            for repeat in range(3):
                folder = write_run(tmp_path / sweep / f"{strategy}-{repeat}", strategy)
                seconds = (1 + 0.001 * repeat) * (
                    0.75 if (sweep, strategy) == ("after", "zero3") else 1
                )
                path = folder / "summary.json"
                summary = {**json.loads(path.read_text()), "step_seconds_median": seconds}
                path.write_text(json.dumps(summary))
    write_run(tmp_path / "after/zero2", "zero2")
    return tmp_path


def test_who_got_faster_is_said_and_who_did_not(sweeps: Path) -> None:
    pairs, alone = points_that_moved(points(sweeps / "before"), points(sweeps / "after"))
    assert {one.point.name: one.has_moved for one in pairs} == {
        "ddp · buffer": False,
        "zero3 · buffer": True,
    }
    assert alone == ["  only after: zero2 · buffer"]
    head, first, *_ = describe_moved(pairs, alone)
    assert head == "1 of 2 points moved (after over before):"
    assert first == "  zero3 · buffer: step 0.75 [0.75, 0.75]: faster"


def test_a_byte_and_a_bit_of_a_loss_move_a_point(sweeps: Path) -> None:
    folder = sweeps / "after/ddp-0"
    summary = json.loads((folder / "summary.json").read_text())
    summary["calls_by_kind"]["gather"] += 1
    (folder / "summary.json").write_text(json.dumps(summary))
    text = (folder / "records.jsonl").read_text()
    (folder / "records.jsonl").write_text(
        text.replace('"loss": 7.0,', '"loss": 7.000000000000001,')
    )
    pairs, _ = points_that_moved(points(sweeps / "before"), points(sweeps / "after"))
    (ddp,) = [one for one in pairs if one.point.name == "ddp · buffer"]
    assert ddp.has_moved
    assert [*ddp.changes] == [
        "gather calls: 8.0 before, 9.0 after",
        "losses part at step 0: 7.0 and 7.000000000000001",
    ]
