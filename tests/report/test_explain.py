"""Differences from the stage's table are explained by what the run's files show, in numbers that add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.run_folders import write_run
from zeroexp.report.explain_difference import explanations
from zeroexp.report.measured_points import points_of
from zeroexp.report.reading import read_runs

MIB = 2**20


def told(folder: Path) -> dict[str, list[str]]:
    return dict(explanations(points_of(read_runs([folder])[0])))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One zero2 run whose bytes are those of its table, and a summary that a test changes."""
    write_run(tmp_path / "a", "zero2")
    return tmp_path


def change(
    folder: Path, kind: str, per_rank: list[float], sent: dict[str, Any] | None = None
) -> None:
    path = folder / "a/summary.json"
    summary = json.loads(path.read_text())
    ranks = [mib * MIB for mib in per_rank]
    summary["memory"]["by_kind"][kind] = {
        "fullest": max(ranks),
        "mean": sum(ranks) / len(ranks),
        "per_rank": ranks,
    }
    summary["memory"]["fullest_at"]["after_backward"][kind] = max(ranks)
    summary["sent_bytes_by_kind"] = sent or summary["sent_bytes_by_kind"]
    path.write_text(json.dumps(summary))


TABLE = {"reduce": 6 * 48 * MIB, "publish": 48 * MIB}  # six microbatches at two ranks


def test_what_is_as_the_table_says_needs_no_word(folder: Path) -> None:
    change(folder, "gradients", [48, 48], TABLE)
    assert told(folder) == {}


def test_a_closed_form_that_is_wrong_is_said_to_be(folder: Path) -> None:
    change(folder, "gradients", [48, 48], TABLE)
    path = folder / "a/summary.json"
    summary = json.loads(path.read_text())
    held = summary["memory"]["total"]["fullest"]
    path.write_text(json.dumps({**summary, "plan": {"total": held, "sent": 336 * MIB}}))
    assert told(folder) == {}  # sent: 6 x 48 + 48
    path.write_text(json.dumps({**summary, "plan": {"total": held - 24 * MIB}}))
    (sentence,) = told(folder)["zero2 · buffer"]
    assert sentence == (
        "It holds 240.0 MiB where its closed form says 216.0 MiB: nothing here explains that."
    )


def test_uneven_pieces_are_imbalance(folder: Path) -> None:
    change(folder, "gradients", [60, 36], TABLE)
    (sentence,) = told(folder)["zero2 · buffer"]
    assert sentence == (
        "Gradients: 60.0 MiB where the table says 48.0 MiB. The fullest rank holds 12.0 MiB more than the mean, since "
        "pieces are uneven."
    )


def test_more_on_every_rank_is_padding(folder: Path) -> None:
    change(folder, "gradients", [52, 52], TABLE)
    (sentence,) = told(folder)["zero2 · buffer"]
    assert sentence.endswith("Padding and what every rank holds whole take 4.0 MiB on each rank.")


def test_what_nothing_explains_is_said_to_be_left(folder: Path) -> None:
    change(folder, "parameters", [90, 90], TABLE)  # whole parameters are never fewer
    (sentence,) = told(folder)["zero2 · buffer"]
    assert sentence.endswith("6.0 MiB less than these explain.")


def test_bytes_sent_are_told_by_kind(folder: Path) -> None:
    change(folder, "gradients", [48, 48], {**TABLE, "reduce": 5 * 48 * MIB})
    (sentence,) = told(folder)["zero2 · buffer"]
    assert sentence == (
        "It sends 288.0 MiB a step where the table says 336.0 MiB. By kind: reduce -48.0 MiB."
    )


def test_a_stage_whose_peak_falls_less_than_promised_says_why(folder: Path) -> None:
    change(folder, "gradients", [48, 48], TABLE)
    write_run(folder / "b", "ddp")
    for name, peak in (("a", 300), ("b", 400)):
        path = folder / name / "summary.json"
        summary = json.loads(path.read_text())
        ranks = [peak * MIB, peak * MIB]
        summary["memory"]["peak"] = {"fullest": peak * MIB, "mean": peak * MIB, "per_rank": ranks}
        path.write_text(json.dumps(summary))
    sentences = told(folder)["zero2 · buffer"]
    # 2.5 P of 4 P; the peak is 300 of 400, of which the table has 240.
    assert sentences[-1].startswith(
        "Its peak is 0.75 of that of ddp · buffer, and the table says 0.62: of its 300.0 MiB 60.0 MiB are buffers"
    )
