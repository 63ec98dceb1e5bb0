"""Hundreds of folders, torn files and files of other versions: what is whole is shown, the rest is one line each."""

from __future__ import annotations

import json
import shutil
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from tests.run_folders import write_run
from tests.traces import write_trace
from zeroexp.config.keys import ConfigError
from zeroexp.report import exports, page
from zeroexp.report.measured_points import points_of
from zeroexp.report.reading import read_runs, records_of


def changed(path: Path, **changes: Any) -> None:
    path.write_text(
        json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("summary.json", '{"world_size": 2, "num_st'),
        ("summary.json", "{}"),
        ("summary.json", "[]"),
        ("config.yaml", "model: [1, 2"),
        ("config.yaml", ""),
        ("config.yaml", "model: {name: small}"),
        ("environment.json", "{"),
        ("summary.json", b"\xff\xfe"),
        ("state.json", '{"status": "done", "reason": {}}'),
        ("state.json", '{"status": "done", "done_at": "Infinity"}'),
        ("load.json", '{"other_cores": "many"}'),
        ("environment.json", '{"repeat": "first"}'),
    ],
)
def test_a_torn_file_costs_its_run_and_one_line(tmp_path: Path, name: str, text: Any) -> None:
    whole, torn = write_run(tmp_path / "whole"), write_run(tmp_path / "torn")
    (torn / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    runs, (line,) = read_runs([tmp_path])
    assert [run.folder for run in runs] == [whole]
    assert line.startswith(f"{torn}: left out") and "\n" not in line


@pytest.mark.parametrize(
    ("names", "value"),
    [
        (("step_seconds_median",), 0),
        (("step_seconds_p95",), "NaN"),
        (("tokens_per_second",), None),
        (("world_size",), 3),
        (("memory", "total", "fullest"), "much"),
        (("memory", "peak", "per_rank"), {}),
        (("times",), [{"rank": 0}]),
        (("plan",), {"total": []}),
    ],
)
def test_a_summary_with_what_no_run_writes_costs_its_run_and_one_line(
    tmp_path: Path, names: tuple[str, ...], value: Any
) -> None:
    whole, odd = write_run(tmp_path / "whole"), write_run(tmp_path / "odd")
    summary = json.loads((odd / "summary.json").read_text())
    *path, last = names
    reduce(lambda part, name: part[name], path, summary)[last] = value
    (odd / "summary.json").write_text(json.dumps(summary))
    runs, (line,) = read_runs([tmp_path])
    assert [run.folder for run in runs] == [whole]
    assert line.startswith(f"{odd}: left out, its files cannot be read") and "\n" not in line


def test_torn_records_cost_the_curve_and_one_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "sweep/a")
    lines = (folder / "records.jsonl").read_text().splitlines()
    (folder / "records.jsonl").write_text("\n".join(["{torn", *lines]) + "\n")
    (run,), problems = read_runs([tmp_path / "sweep"])
    assert problems == [f"{folder}: records.jsonl is torn and left out"] and records_of(run) == []
    assert "No point recorded a step" in page.render(points_of([run]))
    (folder / "records.jsonl").unlink()
    assert read_runs([tmp_path / "sweep"])[1] == [
        f"{folder}: records.jsonl is missing, so that it has no curve"
    ]


def test_the_last_line_of_a_run_that_goes_on_may_be_cut(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "sweep/a", status="running")
    records = folder / "records.jsonl"
    records.write_text(records.read_text()[:-40])
    (run,), problems = read_runs([tmp_path / "sweep"])
    assert problems == [] and len(records_of(run)) == 22


def test_a_torn_timeline_is_one_line_and_no_step_is_drawn(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "sweep/a")
    write_trace(folder, rank=0, step=9, began_at=1.0)
    trace = folder / "trace.0.9.json"
    trace.write_text(trace.read_text()[:-40])
    runs, problems = read_runs([tmp_path / "sweep"])
    assert problems == [f"{folder}: trace.0.9.json is torn and left out"]
    assert "No step was traced" in page.render(points_of(runs))


@pytest.mark.parametrize("word", ['"ts": "late"', '"args": null'])
def test_a_timeline_with_what_no_run_writes_is_not_drawn(tmp_path: Path, word: str) -> None:
    folder = write_run(tmp_path / "sweep/a")
    write_trace(folder, rank=0, step=9, began_at=1.0)
    trace = folder / "trace.0.9.json"
    key = word.partition(":")[0]
    content = json.loads(trace.read_text())
    content["traceEvents"][-1][json.loads(key)] = json.loads(word.partition(":")[2])
    trace.write_text(json.dumps(content))
    assert "No step was traced" in page.render(points_of(read_runs([tmp_path / "sweep"])[0]))


def test_a_later_version_may_say_more(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "sweep/a")
    changed(folder / "summary.json", new_number=1.0)
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    (folder / "records.jsonl").write_text(
        "".join(json.dumps({**x, "new": 1}) + "\n" for x in lines)
    )
    (run,), problems = read_runs([tmp_path / "sweep"])
    assert problems == [] and run.summary and len(records_of(run)) == len(lines)


@pytest.mark.parametrize("name", ["summary.json", "records.jsonl", "trace.0.9.json"])
def test_a_file_of_a_later_format_is_one_line_with_the_remedy(tmp_path: Path, name: str) -> None:
    folder, other = write_run(tmp_path / "sweep/new"), write_run(tmp_path / "sweep/old")
    write_trace(folder, rank=0, step=9, began_at=1.0)
    assert read_runs([tmp_path / "sweep"])[1] == []
    path = folder / name
    text = path.read_text()
    assert '"format": 1' in text
    path.write_text(text.replace('"format": 1', '"format": 2'))
    runs, (line,) = read_runs([tmp_path / "sweep"])
    gone = name == "summary.json"
    assert [run.folder for run in runs] == ([other] if gone else [folder, other])
    assert line == (
        f"{folder}: {'left out, ' if gone else ''}{name} has format 2, and this zeroexp reads 1; "
        "use the version that wrote it"
    )
    text = page.render(points_of(runs), [line])
    assert ("zero3 · buffer" in text) and (name != "trace.0.9.json" or "No step was traced" in text)


def test_an_earlier_version_may_say_less(tmp_path: Path) -> None:
    """Without the number of parameters and the bytes at each moment, both are taken from what ranks held at most."""
    folder = write_run(tmp_path / "sweep/a")
    summary = json.loads((folder / "summary.json").read_text())
    del summary["num_parameters"], summary["memory"]["fullest_at"]
    (folder / "summary.json").write_text(json.dumps(summary))
    (run,), problems = read_runs([tmp_path / "sweep"])
    assert problems == []
    (row,) = exports.rows_of(points_of([run]))
    assert row["table_bytes"] == row["total_bytes"]
    page.render(points_of([run]))


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "sweep/a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty: no run in there; give outputs/<sweep>"):
        read_runs([tmp_path / "sweep", tmp_path / "empty"])


def test_one_run_is_given_by_its_own_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "sweep/a")
    write_run(tmp_path / "sweep/b", "zero2")
    runs, _ = read_runs([tmp_path / "sweep/b"])
    assert [run.name for run in runs] == ["b"]


def test_two_hundred_runs_are_two_hundred_points(tmp_path: Path) -> None:
    """They are told apart by the one setting in which they differ."""
    first = write_run(tmp_path / "first", num_steps=6)
    config = (first / "config.yaml").read_text()
    for seed in range(200):
        folder = tmp_path / f"sweep/{seed}"
        shutil.copytree(first, folder)
        (folder / "config.yaml").write_text(config.replace("seed: 0", f"seed: {seed}"))
    points = points_of(read_runs([tmp_path / "sweep"])[0])
    assert len({point.name for point in points}) == 200
    text = page.render(points)
    assert text.count("<tr>") > 200 and "zero3 · buffer · seed 137" in text
