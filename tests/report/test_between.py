"""`python -m benchmarks.between`: what it finds and claims where the noise is drawn, and the runs that it starts."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks import between
from zeroexp.report.statistics import TimeVerdict


def verdicts(slower: float, number: int = 100) -> list[TimeVerdict]:
    """Compare so many times where B takes `slower` times A's step, each run is off by 1 %, and the machine drifts."""
    draw, turns = random.Random(11), 0

    def run(side: str) -> float:
        nonlocal turns
        turns += 1
        drift = 1 + 0.1 * math.sin(turns / 50)
        return drift * (slower if side == "B" else 1.0) * math.exp(draw.gauss(0, 0.01))

    return [between.compare(run, between.NUM_ROUNDS, draw).verdict for _ in range(number)]


def test_two_per_cent_are_found_in_ninety_of_a_hundred_and_nothing_is_found_in_nothing() -> None:
    assert verdicts(1.02).count(TimeVerdict.SLOWER) >= 90
    assert verdicts(1 / 1.02).count(TimeVerdict.FASTER) >= 90
    equal = verdicts(1.0)
    assert equal.count(TimeVerdict.SLOWER) + equal.count(TimeVerdict.FASTER) <= 5


def test_both_sides_take_as_many_turns_and_a_drift_favours_nobody() -> None:
    for order in between.ORDERS:
        for power in (0, 1, 2):
            places = [sum(n**power for n, s in enumerate(order) if s == side) for side in "AB"]
            assert places[0] == places[1], "even drifts, and bent ones"


@pytest.mark.slow
def test_a_side_that_does_not_run_is_one_line(monkeypatch, capsys) -> None:
    words = ["data.seq_len=0", "data.seq_len=8", "model=tiny", "train.steps=1"]
    monkeypatch.setattr("sys.argv", ["between", *words])
    monkeypatch.setattr(between, "ORDERS", ("AB",))
    assert between.main() == between.WRONG
    error = capsys.readouterr().err.strip()
    assert error.startswith("benchmarks.between: data.seq_len=0: ") and "\n" not in error


@pytest.mark.slow
def test_equal_settings_are_compared_in_turn(monkeypatch, capsys) -> None:
    words = ["train.seed=0", "train.seed=0", "model=tiny", "train.steps=3", "train.warmup_steps=1"]
    monkeypatch.setattr("sys.argv", ["between", *words, "--rounds", "1"])
    monkeypatch.setattr(between, "ORDERS", ("AB",))
    between.main()
    printed = capsys.readouterr()
    assert printed.out.startswith("B over A: ") and printed.err.count(" ms\n") == 2
