"""Runs become points: repeats of one configuration, named by what tells them from the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.run_folders import write_run
from zeroexp.report.measured_points import points_of
from zeroexp.report.statistics import step_time_interval, why_unsteady
from zeroexp.tracking.run import Run, read_run


def timed(folder: Path, seconds: float, repeat: int | None = None) -> Run:
    run = read_run(write_run(folder))
    assert run.summary
    environment = run.environment if repeat is None else {**run.environment, "repeat": str(repeat)}
    summary = replace(run.summary, step_seconds_median=seconds, step_seconds_p95=seconds)
    return replace(run, summary=summary, environment=environment)


def test_runs_of_one_configuration_are_one_point(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / "sweep" / name, strategy))
        for name, strategy in [("a", "ddp"), ("b", "zero3"), ("c", "ddp")]
    ]
    ddp, zero3 = points_of(runs)
    assert [run.name for run in ddp.runs] == ["a", "c"]
    assert (ddp.name, zero3.name) == ("ddp · buffer", "zero3 · buffer")


def test_one_point_shows_the_median_of_its_repeats(tmp_path: Path) -> None:
    runs = [timed(tmp_path / f"s/{n}", s, n) for n, s in enumerate([0.3, 0.1, 0.2])]
    (point,) = points_of(runs)
    assert point.seconds_by_round == {0: 0.3, 1: 0.1, 2: 0.2}
    assert point.step_seconds == 0.2
    assert point.pooled_summary.summary and point.pooled_summary.summary.step_seconds_median == 0.2


def test_points_of_two_sweeps_are_named_after_them(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / sweep / "a")) for sweep in ("before", "after")]
    assert [point.name for point in points_of(runs)] == [
        *("zero3 · buffer · before", "zero3 · buffer · after")
    ]


def test_sweeps_of_one_name_in_two_folders_have_no_point_in_common(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / when / "compare/a")) for when in ("before", "after")]
    assert [point.name for point in points_of(runs)] == [
        f"zero3 · buffer · {tmp_path / when / 'compare'}" for when in ("before", "after")
    ]


def test_a_sweep_is_named_where_its_folder_is_a_dot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_run(tmp_path / "sweep/a"))
    assert (read_run(Path()).sweep, read_run(Path()).name) == ("sweep", "a")
    monkeypatch.chdir("..")
    assert read_run(Path("a")).sweep == "sweep"


def test_a_copy_of_a_run_hides_no_other(tmp_path: Path) -> None:
    (point,) = points_of([timed(tmp_path / f"s/{n}", s, 0) for n, s in enumerate([0.3, 0.1, 0.2])])
    assert point.seconds_by_round == {0: 0.3, 1: 0.1, 2: 0.2}


def test_the_interval_is_over_runs_once_there_are_three(tmp_path: Path) -> None:
    runs = [timed(tmp_path / f"s/{n}", s, n) for n, s in enumerate([0.20, 0.21, 0.22])]
    (one,), (two,), (three,) = (points_of(runs[:number]) for number in (1, 2, 3))
    steps = step_time_interval(one)
    # 20 steps of 0.35, 0.36 and 0.37 s in turn: the 6th and 15th in order hold the median with 95.9 %.
    assert steps and steps.over == "steps"
    assert (steps.low, steps.high) == pytest.approx((0.35, 0.37))
    assert step_time_interval(two) is None
    known = step_time_interval(three)
    # Student: the geometric mean of three, 4.303 × their scatter / √3 to each side.
    assert known and known.over == "runs"
    assert known.low == pytest.approx(0.1864, abs=1e-4)
    assert known.high == pytest.approx(0.2362, abs=1e-4)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [([0.20, 0.24, 0.21], None), ([0.20, 0.26, 0.21], "its 3 runs took 200 to 260 ms a step")],
)
def test_a_spread_that_makes_a_time_worthless_is_said(
    tmp_path: Path, seconds: list[float], said: str | None
) -> None:
    (point,) = points_of([timed(tmp_path / f"s/{n}", s, n) for n, s in enumerate(seconds)])
    words = why_unsteady(point)
    assert words is None if said is None else words and words.startswith(said)
