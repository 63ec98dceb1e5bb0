"""Runs become points: repeats of one configuration, spelled as their first folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.composing import composed
from tests.report.made import change, edit, points, repeats, timed
from tests.run_folders import write_run
from zeroexp.config.keys import save
from zeroexp.report.conclusions import ONCE, conclude
from zeroexp.report.headline import headline_sentences
from zeroexp.report.markdown import render as as_markdown
from zeroexp.report.measured_points import points_of
from zeroexp.report.results_table import render
from zeroexp.tracking.run import read_run


def test_runs_of_one_configuration_are_one_point_with_the_median_of_its_repeats(tmp_path):
    timed(tmp_path, a=0.3, c=0.1, d=0.2)
    write_run(tmp_path / "b", "ddp")
    for number, name in enumerate("acd"):
        change(tmp_path / name / "environment.json", {"repeat": number})
    zero3, ddp = points(tmp_path)
    assert ([run.name for run in zero3.runs], zero3.name, ddp.name) == (["a", "c", "d"], "a", "b")
    assert zero3.seconds_by_round == {(0, 0): 0.3, (0, 1): 0.1, (0, 2): 0.2}
    assert zero3.pooled.summary and zero3.pooled.summary.step_seconds_median == 0.2
    # A copy of a run hides no other.
    change(tmp_path / "c/environment.json", {"repeat": 0})
    seconds = points(tmp_path)[0].seconds_by_round
    assert seconds == {(0, 0): 0.3, (0, 2): 0.2, (0, 3): 0.1}


def test_a_point_of_which_a_repeat_failed_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", status="failed", reason="rank 0 died")
    (point,) = points(tmp_path)
    pooled = point.pooled
    assert (pooled.status, pooled.reason) == ("failed", "1 of 2 runs: rank 0 died")
    assert pooled.summary and point.seconds_by_round


def test_a_point_of_which_a_seed_diverged_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    later = write_run(tmp_path / "b")
    edit(later / "config.yaml", "  seed: 0", "  seed: 1")
    change(later / "summary.json", {"diverged_at": 3})
    (point,) = points(tmp_path)
    assert point.pooled.summary and point.pooled.summary.diverged_at == 3
    assert point.pooled.reason is None, "a single line tells it"
    assert any("diverged at step 3" in each for each in headline_sentences([point]))
    change(later / "state.json", {"reason": "diverged at step 3"})
    (point,) = points(tmp_path)
    assert (point.pooled.status, point.pooled.reason) == ("done", "1 of 2 runs: diverged at step 3")
    assert "done: 1 of 2 runs: diverged at step 3" in render([point])
    assert "1 of 2 runs: diverged" in as_markdown([point], [])


def test_a_headline_tells_unequal_numbers_of_runs(tmp_path: Path) -> None:
    repeats(tmp_path, {"ddp": [0.2, 0.2, 0.2], "zero3": [0.3]})
    made = points(tmp_path)
    assert "; all came to their end, 1 to 3 runs each." in headline_sentences(made)[0]
    assert "; all came to their end, 3 runs each." in headline_sentences(made[:1])[0]
    assert conclude(made).verdicts == [ONCE] and "in one round alone" in ONCE


def test_points_of_two_sweeps_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    def names(*folders: str) -> list[str]:
        runs = [read_run(write_run(tmp_path / folder / "zero3-buffer-n2")) for folder in folders]
        return [point.name for point in points_of(runs)]

    assert names("before", "after") == ["before/zero3-buffer-n2", "after/zero3-buffer-n2"]
    assert names("1/compare", "2/compare") == [
        f"{tmp_path}/{number}/compare/zero3-buffer-n2" for number in (1, 2)
    ]


def test_a_sweep_is_named_where_its_folder_is_a_dot(tmp_path, monkeypatch):
    monkeypatch.chdir(write_run(tmp_path / "sweep/a"))
    assert (read_run(Path()).sweep, read_run(Path()).name) == ("sweep", "a")
    monkeypatch.chdir("..")
    assert read_run(Path("a")).sweep == "sweep"


def test_seeds_are_replicates_and_another_setting_is_another_point(tmp_path: Path) -> None:
    for seed in (3, 4):
        folder = write_run(tmp_path / f"zero3-buffer-n2-seed{seed}")
        edit(folder / "config.yaml", "seed: 0", f"seed: {seed}")
        change(folder / "summary.json", {"final_loss": 2.0 + seed, "step_seconds_median": seed})
    edit(write_run(tmp_path / "zero3-buffer-n2-0.5") / "config.yaml", "lr: ", "lr: 0.5 # ")
    other, seeds = points(tmp_path)
    assert (other.name, seeds.name) == ("zero3-buffer-n2-0.5", "zero3-buffer-n2")
    assert seeds.seconds_by_round == {(3, 0): 3, (4, 1): 4}
    assert seeds.pooled.summary and seeds.pooled.summary.final_loss == 5.5, "the mean"


@pytest.mark.parametrize(
    "values",
    [("resume=a", "resume=b"), ("checkpoint.every=null", "checkpoint.every=1")],
    ids=["resume", "saves"],
)
def test_runs_of_one_seed_that_differ_in_anything_are_no_repeats(tmp_path, values):
    for seed in (0, 1):
        for value in values:
            folder = write_run(tmp_path / f"zero3-{value}-seed{seed}")
            save(composed(value, f"train.seed={seed}"), folder / "config.yaml")
    assert [len(point.runs) for point in points(tmp_path)] == [2, 2]


def test_what_each_seed_goes_on_from_makes_no_point(tmp_path):
    """As with resume=latest, which finds another run for each."""
    for seed in (0, 1):
        folder = write_run(tmp_path / f"zero3-seed{seed}")
        save(composed(f"resume=of{seed}", f"train.seed={seed}"), folder / "config.yaml")
    assert [len(point.runs) for point in points(tmp_path)] == [2]
