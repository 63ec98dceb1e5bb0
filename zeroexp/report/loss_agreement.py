"""Whether loss curves agree, and whether they fall.

Every point of a comparison has the same weights and the same global batches, so that loss curves differ only by
rounding. Their measure is the largest relative difference |loss − reference| / |reference| over all steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from zeroexp.report.measured_points import MeasuredPoint, by_sweep, of_one_seed

MUST_FALL, AGREEMENT = "study.loss_must_fall", "study.loss_agreement"


@dataclass(frozen=True)
class Curve:
    """One loss curve beside the reference."""

    point: str
    difference: float  # the largest relative one; inf if a step is missing or not finite
    step: int  # at which it is largest
    falls: bool
    # Whether it lies within the bound, which one that is apart never does; None without a bound.
    agrees: bool | None
    is_apart: bool = False  # by design not equal to the reference: its distance is no verdict


@dataclass(frozen=True)
class LossVerdict:
    reference: str
    bound: float | None  # None: agreement is not required
    must_fall: bool
    curves: list[Curve]

    @property
    def off(self) -> list[Curve]:
        """The curves that break the bound, the farthest first."""
        off = [curve for curve in self.compared if curve.agrees is False]
        return sorted(off, key=lambda curve: -curve.difference)

    @property
    def compared(self) -> list[Curve]:
        """The curves that are meant to be equal; of seldom synchronised replicas no equality is claimed."""
        return [curve for curve in self.curves if not curve.is_apart]

    @property
    def _worst(self) -> Curve:
        return max(self.compared or self.curves, key=lambda curve: curve.difference)

    @property
    def distance(self) -> tuple[str, str] | None:
        """Return in a word, and where, how far the curves lie from the first at most; None for one alone."""
        worst, number = self._worst, len(self.compared)
        if number < 2:
            return None
        if worst.difference == 0:
            return "equal", f"all {number} curves, to the last bit"
        if math.isinf(worst.difference):
            return "not alike", f"{worst.point} from step {worst.step} on"
        where = f"{worst.point} at step {worst.step}, relative, the most of {number} curves"
        return f"{worst.difference:.1e} apart", where

    @property
    def agreement(self) -> str | None:
        """The sentence about the bound, and which curves break it; None without one."""
        if self.bound is None:
            return None
        if not self.off and len(self.compared) == 1:
            return "1 loss curve, and no other one to compare it with"
        agree, worst = "DISAGREE" if self.off else "agree", self._worst
        others = [f"{each.point} {each.difference:.1e} (step {each.step})" for each in self.off[1:]]
        off = f"; off too: {', '.join(others)}" if others else ""
        return (
            f"{len(self.compared)} loss curves {agree}: largest relative difference to {self.reference} "
            f"{worst.difference:.1e} ({worst.point}, step {worst.step}), allowed {self.bound:.1e}{off}"
        )

    @property
    def fall(self) -> str | None:
        """The sentence about how many fall, and which do not; None where they need not."""
        rising = [curve.point for curve in self.curves if not curve.falls]
        text = f"{len(self.curves) - len(rising)} of {len(self.curves)} losses fall"
        text += f", and not {', '.join(rising)}" if rising else ""
        return text if self.must_fall else None


def asks_of_losses(points: Sequence[MeasuredPoint]) -> bool:
    """Tell whether the study of the first point asks that losses agree, or fall."""
    study = points[0].run.config
    return study.get(AGREEMENT, "null") != "null" or study.get(MUST_FALL) == "true"


def losses_of(points: Sequence[MeasuredPoint]) -> LossVerdict | None:
    """Judge the curves of runs that came to their end by the first point's study.loss_agreement and loss_must_fall.

    None where there is no such curve.
    """
    if not (recorded := [p for p in in_order_of_losses(points) if p.summary]):
        return None
    study = points[0].run.config
    agreement, must_fall = study.get(AGREEMENT, "null"), study.get(MUST_FALL) == "true"
    bound = None if agreement == "null" else float(agreement)
    curves = {point.name: point.losses for point in recorded}
    apart = [point.name for point in recorded if point.outer_every]
    return judge_losses(curves, apart, bound=bound, must_fall=must_fall)


def losses_of_sweeps(points: Sequence[MeasuredPoint]) -> LossVerdict | None:
    """Judge the curves of several sweeps, all beside the first where they ask for one bound (examples/tune.py).

    Else each sweep by its own study and beside its own first; the rest is of the first sweep then.
    """
    if len({point.run.config.get(AGREEMENT, "null") for point in points}) <= 1:
        return losses_of(points)
    verdicts = [verdict for own in by_sweep(points) if (verdict := losses_of(own))]
    curves = [curve for verdict in verdicts for curve in verdict.curves]
    return replace(verdicts[0], curves=curves) if verdicts else None


def judge_losses(
    curves: Mapping[str, Mapping[int, float]],
    apart: Collection[str] = (),
    *,
    bound: float | None,
    must_fall: bool = False,
) -> LossVerdict:
    """Judge curves, losses by step by the name of their point, beside the first one, from where both begin.

    apart: those that are by design not equal (strategy.outer).
    """
    reference, first = next(iter(curves.items()))
    judged = [
        _judge_curve(name, curve, first, bound, is_apart=name in apart)
        for name, curve in curves.items()
    ]
    return LossVerdict(reference, bound, must_fall, judged)


def in_order_of_losses(points: Sequence[MeasuredPoint]) -> list[MeasuredPoint]:
    """Return the points with losses of one seed (`of_one_seed`), in their order but for those nothing is compared with.

    Behind the others stand those with a loss that is no number, and last seldom synchronised replicas.
    """
    return sorted(
        (point for point in of_one_seed(points) if point.losses),
        key=lambda p: (p.outer_every is not None, not all(map(math.isfinite, p.losses.values()))),
    )


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


def _judge_curve(
    name: str,
    curve: Mapping[int, float],
    reference: Mapping[int, float],
    bound: float | None,
    *,
    is_apart: bool,
) -> Curve:
    steps = range(max(min(curve), min(reference)), max(*curve, *reference) + 1)
    losses = ([of.get(step, math.nan) for of in (curve, reference)] for step in steps)
    distances = [relative_distance(*each) for each in losses]
    worst = max(distances)
    step = steps[distances.index(worst)]
    agrees = None if bound is None else not is_apart and worst <= bound
    return Curve(name, worst, step, loss_falls([*curve.values()]), agrees, is_apart)
