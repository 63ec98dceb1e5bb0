"""Check whether the loss curves of a sweep agree and whether they fall.

Every point of a comparison uses the same weights and the same global batches, so the curves differ only by rounding.
The measure is the largest relative difference |loss − reference| / |reference| over all steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Curve:
    """The result for one loss curve; `step` is the step with the largest difference to the reference."""

    name: str
    # This is the largest relative difference to the reference; inf if a step is missing or not finite.
    difference: float
    step: int
    falls: bool


@dataclass(frozen=True)
class Verdict:
    reference: str
    curves: list[Curve]
    bound: float | None  # None: agreement is not required
    must_fall: bool

    @property
    def agree(self) -> bool:
        return self.bound is None or all(curve.difference <= self.bound for curve in self.curves)

    @property
    def fall(self) -> bool:
        return not self.must_fall or all(curve.falls for curve in self.curves)

    @property
    def holds(self) -> bool:
        return self.agree and self.fall

    def lines(self) -> list[str]:
        """Return the verdict in words, then one line for each curve that breaks it."""
        asked = self._agreement() + self._falling()
        broken = [line for curve in self.curves for line in self._complaints(curve)]
        return asked + broken

    def _agreement(self) -> list[str]:
        if self.bound is None:
            return []
        worst = max(self.curves, key=lambda curve: curve.difference)
        word = "agree" if self.agree else "DISAGREE"
        return [
            f"{len(self.curves)} loss curves {word}: largest relative difference to {self.reference} "
            f"{worst.difference:.1e} ({worst.name}, step {worst.step}), allowed {self.bound:.1e}"
        ]

    def _falling(self) -> list[str]:
        if not self.must_fall:
            return []
        num_falling = sum(curve.falls for curve in self.curves)
        return [f"{num_falling} of {len(self.curves)} losses fall"]

    def _complaints(self, curve: Curve) -> list[str]:
        complaints: list[str] = []
        if self.bound is not None and not curve.difference <= self.bound:
            complaints.append(f"  {curve.name}: off by {curve.difference:.1e} at step {curve.step}")
        if self.must_fall and not curve.falls:
            complaints.append(f"  {curve.name}: its loss does not fall")
        return complaints


def judge_losses(
    losses: Mapping[str, Sequence[float]], *, bound: float | None, must_fall: bool = False
) -> Verdict:
    """Judge `losses`, which maps each curve's name to one loss per step; the first curve is the reference.

    Raises ValueError if there is no curve.
    """
    if not losses:
        raise ValueError("no loss curve to compare: no point of the sweep came to its end")
    reference = next(iter(losses))
    curves = [
        Curve(name, *_largest_difference(curve, losses[reference]), falls=loss_falls(curve))
        for name, curve in losses.items()
    ]
    return Verdict(reference, curves, bound, must_fall)


def numbers_first(curves: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """Return the curves in their order, last those with a loss that is no number: nothing is compared with one."""
    return dict(sorted(curves.items(), key=lambda item: not all(map(math.isfinite, item[1]))))


def largest_distance(curves: Mapping[str, Sequence[float]]) -> str:
    """Say how far the curves lie from the first, at most."""
    if len(curves) < 2:
        return "One curve has nothing to be compared with."
    verdict = judge_losses(curves, bound=math.inf)
    worst = max(verdict.curves, key=lambda curve: curve.difference)
    if worst.difference == 0:
        return f"All {len(curves)} curves are equal to the last bit."
    if math.isinf(worst.difference):
        return (
            f"{worst.name} has other steps than {verdict.reference}, or a loss that is no number."
        )
    return (
        f"Largest relative distance of {len(curves)} curves to that of {verdict.reference}: {worst.difference:.1e} "
        f"({worst.name}, step {worst.step})."
    )


def loss_falls(losses: Sequence[float]) -> bool:
    """Tell whether the mean of the last quarter is below that of the first; single steps are too noisy to compare."""
    quarter = max(1, len(losses) // 4)
    return len(losses) > 1 and fmean(losses[-quarter:]) < fmean(losses[:quarter])


def _largest_difference(curve: Sequence[float], reference: Sequence[float]) -> tuple[float, int]:
    if len(curve) != len(reference):
        return math.inf, min(len(curve), len(reference))
    differences = [_relative(a, b) for a, b in zip(curve, reference, strict=True)]
    worst = max(differences, default=math.inf)
    return worst, differences.index(worst) if differences else 0


def _relative(value: float, reference: float) -> float:
    if not (math.isfinite(value) and math.isfinite(reference)):
        return math.inf
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else math.inf
