"""Pure functions: where the seconds of one rank's steps went, and the same read back from JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from statistics import fmean
from typing import Any

from zeroexp.measure.record import RankTimes, StepRecord, VerbSeconds


def rank_times(rank: int, steps: Sequence[StepRecord], records: Sequence[StepRecord]) -> RankTimes:
    """Return the means over the measured `steps`; a verb or phase that a step lacks counts as nothing there.

    records: all steps, of which traced ones show what torch names itself.
    """
    seen = [record.backend for record in records if record.backend]
    verbs = dict.fromkeys(verb for step in steps for verb in step.verbs)
    return RankTimes(
        rank=rank,
        step_seconds=fmean(step.step_seconds for step in steps),
        phase_seconds=_means([step.phase_seconds for step in steps]),
        verbs={verb: _mean([step.verbs.get(verb) for step in steps]) for verb in verbs},
        waited_seconds=_means([step.waited_seconds for step in steps]),
        backend=seen[-1] if seen else {},
    )


def times_from_json(content: dict[str, Any]) -> RankTimes:
    """Return the times that `asdict` turned into JSON."""
    values: dict[str, Any] = {**content}
    values["verbs"] = verbs_from_json(content["verbs"])
    values["backend"] = verbs_from_json(content.get("backend") or {})
    return RankTimes(**values)


def verbs_from_json(content: dict[str, dict[str, float]]) -> dict[str, VerbSeconds]:
    return {verb: VerbSeconds(**seconds) for verb, seconds in content.items()}


def _mean(verbs: Sequence[VerbSeconds | None]) -> VerbSeconds:
    present = [verb or VerbSeconds() for verb in verbs]
    names = [each.name for each in fields(VerbSeconds)]
    return VerbSeconds(**{name: fmean(getattr(verb, name) for verb in present) for name in names})


def _means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: fmean(row.get(key, 0.0) for row in rows) for key in keys}
