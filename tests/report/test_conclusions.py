"""What may not vary between repeats, what else differs between points, and times that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.run_folders import write_run
from zeroexp.config.keys import ConfigError
from zeroexp.report.compare import ONCE, conclude
from zeroexp.report.differences import differences, lines_of_unequal_facts
from zeroexp.report.measured_points import Point, points_of
from zeroexp.report.reading import read_runs


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def points(folder: Path) -> list[Point]:
    return points_of(read_runs([folder])[0])


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two runs of one point, and one of another."""
    for name, strategy in [("a", "zero3"), ("b", "zero3"), ("c", "ddp")]:
        write_run(tmp_path / name, strategy)
    return tmp_path


def test_repeats_that_agree_are_no_problem(sweep: Path) -> None:
    found = conclude(points(sweep))
    assert (found.broken, found.doubts) == ([], [])


def test_bytes_that_vary_between_repeats_break_a_claim(sweep: Path) -> None:
    summary = json.loads((sweep / "b/summary.json").read_text())
    summary["memory"]["by_kind"]["gradients"]["per_rank"][1] += 4
    (sweep / "b/summary.json").write_text(json.dumps(summary))
    (line,) = conclude(points(sweep)).broken
    assert line.startswith("zero3 · buffer: gradients bytes differ between a and b: ")


def test_a_last_bit_of_a_loss_that_varies_breaks_a_claim_where_sums_have_one_order(
    sweep: Path,
) -> None:
    lines = (sweep / "b/records.jsonl").read_text().splitlines()
    row = json.loads(lines[5])
    row["loss"] += 1e-15
    lines[5] = json.dumps(row)
    (sweep / "b/records.jsonl").write_text("\n".join(lines) + "\n")
    (line,) = conclude(points(sweep)).broken
    assert line.startswith("zero3 · buffer: losses of a and b part at step 5: ")
    for run in ("a", "b"):
        (sweep / run / "engine.json").write_text('{"transport": "nccl"}')
    assert conclude(points(sweep)).broken == []


def test_what_differs_beside_the_strategy_is_listed(sweep: Path) -> None:
    assert differences(points(sweep)) == {}
    edit(sweep / "c/config.yaml", "max_grad_norm: 1.0", "max_grad_norm: null")
    edit(sweep / "c/environment.json", '"torch": "2.13.0"', '"torch": "2.12.1"')
    (sweep / "c/load.json").write_text('{"seconds": 9.0, "other_cores": 1.31}')
    (sweep / "a/load.json").write_text('{"seconds": 9.0, "other_cores": 0.01}')
    (sweep / "b/load.json").write_text('{"seconds": 9.0, "other_cores": 0.02}')
    found = differences(points(sweep))
    assert found["optimizer.max_grad_norm"]["its own default"] == ["ddp · buffer"]
    assert found["versions.torch"] == {"2.13.0": ["zero3 · buffer"], "2.12.1": ["ddp · buffer"]}
    assert list(found["load"]) == ["none by others", "1.3 cores used by others"]
    assert set(found) == {"optimizer.max_grad_norm", "versions.torch", "load"}


def test_what_a_study_wants_equal_is_a_claim(sweep: Path) -> None:
    edit(sweep / "c/config.yaml", "fused: true", "fused: false")
    (sweep / "c/engine.json").write_text('{"transport": "gloo"}')
    assert lines_of_unequal_facts(points(sweep), ["data", "precision", "fused"]) == []
    (line,) = lines_of_unequal_facts(points(sweep), ["optimizer"])
    assert line == "optimizer.fused differs: true, but false in ddp · buffer"
    assert len(lines_of_unequal_facts(points(sweep), ["optimizer.fused", "transport"])) == 2
    for run in "abc":
        edit(sweep / run / "config.yaml", "must_equal: []", "must_equal: [optimizer]")
    assert conclude(points(sweep)).broken == [f"study.must_equal: {line}"]


def test_faster_than_without_communication_is_noise(tmp_path: Path) -> None:
    write_run(tmp_path / "one", "ddp", world_size=1)  # 410 ms
    write_run(tmp_path / "two", "ddp", world_size=2)  # 210 ms
    assert conclude(points(tmp_path)).doubts == []
    edit(
        tmp_path / "two/summary.json", '"step_seconds_median": 0.21', '"step_seconds_median": 0.19'
    )
    (doubt,) = conclude(points(tmp_path)).doubts
    assert "took 190.0 ms, less than 2 ranks need without any communication (205.0 ms" in doubt


def test_one_run_of_each_point_is_no_verdict(tmp_path: Path) -> None:
    for strategy in ("ddp", "zero3"):
        write_run(tmp_path / strategy, strategy)
    assert conclude(points(tmp_path)).verdicts == [ONCE]


def test_the_reference_is_chosen_by_name(sweep: Path) -> None:
    chosen = conclude(points(sweep), "ddp · buffer").reference
    assert chosen is not None and chosen.run.name == "c"
    with pytest.raises(
        ConfigError, match="--reference zero9: no such point with a time; use one of a, c"
    ):
        conclude(points(sweep), "zero9")
