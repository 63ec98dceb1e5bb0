"""What a point's ranks will hold is shown before it is submitted to Slurm, and what can not fit is not submitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zeroexp.cluster.points import Point
from zeroexp.config import Config, UndefinedCombination
from zeroexp.tracking.out_of_memory import gib


def plan_slurm_points(points: Sequence[Point]) -> list[Point]:
    """Print the plan of each point for Slurm; return all points, those that can not fit with the reason.

    A point can not fit if its model states alone exceed cluster.device_memory_gib. cluster.force=true submits it.
    """
    return [_plan_point(point) if _is_for_slurm(point) else point for point in points]


def _is_for_slurm(point: Point) -> bool:
    return point.config.cluster.kind == "slurm" and not point.refusal


def _plan_point(point: Point) -> Point:
    # torch and transformers take seconds to import, and only Slurm's points are judged.
    from zeroexp.plan.form_of_config import build_on_meta, form_of
    from zeroexp.plan.machines import machines_of
    from zeroexp.plan.outcome import outcome_of

    config = point.config
    machines = machines_of(config, "cpu" if config.cluster.device == "cpu" else "cuda")
    try:
        form = form_of(config, build_on_meta(config), machines.transport)
    except UndefinedCombination as error:
        print(f"no plan of {point.name}: {error}")
        return point
    outcome = outcome_of(point.name, config, form, machines)
    states, peak = gib(outcome.total.fullest), gib(outcome.peak.fullest)
    verdict = (
        "" if outcome.verdict is None else f"; fits {outcome.memory_gib:g} GiB: {outcome.verdict}"
    )
    print(f"plan of {point.name}: {states} of model states, peak {peak}{verdict}")
    if outcome.verdict != "no" or config.cluster.force:
        return point
    return replace(point, refusal=_refusal(config, states))


def _refusal(config: Config, states: str) -> str:
    cluster = config.cluster
    beside = (
        f" beside cluster.reserved_gib={cluster.reserved_gib:g}" if cluster.reserved_gib else ""
    )
    return (
        f"cluster.device_memory_gib={cluster.device_memory_gib:g}: model states take {states} of a "
        f"rank{beside}; use more ranks or a later stage (python -m zeroexp.plan), or cluster.force=true"
    )
