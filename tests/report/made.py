"""Sweeps for the tests of reports, and changes of their files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.run_folders import write_run
from zeroexp.report.measured_points import MeasuredPoint, points_of
from zeroexp.report.reading import read_runs


def points(folder: Path) -> list[MeasuredPoint]:
    return points_of(read_runs(folder)[0])


def change(path: Path, values: Mapping[str, Any]) -> Path:
    """Put values into a file of JSON; a dot in a name goes one level down."""
    content = json.loads(path.read_text(encoding="utf-8"))
    for name, value in values.items():
        *outer, last = name.split(".")
        part = content
        for key in outer:
            part = part[key]
        part[last] = value
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def timed(folder: Path, strategy: str = "zero3", **seconds: float) -> None:
    """Write a run for each name, which took so many seconds a step."""
    for name, each in seconds.items():
        run = write_run(folder / name, strategy)
        change(run / "summary.json", {"step_seconds_median": each, "step_seconds_p95": each})


def repeats(folder: Path, times: Mapping[str, list[float]]) -> Path:
    """Write runs of these strategies, one for each number of seconds."""
    for strategy, seconds in times.items():
        for number, each in enumerate(seconds):
            timed(folder, strategy, **{f"{strategy}-{number}" if number else strategy: each})
    return folder


def spread(*mebibytes: float) -> dict[str, Any]:
    ranks = [mib * 2**20 for mib in mebibytes]
    return {"fullest": max(ranks), "mean": sum(ranks) / len(ranks), "per_rank": ranks}
