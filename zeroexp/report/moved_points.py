"""Two sweeps, before and after a change: which points moved, in a byte, a count, a loss, a peak or their time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeroexp.report.exact_numbers import changed_losses, changed_numbers, changed_peaks
from zeroexp.report.measured_points import MeasuredPoint, Round, of_one_seed, settings_of
from zeroexp.report.statistics import Comparison, TimeVerdict, aligned, compare_step_times

MOST_CHANGES = 3  # exact numbers of one point that are listed; the rest are counted


@dataclass(frozen=True)
class Moved:
    """One point beside itself before a change."""

    name: str
    comparison: Comparison | None  # None where a round of both is missing
    changes: list[str]  # exact numbers that changed, in words: before and after

    @property
    def has_moved(self) -> bool:
        verdict = self.comparison and self.comparison.verdict
        return bool(self.changes) or verdict in (TimeVerdict.FASTER, TimeVerdict.SLOWER)

    @property
    def time(self) -> str:
        return self.comparison.text if self.comparison else "no time to compare"


def points_that_moved(
    before: Sequence[MeasuredPoint], after: Sequence[MeasuredPoint]
) -> tuple[list[Moved], list[str]]:
    """Return each point that both sweeps have, by its configuration, and a line for each that only one has.

    Times are taken over those of a point that the change left alone, in the same round of the same sweep: what the
    machine did between the sweeps is no change of ours. That is the first point of PyTorch's own, if both have one, and
    a time of it.
    """
    apart = {key for point in (*before, *after) for key in point.apart}
    old = {settings_of(point.run, apart): point for point in before}
    new = {settings_of(point.run, apart): point for point in after}
    both = [key for key in new if key in old]
    steady = next(
        (
            key
            for key in both
            if new[key].run.implementation == "torch"
            and old[key].seconds_by_round.keys() & new[key].seconds_by_round.keys()
        ),
        None,
    )
    unchanged = (old[steady], new[steady]) if steady else None
    pairs = [_moved(old[key], new[key], unchanged, len(both)) for key in both]
    return pairs, _without_partner(
        {point.name: key for key, point in old.items() if key not in new},
        {point.name: key for key, point in new.items() if key not in old},
    )


def _without_partner(
    before: Mapping[str, Sequence[str]], after: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return a line for each point, named with its settings, that only one sweep has, or both with other settings."""
    lines: list[str] = []
    for name, settings in before.items():
        if name in after:
            was, now = (
                " ".join(each for each in one if each not in other) or "defaults"
                for one, other in ((settings, after[name]), (after[name], settings))
            )
            lines.append(f"  no pair: {name} has {was} before, {now} after")
        else:
            lines.append(f"  only before: {name}")
    return [*lines, *(f"  only after: {name}" for name in after if name not in before)]


def lines_of_moved(pairs: Sequence[Moved], alone: Sequence[str]) -> list[str]:
    """Return the moved points first, then how many did not move, then what has no partner."""
    movers = [one for one in pairs if one.has_moved]
    still = [one for one in pairs if not one.has_moved]
    lines = [f"{len(movers)} of {len(pairs)} points moved (after over before):"]
    if not pairs:
        lines = ["no point is in both sweeps, so that nothing is compared:"]
    for one in movers:
        shown, hidden = one.changes[:MOST_CHANGES], len(one.changes) - MOST_CHANGES
        lines.append(f"  {one.name}: step {one.time}")
        lines += [f"    {change}" for change in shown]
        lines += [f"    and {hidden} more"] if hidden > 0 else []
    if still:
        number = "1 point has" if len(still) == 1 else f"{len(still)} points have"
        lines.append(
            f"{number} equal bytes and counts, and losses of equal seeds; of the step time:"
        )
    return [*lines, *aligned({one.name: one.time for one in still}), *alone]


def _moved(
    old: MeasuredPoint,
    new: MeasuredPoint,
    unchanged: tuple[MeasuredPoint, MeasuredPoint] | None,
    number: int,
) -> Moved:
    changes = [*changed_numbers(old.run, new.run), *changed_peaks(old.run, new.run)]
    ended = bool(old.run.summary), bool(new.run.summary)
    if not all(ended) and any(ended):
        changes.append(f"did not come to its end {'after' if ended[0] else 'before'}")
    curves = [point.losses for point in of_one_seed([old, new])]
    if len(curves) == 2:
        changes += changed_losses(*curves)
        one, two = (max(curve, default=-1) + 1 for curve in curves)
        changes += [f"steps: {one} and {two}"] if one != two else []
    before, after = old.seconds_by_round, new.seconds_by_round
    if unchanged and new is not unchanged[1]:
        before, after = _over(before, unchanged[0]), _over(after, unchanged[1])
    time = compare_step_times(after, before, num_comparisons=number)
    return Moved(new.name, time, changes)


def _over(seconds: Mapping[Round, float], unchanged: MeasuredPoint) -> dict[Round, float]:
    """Return the seconds over those of the unchanged point in the same round."""
    other = unchanged.seconds_by_round
    return {number: each / other[number] for number, each in seconds.items() if number in other}
