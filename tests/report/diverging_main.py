"""Ranks with a bug put into one strategy, for test_diverge.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from zeroexp.comm import direct
from zeroexp.comm.shared_memory import SharedChannel
from zeroexp.process import progress
from zeroexp.run import rank
from zeroexp.zero.unit import Unit

BUG_IN_STEP = 1
prepare = rank.prepare


def wrong_gather(folder: Path, *, device: str) -> None:
    """Rank 1 gets one wrong element of blocks.1 from its peer."""
    copy = SharedChannel.copy_offered

    def wrong(self: Any, offer: int, targets: list[Tensor], what: str) -> None:
        copy(self, offer, targets, what)
        if self._rank == 1 and what == "the gather of unit blocks.1" and in_bad_step():
            targets[0][0] += 1.0

    SharedChannel.copy_offered = wrong
    rank.main(folder, device=device)


def wrong_reduce(folder: Path, *, device: str) -> None:
    """A rank counts one term twice."""
    add = direct.sum_into

    def wrong(out: Tensor, terms: list[Tensor], accumulate: bool) -> None:
        add(out, [*terms, terms[0].clone()] if in_bad_step() else terms, accumulate)

    direct.sum_into = wrong
    rank.main(folder, device=device)


def wrong_publish(folder: Path, *, device: str) -> None:
    """One weight of blocks.0 changes after the optimizer's step."""
    publish = Unit.publish

    def wrong(self: Unit) -> Any:
        if self.name == "blocks.0" and in_bad_step():
            self.held[0].piece[0] += 1.0
        return publish(self)

    Unit.publish = wrong
    rank.main(folder, device=device)


def in_bad_step() -> bool:
    return progress._numbers[progress.NUM_STEPS] == BUG_IN_STEP
