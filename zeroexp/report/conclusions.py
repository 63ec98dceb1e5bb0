"""What a report concludes of its points: verdicts over runs, doubts and broken claims.

what                      beside                         equal means
bytes, counts, losses     repeats; the sweep before      every bit (exact_numbers.py, moved_points.py)
step times                the reference, a sweep before  an interval over runs (statistics.py)
what a study wants equal  all points                     one value (differences.py)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zeroexp.config.keys import ConfigError
from zeroexp.report.claims import Claim, claims_of, is_proof, lines_of
from zeroexp.report.differences import lines_of_broken_must_equal
from zeroexp.report.exact_numbers import lines_of_varied_numbers
from zeroexp.report.measured_points import MeasuredPoint, by_sweep
from zeroexp.report.statistics import (
    AGAIN,
    Comparison,
    Quality,
    aligned,
    compare_quality,
    compare_step_times,
    why_doubtful,
)

ONCE = (
    "Step times are compared in one round alone; repeats=5 would tell which differences are real."
)
MOST_DOUBTS = 3  # points in doubt that are all named
METRICS = {
    "Accuracy on validation samples": "validation_accuracy",
    "Loss on validation samples": "validation_loss",
    "Loss of the last step": "final_loss",
}


@dataclass(frozen=True)
class Conclusions:
    reference: str | None  # the point beside which the others are; of several sweeps, that of each
    comparisons: dict[str, Comparison]  # of each other point beside that of its own sweep
    doubts: list[str]  # times that are in doubt
    # Exact numbers that vary, what a study wants equal and differs, and claims that do not hold.
    broken: list[str]
    qualities: list[Quality]  # of each point over seeds; empty where none has several
    claims: list[Claim]
    claim_lines: list[str]  # of a study with plan_must_hold, and of each of several sweeps

    @property
    def verdicts(self) -> list[str]:
        """One line for each point beside the reference; a single line where no point ran twice."""
        head = f"Step time over that of {self.reference}, over runs, 95 % for all together:"
        texts = {name: comparison.text for name, comparison in self.comparisons.items()}
        is_once = all(comparison.num_pairs == 1 for comparison in self.comparisons.values())
        lines = [ONCE] if is_once else [head, *aligned(texts)]
        return [*(lines if texts else []), *self._quality_lines]

    @property
    def _quality_lines(self) -> list[str]:
        """One line for each point of several seeds: what it reached, and whether the reference did as well."""
        if not self.qualities:
            return []
        metric = self.qualities[0].metric
        head = f"{metric}: mean and deviation over seeds, beside the reference's by seed:"
        return [head, *aligned({one.name: one.text for one in self.qualities})]


def conclude(points: Sequence[MeasuredPoint], reference: str | None = None) -> Conclusions:
    """Raises ConfigError if no point has the reference's name."""
    beside, compared = compare_points(points, reference)
    broken = [line for point in points for line in lines_of_varied_numbers(point)]
    claims, lines = list[Claim](), list[str]()
    for own in by_sweep(points):  # a study speaks of its own points
        studies = [json.loads(point.run.config.get("study.must_equal", "[]")) for point in own]
        must_equal = dict.fromkeys(word for words in studies for word in words)
        broken += [f"study.must_equal: {x}" for x in lines_of_broken_must_equal(own, must_equal)]
        sweep, _, _ = own[0].name.rpartition("/")  # of several each has its name
        found = [replace(claim, sweep=sweep or None) for claim in claims_of(own)]
        claims += found
        held = [f"  {claim.line}" for claim in found if claim.holds and sweep]
        told = lines_of(found) if is_proof(own) else held
        lines += [f"{sweep}:", *told] if sweep and told else told
        named = f"{sweep}: " if sweep else ""
        broken += [f"{named}{claim.line}" for claim in found if not claim.holds]
    names = " or ".join(point.name for point in beside.values())
    qualities = _qualities(points, beside)
    return Conclusions(names or None, compared, _doubts(points), broken, qualities, claims, lines)


def compare_points(
    points: Sequence[MeasuredPoint], reference: str | None = None
) -> tuple[dict[Path, MeasuredPoint], dict[str, Comparison]]:
    """Return each sweep's reference, by default its first point with a time, and its others beside it, by name.

    None is beside one of another sweep: what the machine did meanwhile would be a verdict (moved_points.py).

    Raises ConfigError if a sweep has no point of the reference's name.
    """
    timed = [point for point in points if point.seconds_by_round]
    beside = {
        own[0].sweep_folder: _named(own, reference) if reference else own[0]
        for own in by_sweep(timed)
    }
    others = [(point, mine) for point in timed if point is not (mine := beside[point.sweep_folder])]
    compared = {
        point.name: compare_step_times(
            point.seconds_by_round, mine.seconds_by_round, num_comparisons=len(others)
        )
        for point, mine in others
    }
    return beside, {name: comparison for name, comparison in compared.items() if comparison}


def _named(points: Sequence[MeasuredPoint], name: str) -> MeasuredPoint:
    for point in points:
        if name in (point.name, point.run.name):
            return point
    names = ", ".join(point.run.name for point in points)
    raise ConfigError(f"--reference {name}: no such point with a time; use one of {names}")


def _qualities(
    points: Sequence[MeasuredPoint], beside: Mapping[Path, MeasuredPoint]
) -> list[Quality]:
    """Return what points reached over seeds, in the strictest measure that all of them have."""
    seeds = {point.name: point.by_seed for point in points if point.by_seed}
    if all(len(each) < 2 for each in seeds.values()):
        return []
    metric, key = next(
        (metric, key)
        for metric, key in METRICS.items()
        if all(getattr(s, key) is not None for each in seeds.values() for s in each.values())
    )
    # Of a run that diverged no loss is judged: its last one may be a number again.
    values = {
        name: {seed: math.nan if s.verdict else getattr(s, key) for seed, s in sorted(each.items())}
        for name, each in seeds.items()
    }
    mine = {point.name: beside[point.sweep_folder].name for point in points if point.by_seed}
    return [
        compare_quality(
            *(name, metric, each, values[mine[name]] if name != mine[name] else None),
            num_comparisons=len(values) - len(beside),
        )
        for name, each in values.items()
    ]


def _doubts(points: Sequence[MeasuredPoint]) -> list[str]:
    """Say which times others spoilt, or scatter (of many the first), and which runs ran again for that."""
    doubtful = [f"{point.name} ({why})" for point in points if (why := why_doubtful(point))]
    again = [(point.name, sum(AGAIN in run.environment for run in point.runs)) for point in points]
    again = [f"{name} ({number})" for name, number in again if number]
    lines: list[str] = []
    if doubtful:
        who = ", ".join(doubtful)
        if len(doubtful) > MOST_DOUBTS:
            timed = sum(bool(point.seconds_by_round) for point in points)
            who = f"{len(doubtful)} of {timed} points, as of {doubtful[0]}"
        told = "run them again by themselves"
        lines.append(f"In doubt, and marked with ?, are the times of {who}: {told}.")
    if again:
        told = "Run again at the end, once, since their times were in doubt, are runs of"
        lines.append(f"{told} {', '.join(again)}.")
    return lines
