"""Numbers that may not vary: bytes, counts and, where sums have one order, losses. Pure.

Repeats of one point must agree in them to the last bit. If they do not, something that nobody set differs between the
runs, and no comparison of them means anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeroexp.report.measured_points import Point
from zeroexp.report.reading import records_of
from zeroexp.tracking.run import Run

# Sums of these transports, or of their GPU, may change order from run to run.
INEXACT = ("nccl", "native")


def exact_numbers(run: Run) -> dict[str, Any]:
    """Return a run's exact numbers by name; empty for a run without results."""
    summary = run.summary
    if summary is None:
        return {}
    kinds = {f"{kind} bytes": ranks.per_rank for kind, ranks in summary.memory.by_kind.items()}
    sent = {f"{kind} bytes sent": number for kind, number in summary.sent_bytes_by_kind.items()}
    calls = {f"{kind} calls": number for kind, number in summary.calls_by_kind.items()}
    return {"parameters": summary.num_parameters, **kinds, **sent, **calls}


def lines_of_varied_numbers(point: Point) -> list[str]:
    """Return one line for each exact number that differs between the point's repeats."""
    first, *others = point.finished_runs or [point.run]
    lines: list[str] = []
    for other in others:
        lines += [
            f"{point.name}: {name} differ between {first.name} and {other.name}: {one} and {two}"
            for name, one, two in changed_numbers(exact_numbers(first), exact_numbers(other))
        ]
        lines += _losses(point, first, other)
    return lines


def changed_numbers(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (name, number, number) for each name whose numbers differ."""
    names = dict.fromkeys([*one, *two])
    return [
        (name, one.get(name), two.get(name)) for name in names if one.get(name) != two.get(name)
    ]


def first_different_loss(one: Sequence[float], two: Sequence[float]) -> int | None:
    """Return the first step whose losses differ in any bit; None if they are equal as far as both go."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((step for step, (a, b) in pairs if a != b and (a == a or b == b)), None)


def _losses(point: Point, first: Run, other: Run) -> list[str]:
    if first.engine.get("transport") in INEXACT or first.config.get("cluster.device") == "cuda":
        return []
    curves = [[record.loss for record in steps] for steps in (point.records, records_of(other))]
    step = first_different_loss(*curves)
    if step is None:
        return []
    said = f"{curves[0][step]!r} and {curves[1][step]!r}"
    return [f"{point.name}: losses of {first.name} and {other.name} part at step {step}: {said}"]
