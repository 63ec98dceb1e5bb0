"""A study claims that its plan holds: each number that is not as planned breaks its own claim, and no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.report.made import change, edit, points
from tests.run_folders import write_run
from zeroexp.report.compare import conclude
from zeroexp.report.page import render

MIB = 2**20


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """ZeRO-3 of ours and of torch, both as planned; of torch's nobody counts collectives by kind."""
    for name, implementation in [("theirs", "torch"), ("ours", "buffer")]:
        write_run(tmp_path / name, "zero3", implementation)
        edit(tmp_path / name / "config.yaml", "plan_must_hold: false", "plan_must_hold: true")
        edit(tmp_path / name / "config.yaml", "loss_agreement: null", "loss_agreement: 1.0e-05")
        path = tmp_path / name / "summary.json"
        summary = json.loads(path.read_text())
        memory, calls = summary["memory"], summary["calls_by_kind"]
        planned = {"total": memory["total"]["fullest"]}
        rehearsed = {"peak": memory["peak"]["fullest"] - MIB}
        if name == "ours":
            planned["sent"] = sum(summary["sent_bytes_by_kind"].values())
            rehearsed["calls"] = sum(calls.values())
        change(path, {"plan": planned, "rehearsed": rehearsed})
    return tmp_path


def test_what_is_as_planned_holds_and_is_on_the_page(sweep: Path) -> None:
    found = conclude(points(sweep))
    verdict, *lines = found.claim_lines
    assert verdict == "Verdict: 5 of 5 claims hold." and found.broken == []
    assert [line.rpartition(": ")[2] for line in lines] == ["holds"] * 5
    assert "2 of 2 points" in lines[1] and "1 of 1 points" in lines[2]
    assert verdict in render(points(sweep))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"plan.total": 5}, "bytes held: 1 of 2 points as planned, to the byte (ours +"),
        ({"plan.sent": 5}, "bytes sent: 0 of 1 points"),
        ({"rehearsed.calls": 5}, "operations: 0 of 1 points as planned, to the call (ours +11)"),
        ({"rehearsed.peak": 5}, "peaks: 1 of 2 points"),
    ],
)
def test_a_number_that_is_not_as_planned_breaks_its_claim(sweep: Path, changes, line) -> None:
    change(sweep / "ours/summary.json", changes)
    found = conclude(points(sweep))
    assert found.claim_lines[0] == "Verdict: 4 of 5 claims hold, so it is NOT proved."
    (broken,) = found.broken
    assert broken.startswith(line) and broken.endswith("DOES NOT HOLD")


def test_losses_that_part_break_their_claim(sweep: Path) -> None:
    edit(sweep / "ours/records.jsonl", '"loss": 7.0,', '"loss": 7.1,')
    assert "loss curves DISAGREE" in conclude(points(sweep)).broken[0]


def test_what_nobody_knows_is_not_proved(sweep: Path) -> None:
    for name in ("ours", "theirs"):
        change(sweep / name / "summary.json", {"rehearsed": {}})
    assert conclude(points(sweep)).claim_lines[0].startswith("Verdict: 3 of 5")


def test_another_study_claims_nothing(sweep: Path) -> None:
    edit(sweep / "ours/config.yaml", "plan_must_hold: true", "plan_must_hold: false")
    assert conclude(points(sweep)).claim_lines == []
    assert "What the study claims" not in render(points(sweep))
