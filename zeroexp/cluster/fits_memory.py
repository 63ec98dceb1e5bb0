"""What a point will hold and cost is shown before it is submitted to Slurm, and what can not fit is not submitted.

A rehearsal (plan/peak.py) tells the peak and the seconds of a step, and takes seconds itself. So none begins when a
sweep has spent cluster.rehearse_s on them: of the later points closed forms tell model states, and no seconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from zeroexp.check.sweep_points import Point
from zeroexp.config.keys import Config, UndefinedCombination
from zeroexp.tracking.out_of_memory import gib

# torch and transformers take seconds to import, and only Slurm's points are judged.
if TYPE_CHECKING:
    from zeroexp.plan.machines import Machines
    from zeroexp.plan.outcome import Outcome, RehearsedPeaks

Hours = tuple[float, float, float]  # least, expected, most


def plan_slurm_points(points: Sequence[Point]) -> list[Point]:
    """Print the plan of each point for Slurm; return all points, those that can not fit with the reason.

    A point can not fit if its peak exceeds cluster.device_memory_gib, or its model states where nothing was rehearsed.
    cluster.force=true submits it.
    """
    begun = time.monotonic()
    judged: list[Point] = []
    hours: list[Hours] = []
    speeds: dict[str, None] = {}
    for point in points:
        if point.config.cluster.kind != "slurm" or point.refusal:
            judged.append(point)
            continue
        rehearses = time.monotonic() - begun < point.config.cluster.rehearse_s
        planned = _plan(point, rehearses)
        if isinstance(planned, str):
            print(f"no plan of {point.name}: {planned}")
            judged.append(point)
            continue
        outcome, machines = planned
        print(f"plan of {point.name}: {_told(point.config, outcome, machines)}")
        no_room = outcome.verdict == "no" and not point.config.cluster.force
        judged.append(replace(point, refusal=_refusal(point.config, outcome)) if no_room else point)
        if outcome.rehearsed and not no_room:
            hours.append(_node_hours(point.config, outcome, machines))
            speeds[outcome.rehearsed.speed] = None
    if len(hours) > 1:
        print(f"plan of {len(hours)} points: {_hours_told(_sum(hours))}")
    if speeds:
        print(f"Node-hours are those of training steps, predicted ({'; '.join(speeds)}).")
    return judged


def _plan(point: Point, rehearses: bool) -> tuple[Outcome, Machines] | str:
    """Return what is planned of a point and for which machines, or why nothing is."""
    from zeroexp.plan.outcome import plan_point
    from zeroexp.plan.peak import with_rehearsal

    device = "cpu" if point.config.cluster.device == "cpu" else "cuda"
    try:
        planned = plan_point(point.config, None, device, point.name)
    except UndefinedCombination as error:
        return str(error)
    outcome, machines = planned.outcome, planned.machines
    if not rehearses:
        return outcome, machines
    try:
        return with_rehearsal(planned).outcome, machines
    # A rehearsal informs: what it can not do must not keep a job from its nodes.
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return replace(outcome, not_rehearsed=reason), machines


# -- what is said of it ----------------------------------------------------------------------------


def _told(config: Config, outcome: Outcome, machines: Machines) -> str:
    allowed = machines.shape.nodes * config.repeats * config.cluster.timeout_s / 3600
    parts = [
        f"model states {gib(outcome.total.fullest)}",
        f"timeout_s allows {allowed:,.3g} node-hours",
    ]
    if outcome.rehearsed:
        parts[0] += f", peak {_peak(outcome.rehearsed)}"
        parts.insert(1, _hours_told(_node_hours(config, outcome, machines)))
    if outcome.not_rehearsed:
        parts.append(f"not rehearsed: {outcome.not_rehearsed}")
    if outcome.verdict is not None:
        parts.append(f"fits {outcome.memory_gib:g} GiB: {outcome.verdict}")
    return "; ".join(parts)


def _peak(rehearsed: RehearsedPeaks) -> str:
    return f"{gib(rehearsed.fullest.num_bytes)} with activations"


def _node_hours(config: Config, outcome: Outcome, machines: Machines) -> Hours:
    """Return the hours of all steps of a point, in all its repeats, times its nodes."""
    assert outcome.rehearsed is not None
    steps = config.repeats * (config.train.warmup_steps + config.train.steps)
    least, expected, most = (
        machines.shape.nodes * steps * seconds / 3600 for seconds in outcome.rehearsed.step_seconds
    )
    return least, expected, most


def _sum(hours: Sequence[Hours]) -> Hours:
    least, expected, most = (sum(each) for each in zip(*hours, strict=True))
    return least, expected, most


def _hours_told(hours: Hours) -> str:
    least, expected, most = (f"{each:,.2g}" for each in hours)
    return f"{expected} node-hours ({least} to {most})"


def _refusal(config: Config, outcome: Outcome) -> str:
    cluster = config.cluster
    beside = (
        f" beside cluster.reserved_gib={cluster.reserved_gib:g}" if cluster.reserved_gib else ""
    )
    needed = (
        f"a rank holds {_peak(outcome.rehearsed)}"
        if outcome.rehearsed
        else f"model states take {gib(outcome.total.fullest)} of a rank"
    )
    return (
        f"cluster.device_memory_gib={cluster.device_memory_gib:g}: {needed}{beside}; "
        "use more ranks or a later stage (zeroexp plan --fit), or cluster.force=true"
    )
