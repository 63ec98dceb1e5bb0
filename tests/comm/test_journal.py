"""Ranks that issue different collectives are told apart; a rank that is only slow is accused of nothing."""

from __future__ import annotations

import time

import pytest
import torch

from zeroexp.comm import journal
from zeroexp.comm.collectives import Collectives
from zeroexp.comm.journal import describe_difference
from zeroexp.world import World

LOOKS = 0.05  # seconds of a look and of patience here
SHOWN_AND_READ_SECONDS = 8 * LOOKS  # both ranks have looked by then


def test_the_first_number_with_different_words_is_told() -> None:
    mine = {3: "the gather of a", 4: "the gather of b", 5: "the reduce of b"}
    text = describe_difference(
        1, mine, 0, {4: "the gather of b", 5: "the norm", 6: "the gather of a"}
    )
    assert text is not None
    assert "rank 0 is in the norm; rank 1 is in the reduce of b" in text


@pytest.mark.parametrize("theirs", [{}, {1: "a"}, {2: "b", 3: "c"}, {4: "a", 5: "b"}])
def test_who_is_behind_or_ahead_is_not_accused(theirs) -> None:
    assert describe_difference(0, {1: "a", 2: "b", 3: "c"}, 1, theirs) is None


def sum_with_a_slow_rank(world: World) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LOOK_SECONDS", "PATIENCE_SECONDS"):
            patch.setattr(journal, name, LOOKS)
        wire = Collectives(world, transport="native")
        wire.connect()
        sums: list[float] = []
        for seconds in (0.0, SHOWN_AND_READ_SECONDS):
            if world.rank == 1:
                time.sleep(seconds)
            sums.append(float(wire.sum_scalar(torch.ones(1), "norm")))
        return sums


def test_a_slow_rank_is_waited_for(ranks) -> None:
    assert ranks(sum_with_a_slow_rank) == [[2.0, 2.0]] * 2
