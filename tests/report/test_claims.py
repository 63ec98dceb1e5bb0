"""A study claims that its plan holds: each number that is not as planned breaks its own claim, and no other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.report.made import change, edit, points
from tests.run_folders import write_run
from zeroexp.report.conclusions import conclude
from zeroexp.report.exports import as_json
from zeroexp.report.loss_agreement import losses_of
from zeroexp.report.page import render
from zeroexp.report.page.byte_charts import memory_chart
from zeroexp.report.page.losses import loss_chart
from zeroexp.report.results_table import render as table

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
    assert verdict == "Verdict: 6 of 6 claims hold." and found.broken == []
    assert [line.rpartition(": ")[2] for line in lines] == ["holds"] * 6
    assert "2 of 2 points" in lines[2] and "1 of 1 points" in lines[3]
    assert verdict in render(points(sweep))


def test_calls_of_some_steps_are_equal_however_their_mean_is_rounded(sweep: Path) -> None:
    """An outer step in some of the steps: 3 + 1 + 3 + 6/7 collectives, added in another order."""
    calls, planned = {"reduce": 3 + 1e-15, "publish": 4.0, "replicas": 6 / 7}, 3 + 4 + 6 / 7
    assert sum(calls.values()) != planned
    change(sweep / "ours/summary.json", {"calls_by_kind": calls, "rehearsed.calls": planned})
    assert conclude(points(sweep)).broken == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"plan.bus": 5}, "bytes sent: 0 of 1 points as planned, to the byte (ours -5 bytes)"),
        ({"plan.total": 5}, "bytes held: 1 of 2 points as planned, to the byte (ours +"),
        ({"plan.sent": 5}, "bytes sent: 0 of 1 points"),
        (
            {"rehearsed.calls": 16.25},
            "operations: 0 of 1 points as planned, to the call (ours -0.25",
        ),
        (
            {"rehearsed.calls": 5},
            "operations: 0 of 1 points as planned, to the call (ours +11 calls)",
        ),
        ({"rehearsed.peak": 5}, "peaks: 1 of 2 points"),
    ],
)
def test_a_number_that_is_not_as_planned_breaks_its_claim(sweep: Path, changes, line) -> None:
    change(sweep / "ours/summary.json", changes)
    found = conclude(points(sweep))
    assert found.claim_lines[0] == "Verdict: 5 of 6 claims hold, so it is NOT proved."
    (broken,) = found.broken
    assert broken.startswith(line) and broken.endswith("DOES NOT HOLD")


def test_of_what_an_interface_counted_nothing_is_claimed(sweep: Path) -> None:
    spread = {"fullest": 9.0, "mean": 7.0, "per_rank": [5.0, 9.0]}
    change(sweep / "ours/summary.json", {"plan.link": 5, "link_bytes_per_step": spread})
    (ours,) = (point.summary for point in points(sweep) if point.name == "ours")
    assert ours and ours.plan_errors["link"] == 2.0
    assert not conclude(points(sweep)).broken


def test_losses_that_part_break_their_claim(sweep: Path) -> None:
    edit(sweep / "ours/records.jsonl", '"loss": 7.0,', '"loss": 7.1,')
    assert "loss curves DISAGREE" in conclude(points(sweep)).broken[0]
    layout = loss_chart(points(sweep)).layout
    (bottom, below), (above, top) = (layout[axis]["domain"] for axis in ("yaxis2", "yaxis"))
    assert 0 <= bottom < below < above < top <= 1, "distances stand below the losses"
    third = write_run(sweep / "third", "zero2", "buffer")
    edit(third / "config.yaml", "loss_agreement: null", "loss_agreement: 1.0e-05")
    edit(third / "records.jsonl", '"loss": 7.0,', '"loss": 7.01,')
    broken = conclude(points(sweep)).broken[0]
    assert "(theirs, step 0)" in broken and "; off too: third 1.3e-02 (step 0):" in broken


def test_a_point_that_did_not_come_to_its_end_breaks_the_proof(sweep: Path) -> None:
    """Its curve ends early, and is not called another one for that."""
    lost = write_run(sweep / "lost", "zero2", "buffer", status="failed")
    (lost / "summary.json").unlink(missing_ok=True)
    edit(lost / "config.yaml", "plan_must_hold: false", "plan_must_hold: true")
    lines = (lost / "records.jsonl").read_text().splitlines(keepends=True)
    (lost / "records.jsonl").write_text("".join(lines[:2]))
    found = conclude(points(sweep))
    assert found.claim_lines[:2] == [
        "Verdict: 5 of 6 claims hold, so it is NOT proved.",
        "  2 of 3 points came to their end: DOES NOT HOLD",
    ]
    assert "2 loss curves agree" in found.claim_lines[2]
    assert "from step" not in render(points(sweep))
    assert any(trace["name"] == "lost" for trace in loss_chart(points(sweep)).data)
    for name in ("ours", "theirs"):
        shutil.rmtree(sweep / name)
    assert "No run has come to its end." in loss_chart(points(sweep)).caption
    assert conclude(points(sweep)).broken[0].startswith("0 of 1 points came to their end")


@pytest.mark.parametrize("is_proof", [True, False])
def test_losses_that_must_fall_are_a_claim_of_any_study(sweep, is_proof, capsys):
    for name in ("ours", "theirs"):
        edit(sweep / name / "config.yaml", "loss_must_fall: false", "loss_must_fall: true")
        if not is_proof:
            edit(sweep / name / "config.yaml", "plan_must_hold: true", "plan_must_hold: false")
        lines = [
            json.loads(line) for line in (sweep / name / "records.jsonl").read_text().splitlines()
        ]
        for number, line in enumerate(lines):
            line["loss"] = 7.0 + number
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (sweep / name / "records.jsonl").write_text(text)
    found, text = conclude(points(sweep)), "0 of 2 losses fall, and not ours, theirs"
    assert found.broken == [f"{text}: DOES NOT HOLD"]
    assert bool(found.claim_lines) == is_proof
    told = json.loads(as_json(points(sweep), [], found))
    assert {"text": text, "holds": False, "sweep": None} in told["claims"]


@pytest.mark.parametrize("lost", [("ours",), ("ours", "theirs")])
def test_losses_that_can_not_be_read_prove_nothing(sweep: Path, lost: tuple[str, ...]) -> None:
    for name in ("ours", "theirs"):
        edit(sweep / name / "config.yaml", "loss_must_fall: false", "loss_must_fall: true")
    for name in lost:
        (sweep / name / "records.jsonl").write_text("torn")
    broken = conclude(points(sweep)).broken
    of_losses = [line for line in broken if "loss" in line]
    assert of_losses and all("no losses can be read of ours" in line for line in of_losses)


def test_what_nobody_knows_is_not_proved(sweep: Path) -> None:
    for name in ("ours", "theirs"):
        change(sweep / name / "summary.json", {"rehearsed": {}})
    assert conclude(points(sweep)).claim_lines[0].startswith("Verdict: 4 of 6")


@pytest.mark.parametrize("name", ["ours", "theirs"])
def test_a_point_without_a_plan_is_not_proved(sweep: Path, name: str) -> None:
    """Its rehearsal or its closed form has failed."""
    change(sweep / name / "summary.json", {"rehearsed": {}, "plan": {}})
    broken = conclude(points(sweep)).broken
    assert [line.split(":")[0] for line in broken] == [
        *("bytes held", "bytes sent", "operations", "peaks")
    ]
    assert all("1 of 2 points as planned" in line for line in broken if "bytes held" in line)
    assert f"nothing to compare: {name}:" in broken[0]


@pytest.fixture
def again(sweep: Path) -> Path:
    """A repeat of ours."""
    shutil.copytree(sweep / "ours", sweep / "ours-again")
    return change(sweep / "ours-again/environment.json", {"repeat": 1}).parent


def peak_of(run: Path, more: int) -> float:
    """Let a run peak by so many bytes higher, and return its peak."""
    memory = json.loads((run / "summary.json").read_text())["memory"]
    higher = {**memory["peak"], "fullest": memory["peak"]["fullest"] + more}
    change(run / "summary.json", {"memory.peak": higher})
    return higher["fullest"]


def test_a_repeat_that_peaks_higher_breaks_the_claim_and_is_in_the_table(sweep, again):
    higher = peak_of(again, 20 * MIB)
    found = conclude(points(sweep))
    assert [line.split(":")[0] for line in found.broken] == ["peaks"]
    assert f"{higher / MIB:.1f}" in table(points(sweep))
    (marks,) = [each for each in memory_chart(points(sweep)).data if "peak" in each["name"]]
    assert dict(zip(marks["y"], marks["x"], strict=True))["ours"] == higher / MIB


@pytest.mark.parametrize("run", ["ours", "ours-again"])
def test_a_repeat_that_is_below_its_plan_breaks_the_claims(sweep, again, run):
    peak_of(sweep / run, -20 * MIB)
    change(sweep / run / "summary.json", {"plan.total": 0})
    broken = conclude(points(sweep)).broken
    assert [line.split(":")[0] for line in broken] == ["bytes held", "peaks"]
    assert "ours -19,922,944 bytes" in broken[1]  # the fixture's rehearsal is 1 MiB below its peak


@pytest.mark.parametrize("run", ["ours", "ours-again"])
def test_a_repeat_that_was_not_rehearsed_is_held_to_the_plan_of_another(sweep, again, run):
    """Ctrl-C came during its rehearsal, and --rerun leaves it as it is done."""
    change(sweep / run / "summary.json", {"rehearsed": {}, "plan": {}})
    assert conclude(points(sweep)).broken == []
    peak_of(sweep / run, 20 * MIB)
    assert [line.split(":")[0] for line in conclude(points(sweep)).broken] == ["peaks"]


def test_means_of_a_repeat_that_was_resumed_are_of_other_steps(sweep: Path, again: Path) -> None:
    summary = json.loads((again / "summary.json").read_text())
    sent = {kind: number + 0.5 for kind, number in summary["sent_bytes_by_kind"].items()}
    calls = {kind: number + 0.25 for kind, number in summary["calls_by_kind"].items()}
    changes = {"sent_bytes_by_kind": sent, "calls_by_kind": calls}
    change(again / "summary.json", {**changes, "num_steps": summary["num_steps"] - 1})
    assert conclude(points(sweep)).broken == []


def test_what_no_engine_of_the_study_counts_is_not_claimed(sweep: Path) -> None:
    shutil.rmtree(sweep / "ours")
    verdict, *lines = conclude(points(sweep)).claim_lines
    assert verdict == "Verdict: 4 of 4 claims hold."
    assert [line.split(":")[0].strip() for line in lines[2:]] == ["bytes held", "peaks"]


def test_another_study_claims_nothing(sweep: Path) -> None:
    edit(sweep / "ours/config.yaml", "plan_must_hold: true", "plan_must_hold: false")
    assert conclude(points(sweep)).claim_lines == []
    assert "What the study claims" not in render(points(sweep))


def test_seldom_synchronised_replicas_are_in_no_verdict_of_equality(sweep: Path) -> None:
    """As far away, another one breaks the claim."""
    far = write_run(sweep / "far", "zero2", "buffer")
    shutil.copy(sweep / "ours/records.jsonl", far / "records.jsonl")
    lines = [json.loads(line) for line in (far / "records.jsonl").read_text().splitlines()]
    for line in lines:
        line["loss"] *= 1.25
    (far / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    edit(far / "config.yaml", "plan_must_hold: false", "plan_must_hold: true")
    edit(far / "config.yaml", "loss_agreement: null", "loss_agreement: 1.0e-05")
    assert "DISAGREE" in conclude(points(sweep)).claim_lines[2]
    edit(far / "config.yaml", "every: null", "every: 5")
    given = points(sweep)
    losses = conclude(given).claim_lines[2]
    assert losses.startswith("  2 loss curves agree") and losses.endswith(": holds")
    told = " ".join(table(given).split())
    assert (
        "far is zero2 whose replicas meet every 5 steps, by design not equal to one process."
        in told
    )
    page = render(given)
    assert "In no comparison, by design not equal: far." in page
    both = losses_of(given)
    assert both and not both.off and both.reference == "ours"
