"""What a point will hold and cost is shown before it is submitted to Slurm, and what can not fit is not run.

A rehearsal (plan/peak.py) tells the peak and the seconds of a step, and takes seconds itself. So none begins when a
sweep has spent cluster.rehearse_s on them: of the later points closed forms tell model states, and no seconds.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from zeroexp.check.sweep_points import SweepPoint
from zeroexp.config.keys import Config, UndefinedCombination
from zeroexp.tracking.out_of_memory import gib

# torch and transformers take seconds to import, and few points are judged.
if TYPE_CHECKING:
    from zeroexp.plan.outcome import PlannedPoint, RehearsedPeaks


def plan_slurm_points(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """Print the plan of each point for Slurm; return all points, those that can not fit with the reason.

    A point can not fit if its peak exceeds cluster.device_memory_gib, or its model states where nothing was rehearsed.
    cluster.force=true submits it.
    """
    begun = time.monotonic()
    judged: list[SweepPoint] = []
    for point in points:
        if point.config.cluster.kind == "slurm" and not point.refusal:
            rehearses = time.monotonic() - begun < point.config.cluster.rehearse_s
            point = replace(point, refusal=_refusal(point, rehearses))
        judged.append(point)
    return judged


def _refusal(point: SweepPoint, rehearses: bool) -> str | None:
    """Print the point's plan; return why it can not fit, or None."""
    planned = _plan(point, rehearses)
    if isinstance(planned, str):
        print(f"no plan of {point.name}: {planned}")
        return None
    print(f"plan of {point.name}: {_describe(planned)}")
    outcome, cluster = planned.outcome, point.config.cluster
    if outcome.verdict != "no" or cluster.force:
        return None
    needed = f"model states take {gib(outcome.total.fullest)} of a rank"
    if outcome.rehearsed:
        needed = f"a rank holds {_peak(outcome.rehearsed)}"
    if cluster.reserved_gib:
        needed += f" beside cluster.reserved_gib={cluster.reserved_gib:g}"
    named = f"cluster.gpu={cluster.gpu}"
    if (limit := cluster.device_memory_gib) is not None:
        named = f"cluster.device_memory_gib={limit:g}"
    remedy = "use more ranks or a later stage (zeroexp plan --fit), or cluster.force=true"
    return f"{named}: {needed}; {remedy}"


def refuse_full_disks(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """Return all points, those with a reason whose files (strategy.offload_folder) this machine's disk can not take."""
    return [replace(point, refusal=point.refusal or _full_disk(point)) for point in points]


def _full_disk(point: SweepPoint) -> str | None:
    folder = point.config.strategy.offload_folder
    if folder is None or point.config.cluster.kind == "slurm":
        return None
    from zeroexp.plan.outcome import plan_point

    files = plan_point(point.config, None, "cpu").outcome.files
    needed, free = sum(files.per_rank) if files else 0, shutil.disk_usage(folder).free
    if needed <= free:
        return None
    problem = f"{gib(free)} are free, and the files of all ranks take {gib(needed)}"
    return f"strategy.offload_folder={folder}: {problem}; use a disk with more room"


def _plan(point: SweepPoint, rehearses: bool) -> PlannedPoint | str:
    """Return the point's plan, or why there is none."""
    from zeroexp.plan.outcome import plan_point
    from zeroexp.plan.peak import with_rehearsal

    device = "cpu" if point.config.cluster.device == "cpu" else "cuda"
    try:
        planned = plan_point(point.config, None, device, point.name)
    except UndefinedCombination as error:
        return str(error)
    try:
        return with_rehearsal(planned) if rehearses else planned
    # A rehearsal informs: what it can not do must not keep a job from its nodes.
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return planned._replace(outcome=replace(planned.outcome, not_rehearsed=reason))


def _describe(planned: PlannedPoint) -> str:
    config, outcome, nodes = planned.config, planned.outcome, planned.machines.shape.nodes
    allowed = nodes * config.repeats * config.cluster.timeout_s / 3600
    parts = [
        f"model states {gib(outcome.total.fullest)}",
        f"timeout_s allows {allowed:,.3g} node-hours",
    ]
    if outcome.rehearsed:
        parts[0] += f", peak {_peak(outcome.rehearsed)}"
        parts.insert(1, _node_hours(config, outcome.rehearsed, nodes))
    if outcome.not_rehearsed:
        parts.append(f"not rehearsed: {outcome.not_rehearsed}")
    if outcome.verdict is not None:
        parts.append(f"fits {outcome.memory_gib:g} GiB: {outcome.verdict}")
    return "; ".join(parts)


def _peak(rehearsed: RehearsedPeaks) -> str:
    peak = rehearsed.fullest
    reserved = "" if peak.reserved_bytes is None else f", {gib(peak.reserved_bytes)} reserved"
    return f"{gib(peak.num_bytes)} with activations{reserved}"


def _node_hours(config: Config, rehearsed: RehearsedPeaks, nodes: int) -> str:
    """Return the hours of all steps of a point, in all its repeats, times its nodes; and whose speed that is."""
    steps = config.repeats * (config.train.warmup_steps + config.train.steps)
    hours = (nodes * steps * seconds / 3600 for seconds in rehearsed.step_seconds)
    least, expected, most = (f"{each:,.2g}" for each in hours)
    return f"{expected} node-hours ({least} to {most}; {rehearsed.speed})"
