"""The numbers that head a page."""

from __future__ import annotations

from pathlib import Path

from tests.report.made import points
from tests.run_folders import PARAMETER_BYTES, write_run
from zeroexp.report.words import headline_cards

MIB = 2**20


def test_the_first_numbers_compare_what_can_be_compared(tmp_path: Path) -> None:
    for strategy, size in (("ddp", 1), ("ddp", 2), ("zero3", 2)):
        write_run(tmp_path / f"{strategy}-{size}", strategy, "buffer", size)
    made = {card.label: card for card in headline_cards(points(tmp_path))}
    assert made["least memory"].value == f"{2 * PARAMETER_BYTES / MIB:.1f} MiB"
    assert made["least memory"].detail == "zero3-2, 0.50 of ddp-1"
    assert made["least sent"].detail == "ddp-2, like all others", "one rank sends none"
    assert made["losses"].value == "equal"
