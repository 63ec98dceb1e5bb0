"""Changes of a point, planned: what every answer that compares is made of.

    fewest_ranks    more ranks, rehearsed: the first at which a step fits
    advise          stages, recomputation and micro-batches, rehearsed: the fastest that fits

Closed forms come first everywhere: what does not fit by its model states alone is not rehearsed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from zeroexp.check import check
from zeroexp.check.try_strategy import check_strategy
from zeroexp.config.keys import Config, ConfigError
from zeroexp.plan.changes import Change, change, complete_words
from zeroexp.plan.outcome import PlannedPoint, RehearsedPeaks, plan_point

MOST_RANKS = {"cuda": 4096, "cpu": 64}  # CPU ranks share a host, where each pair counts apart


class Candidate(NamedTuple):
    """A planned change, rehearsed where that was asked for, and the words with which a command line makes it."""

    words: str
    planned: PlannedPoint

    @property
    def stage(self) -> str:
        return self.planned.outcome.strategy

    @property
    def micro(self) -> int:
        return self.planned.config.data.micro_batch_size

    @property
    def recomputes(self) -> bool:
        return self.planned.config.train.activation_checkpointing

    @property
    def way(self) -> tuple[str, bool]:
        """The stage, and whether activations are recomputed."""
        return self.stage, self.recomputes

    @property
    def rehearsed(self) -> RehearsedPeaks | None:
        return self.planned.outcome.rehearsed

    @property
    def may_fit(self) -> bool:
        return self.planned.outcome.fits is not False

    @property
    def states_bytes(self) -> int:
        return int(self.planned.outcome.total.fullest)

    @property
    def peak_bytes(self) -> int:
        """What a rank's device must have room for: rehearsed, else model states alone."""
        return self.rehearsed.fullest.needed_bytes if self.rehearsed else self.states_bytes

    @property
    def seconds(self) -> float:
        """Expected seconds of a step."""
        assert self.rehearsed is not None
        return self.rehearsed.step_seconds[1]


def planned_changes(
    changes: Iterable[Change], of: PlannedPoint, named: Collection[str] = ()
) -> Iterator[Candidate]:
    """Plan those changes of a point that are defined; `named` are the keys that its line sets."""
    for made in changes:
        try:
            check(made.config, on_paper=True)
            check_strategy(made.config)
            planned = plan_point(made.config, of.model, of.device)
        except ConfigError:
            continue
        yield Candidate(complete_words(made, of.config, of.device, named), planned)


def first_that_fits(changes: Iterable[Change], of: PlannedPoint) -> Candidate | None:
    """Return the first change at which model states fit, by closed forms."""
    return next((each for each in planned_changes(changes, of) if each.planned.outcome.fits), None)


def more_ranks(config: Config, device: str, *, above: int = 0) -> Iterator[Change]:
    """Yield the config at twice as many ranks each time, `above` so many or from one on."""
    size = 2 * above or 1
    while size <= MOST_RANKS[device]:
        yield change(config, {"world_size": size})
        size *= 2
