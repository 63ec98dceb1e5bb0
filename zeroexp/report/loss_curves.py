"""Whether the loss curves of a sweep agree and whether they fall. Pure.

Every point of a comparison uses the same weights and the same global batches, so the curves differ only by rounding.
The measure is the largest relative difference |loss − reference| / |reference| over all steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from zeroexp.report.measured_points import Point


@dataclass(frozen=True)
class Curve:
    """One loss curve beside the reference."""

    name: str
    difference: float  # the largest relative one; inf if a step is missing or not finite
    step: int  # at which it is largest
    falls: bool


@dataclass(frozen=True)
class LossVerdict:
    reference: str
    curves: list[Curve]
    bound: float | None  # None: agreement is not required
    must_fall: bool

    @property
    def agree(self) -> bool:
        return self.bound is None or all(curve.difference <= self.bound for curve in self.curves)

    @property
    def holds(self) -> bool:
        return self.agree and (not self.must_fall or all(curve.falls for curve in self.curves))

    @property
    def worst(self) -> Curve:
        return max(self.curves, key=lambda curve: curve.difference)

    def lines(self) -> list[str]:
        """Return the verdict in words, then one line for each curve that breaks it."""
        lines: list[str] = []
        number, worst = len(self.curves), self.worst
        if self.bound is not None:
            lines.append(
                f"{number} loss curves {'agree' if self.agree else 'DISAGREE'}: largest relative difference to "
                f"{self.reference} {worst.difference:.1e} ({worst.name}, step {worst.step}), allowed {self.bound:.1e}"
            )
        if self.must_fall:
            lines.append(f"{sum(c.falls for c in self.curves)} of {number} losses fall")
        for curve in self.curves:
            if self.bound is not None and not curve.difference <= self.bound:
                lines.append(f"  {curve.name}: off by {curve.difference:.1e} at step {curve.step}")
            if self.must_fall and not curve.falls:
                lines.append(f"  {curve.name}: its loss does not fall")
        return lines


def judge_losses(
    losses: Mapping[str, Sequence[float]], *, bound: float | None, must_fall: bool = False
) -> LossVerdict:
    """Judge `losses`, which maps each curve's name to one loss per step; the first curve is the reference.

    Raises ValueError if there is no curve.
    """
    if not losses:
        raise ValueError("no loss curve to compare: no point of the sweep came to its end")
    reference = next(iter(losses))
    curves = [_judge_curve(name, curve, losses[reference]) for name, curve in losses.items()]
    return LossVerdict(reference, curves, bound, must_fall)


def largest_distance(curves: Mapping[str, Sequence[float]]) -> str:
    """Say how far the curves lie from the first, at most."""
    if len(curves) < 2:
        return "One curve has nothing to be compared with."
    verdict = judge_losses(curves, bound=math.inf)
    worst, reference = verdict.worst, verdict.reference
    if worst.difference == 0:
        return f"All {len(curves)} curves are equal to the last bit."
    if math.isinf(worst.difference):
        return f"{worst.name} has other steps than {reference}, or a loss that is no number."
    return (
        f"Largest relative distance of {len(curves)} curves to that of {reference}: {worst.difference:.1e} "
        f"({worst.name}, step {worst.step})."
    )


def loss_curves(points: Sequence[Point]) -> dict[str, Sequence[float]]:
    """Return the curves in their order, last those with a loss that is no number: nothing is compared with one."""
    curves = {point.name: point.losses for point in points if point.losses}
    return dict(sorted(curves.items(), key=lambda item: not all(map(math.isfinite, item[1]))))


def relative_distance(value: float, reference: float) -> float:
    """Return |value − reference| / |reference|; inf where either is no number."""
    if not (math.isfinite(value) and math.isfinite(reference)):
        return math.inf
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else math.inf


def loss_falls(losses: Sequence[float]) -> bool:
    """Tell whether the mean of the last quarter is below that of the first; single steps are too noisy to compare."""
    quarter = max(1, len(losses) // 4)
    return len(losses) > 1 and fmean(losses[-quarter:]) < fmean(losses[:quarter])


def _judge_curve(name: str, curve: Sequence[float], reference: Sequence[float]) -> Curve:
    distances = [relative_distance(a, b) for a, b in zip(curve, reference, strict=False)]
    worst = max(distances, default=math.inf)
    step = distances.index(worst) if distances else 0
    if len(curve) != len(reference):
        worst, step = math.inf, len(distances)
    return Curve(name, worst, step, loss_falls(curve))
