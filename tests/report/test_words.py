"""Differences from the stage's table are explained by what the run's files show, in numbers that add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.report.made import change, points, spread
from tests.run_folders import PARAMETER_BYTES, write_run
from zeroexp.report.words import explanations, headline_cards

MIB = 2**20
TABLE = {"reduce": 6 * 48 * MIB, "publish": 48 * MIB}  # six microbatches at two ranks


def explained(folder: Path, kind: str, *mebibytes: float, **more: Any) -> list[str]:
    """Give a zero2 run these bytes on its two ranks, and return what is said of it."""
    summary = folder / "a/summary.json"
    if not summary.exists():
        write_run(folder / "a", "zero2")
        change(summary, {"memory.fullest_at.after_backward.gradients": 48 * MIB})
    values = {
        f"memory.by_kind.{kind}": spread(*mebibytes),
        f"memory.fullest_at.after_backward.{kind}": max(mebibytes) * MIB,
        "sent_bytes_by_kind": TABLE,
    }
    change(summary, {**values, **more})
    return dict(explanations(points(folder))).get("a", [])


@pytest.mark.parametrize(
    ("kind", "mebibytes", "sentence"),
    [
        ("gradients", (48, 48), None),
        (
            "gradients",
            (60, 36),
            "Gradients: 60.0 MiB where the table says 48.0 MiB. The fullest rank holds 12.0 MiB more than the mean, "
            "since pieces are uneven.",
        ),
        (
            "gradients",
            (52, 52),
            "Gradients: 52.0 MiB where the table says 48.0 MiB. Padding and what every rank holds whole take 4.0 MiB "
            "on each rank.",
        ),
        (  # whole parameters are never fewer
            "parameters",
            (90, 90),
            "Parameters: 90.0 MiB where the table says 96.0 MiB. 6.0 MiB less than these explain.",
        ),
    ],
)
def test_what_differs_from_the_table_is_imbalance_padding_or_left_over(
    tmp_path: Path, kind: str, mebibytes: tuple[float, ...], sentence: str | None
) -> None:
    assert explained(tmp_path, kind, *mebibytes) == ([sentence] if sentence else [])


def test_a_closed_form_that_is_wrong_and_bytes_sent_are_said(tmp_path: Path) -> None:
    held = 2.5 * PARAMETER_BYTES
    assert explained(tmp_path, "gradients", 48, 48, plan={"total": held, "sent": 336 * MIB}) == []
    assert explained(tmp_path, "gradients", 48, 48, plan={"total": held - 24 * MIB}) == [
        "It holds 240.0 MiB where its closed form says 216.0 MiB: nothing here explains that."
    ]
    early = {"plan": {"total": held + 24 * MIB}, "num_warmup_steps": 1}
    assert explained(tmp_path, "gradients", 48, 48, **early) == [
        "It holds 240.0 MiB where its closed form says 264.0 MiB: memory was read in the first step, before there "
        "was an optimizer's state; warm up for two."
    ]
    sent = {**TABLE, "reduce": 5 * 48 * MIB}
    assert explained(tmp_path, "gradients", 48, 48, plan={}, sent_bytes_by_kind=sent) == [
        "It sends 288.0 MiB a step where the table says 336.0 MiB. By kind: reduce -48.0 MiB."
    ]


def test_the_first_numbers_compare_what_can_be_compared(tmp_path: Path) -> None:
    for strategy, size in (("ddp", 1), ("ddp", 2), ("zero3", 2)):
        write_run(tmp_path / f"{strategy}-{size}", strategy, "buffer", size)
    made = {card.label: card for card in headline_cards(points(tmp_path))}
    assert made["least memory"].value == f"{2 * PARAMETER_BYTES / MIB:.1f} MiB"
    assert made["least memory"].detail == "zero3-2, 0.50 of ddp-1"
    assert made["least sent"].detail == "ddp-2, like all others", "one rank sends none"
    assert made["losses"].value == "equal"
