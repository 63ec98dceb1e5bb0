"""Hundreds of folders, torn files and files of other versions: what is whole is shown, the rest is one line each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.report.made import change, edit, points
from tests.run_folders import write_run
from tests.traces import write_trace
from zeroexp.report import page
from zeroexp.report.__main__ import main
from zeroexp.report.columns import all_columns
from zeroexp.report.exports import rows_of
from zeroexp.report.measured_points import points_of
from zeroexp.report.reading import read_runs, records_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One run with a traced step, in a sweep of its own."""
    folder = write_run(tmp_path / "sweep/a")
    write_trace(folder, rank=0, step=9, began_at=1.0)
    return folder


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("summary.json", '{"world_size": 2, "num_st'),
        ("summary.json", "{}"),
        ("summary.json", "[]"),
        ("summary.json", b"\xff\xfe"),
        ("config.yaml", "model: [1, 2"),
        ("config.yaml", ""),
        ("config.yaml", "model: {name: small}"),
        ("environment.json", "{"),
        ("environment.json", '{"repeat": "first"}'),
    ],
)
def test_a_torn_file_costs_its_run_and_one_line(tmp_path, name, text):
    whole, torn = write_run(tmp_path / "whole"), write_run(tmp_path / "torn")
    (torn / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    runs, (line,) = read_runs(tmp_path)
    assert [run.folder for run in runs] == [whole]
    assert line.startswith(f"{torn}: left out") and "\n" not in line


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("summary.json", {"final_loss": "low"}, "summary.json: run.final_loss is 'low'"),
        ("summary.json", {"memory.by_kind": []}, "summary.json: run.memory.by_kind is []"),
        ("summary.json", {"times": [{"rank": None}]}, "summary.json: run.times.0.rank is None"),
        (
            "summary.json",
            {"memory.by_kind.buffers.per_rank": [1.0]},
            "summary.json: not of 2 ranks",
        ),
        ("summary.json", {"step_seconds_median": 0}, "step_seconds_median is 0"),
        ("state.json", {"reason": ["why"]}, "state.json: run.reason is ['why']"),
        ("state.json", {"done_at": {}}, "run.times.done_at is {}"),
        ("state.json", {"done_at": 1e300}, "left out"),
        ("environment.json", {"other_cores": "two"}, "could not convert string to float: 'two'"),
        ("environment.json", {"other_cores": -1}, "other_cores is -1"),
        ("environment.json", {"machine.num_cpus": -1}, "machine.num_cpus is -1"),
    ],
)
def test_whole_json_of_wrong_types_costs_its_run_and_one_line_that_names_the_file(
    name: str, values: dict[str, object], told: str, tmp_path: Path, capsys, monkeypatch
) -> None:
    other, odd = write_run(tmp_path / "other"), write_run(tmp_path / "odd")
    change(odd / name, values)
    csv = tmp_path / "out.csv"
    monkeypatch.setattr("sys.argv", ["report", str(tmp_path), "--csv", str(csv)])
    assert main() == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"zeroexp: {odd}: left out, its files cannot be read") and told in line
    assert line.endswith("; restore or remove them")
    assert [row.partition(",")[0] for row in csv.read_text().splitlines()[1:]] == [other.name]


def test_torn_settings_of_the_engine_cost_themselves_alone(folder: Path) -> None:
    (folder / "engine.json").write_text("{")
    (run,), (line,) = read_runs(folder)
    assert line == f"{folder}/engine.json: damaged, as by a power cut (no JSON), and left out"
    assert run.summary and run.engine == {}


def test_a_step_of_wrong_types_costs_the_curve_alone(folder: Path) -> None:
    edit(folder / "records.jsonl", '"grad_norm": ', '"grad_norm": [], "was": ')
    (run,), problems = read_runs(folder)
    assert problems == [f"{folder}: records.jsonl is torn and left out"] and run.summary


def test_torn_records_cost_the_curve_and_one_line(folder: Path) -> None:
    records = folder / "records.jsonl"
    whole = records.read_text()
    records.write_text("{torn\n" + whole)
    (run,), problems = read_runs(folder)
    assert problems == [f"{folder}: records.jsonl is torn and left out"] and records_of(run) == []
    assert "No point recorded a step" in page.render(points_of([run]))
    records.unlink()
    missing = f"{folder}: records.jsonl is missing, so that it has no curve"
    assert read_runs(folder)[1] == [missing]


def test_a_timeline_that_is_torn_or_odd_is_not_drawn(folder: Path) -> None:
    trace = folder / "trace.0.9.json"
    whole = trace.read_text()
    trace.write_text(whole[:-40])
    assert "No step was traced" in page.render(points(folder))
    for odd in ({"ts": "late"}, {"args": None}):
        content = json.loads(whole)
        content["traceEvents"][-1] |= odd
        trace.write_text(json.dumps(content))
        assert "No step was traced" in page.render(points(folder))


def test_a_later_version_may_say_more_and_an_earlier_one_less(folder: Path) -> None:
    change(folder / "summary.json", {"new_number": 1.0})
    edit(folder / "records.jsonl", '"step":', '"new": 1, "step":')
    (run,), problems = read_runs(folder)
    assert problems == [] and run.summary and len(records_of(run)) == 23
    change(folder / "summary.json", {"num_parameters": None, "memory.fullest_at": {}})
    (row,) = rows_of(points(folder), all_columns(points(folder)))
    assert row["total_bytes"]
    page.render(points(folder))


@pytest.mark.parametrize("name", ["summary.json", "records.jsonl"])
def test_a_file_of_a_later_format_is_one_line_with_the_remedy(folder: Path, name: str) -> None:
    other = write_run(folder.parent / "old")
    assert read_runs(folder.parent)[1] == []
    edit(folder / name, '"format": 1', '"format": 2')
    runs, (line,) = read_runs(folder.parent)
    gone = name == "summary.json"
    assert [run.folder for run in runs] == ([other] if gone else [folder, other])
    assert line == (
        f"{folder}: {'left out, ' if gone else ''}{name} has format 2, and this zeroexp reads 1; "
        "use the version that wrote it"
    )
    edit(folder / "trace.0.9.json", '"format": 1', '"format": 2')
    assert "No step was traced" in page.render(points_of(runs), [line])


def test_a_folder_is_a_sweep_or_a_run(folder: Path) -> None:
    write_run(folder.parent / "b", "zero2")
    runs, _ = read_runs(folder.parent / "b")
    assert [run.name for run in runs] == ["b"]


def test_two_hundred_runs_are_two_hundred_points(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first", num_steps=6)
    config = (first / "config.yaml").read_text()
    for seed in range(200):
        folder = tmp_path / f"sweep/eps{seed}"
        shutil.copytree(first, folder)
        (folder / "config.yaml").write_text(config.replace("eps: 1.0e-08", f"eps: {seed}"))
    made = points(tmp_path / "sweep")
    assert len({point.name for point in made}) == 200
    text = page.render(made)
    assert text.count("<tr>") > 200 and "eps137" in text
