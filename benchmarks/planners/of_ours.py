"""`zeroexp plan`: model states in closed form, and the peak by a rehearsal."""

from __future__ import annotations

from benchmarks import published
from benchmarks.planners.point import NO_PEAK, Answer, Point
from benchmarks.planners.points import config_of
from zeroexp.plan.outcome import plan_point
from zeroexp.plan.peak import rehearse_point


def answer(point: Point) -> Answer:
    planned = plan_point(config_of(point), None, "cpu" if point.source == "cpu" else "cuda")
    states = published.total(planned.form, planned.form)
    if point.source == "published":  # which has no peak to compare with
        return states, NO_PEAK
    fullest = rehearse_point(planned).fullest
    return states, fullest.needed_bytes if point.reserved else fullest.num_bytes
