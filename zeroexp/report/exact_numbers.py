"""Numbers that must be equal to the last bit: between repeats of a point, and beside the sweep before a change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zeroexp.measure.record import RunSummary
from zeroexp.report.measured_points import MeasuredPoint, seed_of
from zeroexp.report.reading import records_of
from zeroexp.tracking.run import Run

# Sums of these transports, or of their GPU, may change order from run to run.
INEXACT = ("nccl", "native")
PEAK_NOISE = 0.001  # of a peak


def lines_of_varied_numbers(point: MeasuredPoint) -> list[str]:
    """Return one line for each exact number that differs between the point's repeats.

    If one does, something that nobody set differs between the runs, and no comparison of them means anything. Losses
    are those of the same seed, where sums have one order.
    """
    first, *others = point.finished_runs or [point.run]
    has_one_order = (
        first.engine.get("transport") not in INEXACT
        and first.config.get("cluster.device") != "cuda"
    )
    lines: list[str] = []
    for other in others:
        changes = [(first, change) for change in changed_numbers(first, other)]
        if has_one_order:
            mate = point.of_seeds[seed_of(other)].run
            curves = ({each.step: each.loss for each in records_of(run)} for run in (mate, other))
            changes += [(mate, change) for change in changed_losses(*curves)]
        lines += [f"{point.name}: {change} ({one.name}, {other.name})" for one, change in changes]
    return lines


def changed_numbers(one: Run, two: Run) -> list[str]:
    """Say which exact numbers of two runs differ; traffic, a mean over steps, is of as many in both or not compared."""
    if not (one.summary and two.summary):
        return []
    first, second = _exact_numbers(one.summary), _exact_numbers(two.summary)
    # Of what a run that was resumed measured less often, as an outer step in several.
    differ = one.summary.num_steps != two.summary.num_steps
    means = ("bytes sent", "calls") if differ else ()
    names = [name for name in {**first, **second} if not name.endswith(means)]
    pairs = {name: (first.get(name), second.get(name)) for name in names}
    return [f"{name}: {a} and {b}" for name, (a, b) in pairs.items() if a != b]


def _exact_numbers(summary: RunSummary) -> dict[str, Any]:
    kinds = {f"{kind} bytes": ranks.per_rank for kind, ranks in summary.memory.by_kind.items()}
    sent = {f"{kind} bytes sent": number for kind, number in summary.sent_bytes_by_kind.items()}
    calls = {f"{kind} calls": number for kind, number in summary.calls_by_kind.items()}
    return {"parameters": summary.num_parameters, **kinds, **sent, **calls}


def changed_peaks(before: Run, after: Run) -> list[str]:
    """Say which peaks of the fullest rank moved; a thread of the backend may let go a little later in one run."""
    if not (before.summary and after.summary):
        return []
    memory = before.summary.memory, after.summary.memory
    peaks = {"peak": "peak bytes", "build_peak": "peak bytes of building", "host_peak": "host peak"}
    lines: list[str] = []
    for key, name in peaks.items():
        one, two = (getattr(each, key) for each in memory)
        if one and two and abs(two.fullest - one.fullest) > PEAK_NOISE * one.fullest:
            lines.append(f"{name}: {one.fullest:.0f} and {two.fullest:.0f}")
    return lines


def changed_losses(one: Mapping[int, float], two: Mapping[int, float]) -> list[str]:
    """Say at which step losses differ in any bit; nothing where they are equal as far as both go."""
    for step, a, b in ((step, one[step], two[step]) for step in one if step in two):
        if a != b and not (math.isnan(a) and math.isnan(b)):
            return [f"losses part at step {step}: {a!r} and {b!r}"]
    return []
