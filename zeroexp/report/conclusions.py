"""What a report concludes of its points: verdicts over runs, doubts, broken claims, and what else differs.

what                      beside                         equal means
bytes, counts, losses     repeats; the sweep before      every bit
step times                the reference, a sweep before  an interval over runs (statistics.py)
what a study wants equal  all points                     one value
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zeroexp.config.keys import ConfigError
from zeroexp.report.claims import Claim, claims_of, is_proof, lines_of
from zeroexp.report.measured_points import (
    OUTSIDE,
    MeasuredPoint,
    Round,
    by_sweep,
    distinguishing_keys,
    of_one_seed,
    seed_of,
    settings_of,
)
from zeroexp.report.reading import records_of
from zeroexp.report.statistics import (
    AGAIN,
    Comparison,
    Quality,
    TimeVerdict,
    compare_quality,
    compare_step_times,
    why_doubtful,
)
from zeroexp.tracking.run import Run

ONCE = "Step times are of one run each; repeats=5 would tell which differences are real."
MOST_DOUBTS = 3  # points in doubt that are all named
PEAK_NOISE = 0.001  # of a peak
MOST_CHANGES = 3  # exact numbers of one point that are listed; the rest are counted
# Sums of these transports, or of their GPU, may change order from run to run.
INEXACT = ("nccl", "native")
# The choice of a strategy is what is compared, with all that follows from its name.
COMPARED = (
    *("strategy.name", "strategy.implementation", "world_size"),
    *(f"strategy.{row}.placement" for row in ("parameters", "gradients", "optimizer")),
)
METRICS = {
    "Accuracy on validation samples": "validation_accuracy",
    "Loss on validation samples": "validation_loss",
    "Loss of the last step": "final_loss",
}
MACHINE = ("host", "device", "machine.")
BUSY = 0.25  # cores: less use by others counts as none
ABSENT, DEFAULT = "not set", "its own default"
# Values that only tell which of the compared engines ran, or are other files' business.
QUIET = ("engine.engine", "engine.page_bytes", "cluster.name")


# ---- exact numbers beside repeats, and beside the sweep before a change


def exact_numbers(run: Run) -> dict[str, Any]:
    """Return the numbers that may not vary, by name; empty for a run without results."""
    summary = run.summary
    if summary is None:
        return {}
    kinds = {f"{kind} bytes": ranks.per_rank for kind, ranks in summary.memory.by_kind.items()}
    sent = {f"{kind} bytes sent": number for kind, number in summary.sent_bytes_by_kind.items()}
    calls = {f"{kind} calls": number for kind, number in summary.calls_by_kind.items()}
    return {"parameters": summary.num_parameters, **kinds, **sent, **calls}


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
        changes = [(first, change) for change in _changed_numbers(first, other)]
        if has_one_order:
            mate = point.of_seeds[seed_of(other)].run
            curves = ({each.step: each.loss for each in records_of(run)} for run in (mate, other))
            changes += [(mate, change) for change in _changed_losses(*curves)]
        lines += [f"{point.name}: {change} ({one.name}, {other.name})" for one, change in changes]
    return lines


def _changed_numbers(one: Run, two: Run) -> list[str]:
    """Say which exact numbers of two runs differ; traffic, a mean over steps, is of as many in both or not compared."""
    if not (one.summary and two.summary):
        return []
    first, second = exact_numbers(one), exact_numbers(two)
    # Of what a run that was resumed measured less often, as an outer step in several.
    differ = one.summary.num_steps != two.summary.num_steps
    means = ("bytes sent", "calls") if differ else ()
    names = [name for name in {**first, **second} if not name.endswith(means)]
    pairs = {name: (first.get(name), second.get(name)) for name in names}
    return [f"{name}: {a} and {b}" for name, (a, b) in pairs.items() if a != b]


def _changed_peaks(before: Run, after: Run) -> list[str]:
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


def _changed_losses(one: Mapping[int, float], two: Mapping[int, float]) -> list[str]:
    """Say at which step losses differ in any bit; nothing where they are equal as far as both go."""
    for step, a, b in ((step, one[step], two[step]) for step in one if step in two):
        if a != b and not (math.isnan(a) and math.isnan(b)):
            return [f"losses part at step {step}: {a!r} and {b!r}"]
    return []


# ---- step times beside a reference


def compare_points(
    points: Sequence[MeasuredPoint], reference: str | None = None
) -> tuple[MeasuredPoint | None, dict[str, Comparison]]:
    """Return the reference, by default the first point with a time, and every other one beside it, by name.

    Raises ConfigError if no point has the reference's name.
    """
    timed = [point for point in points if point.seconds_by_round]
    chosen = _named(timed, reference) if reference else next(iter(timed), None)
    if chosen is None:
        return None, {}
    mine, others = chosen.seconds_by_round, [point for point in timed if point is not chosen]
    compared = {
        point.name: compare_step_times(point.seconds_by_round, mine, num_comparisons=len(others))
        for point in others
    }
    return chosen, {name: comparison for name, comparison in compared.items() if comparison}


def _named(points: Sequence[MeasuredPoint], name: str) -> MeasuredPoint:
    for point in points:
        if name in (point.name, point.run.name):
            return point
    names = ", ".join(point.run.name for point in points)
    raise ConfigError(f"--reference {name}: no such point with a time; use one of {names}")


# ---- two sweeps, before and after a change


@dataclass(frozen=True)
class Moved:
    """One point beside itself before a change."""

    name: str
    comparison: Comparison | None  # None where a round of both is missing
    changes: list[str]  # exact numbers that changed, in words: before and after

    @property
    def has_moved(self) -> bool:
        verdict = self.comparison and self.comparison.verdict
        return bool(self.changes) or verdict in (TimeVerdict.FASTER, TimeVerdict.SLOWER)

    @property
    def time(self) -> str:
        return self.comparison.text if self.comparison else "no time to compare"


def points_that_moved(
    before: Sequence[MeasuredPoint], after: Sequence[MeasuredPoint]
) -> tuple[list[Moved], list[str]]:
    """Return each point that both sweeps have, by its configuration, and a line for each that only one has.

    Times are taken over those of a point that the change left alone, in the same round of the same sweep: what the
    machine did between the sweeps is no change of ours. That is the first point of PyTorch's own, if both have one, and
    a time of it.
    """
    apart = {key for point in (*before, *after) for key in point.apart}
    old = {settings_of(point.run, apart): point for point in before}
    new = {settings_of(point.run, apart): point for point in after}
    both = [key for key in new if key in old]
    steady = next(
        (
            key
            for key in both
            if new[key].run.implementation == "torch"
            and old[key].seconds_by_round.keys() & new[key].seconds_by_round.keys()
        ),
        None,
    )
    unchanged = (old[steady], new[steady]) if steady else None
    pairs = [_moved(old[key], new[key], unchanged, len(both)) for key in both]
    return pairs, _without_partner(
        {point.name: key for key, point in old.items() if key not in new},
        {point.name: key for key, point in new.items() if key not in old},
    )


def _without_partner(
    before: Mapping[str, Sequence[str]], after: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return a line for each point, named with its settings, that only one sweep has, or both with other settings."""
    lines: list[str] = []
    for name, settings in before.items():
        if name in after:
            was, now = (
                " ".join(each for each in one if each not in other) or "defaults"
                for one, other in ((settings, after[name]), (after[name], settings))
            )
            lines.append(f"  no pair: {name} has {was} before, {now} after")
        else:
            lines.append(f"  only before: {name}")
    return [*lines, *(f"  only after: {name}" for name in after if name not in before)]


def lines_of_moved(pairs: Sequence[Moved], alone: Sequence[str]) -> list[str]:
    """Return the moved points first, then how many did not move, then what has no partner."""
    movers = [one for one in pairs if one.has_moved]
    still = [one for one in pairs if not one.has_moved]
    lines = [f"{len(movers)} of {len(pairs)} points moved (after over before):"]
    for one in movers:
        shown, hidden = one.changes[:MOST_CHANGES], len(one.changes) - MOST_CHANGES
        lines.append(f"  {one.name}: step {one.time}")
        lines += [f"    {change}" for change in shown]
        lines += [f"    and {hidden} more"] if hidden > 0 else []
    if still:
        number = "1 point has" if len(still) == 1 else f"{len(still)} points have"
        lines.append(
            f"{number} equal bytes and counts, and losses of equal seeds; of the step time:"
        )
    return [*lines, *_aligned({one.name: one.time for one in still}), *alone]


def _aligned(texts: Mapping[str, str]) -> list[str]:
    width = max(map(len, texts), default=0)
    return [f"  {name:<{width}}  {text}" for name, text in texts.items()]


def _moved(
    old: MeasuredPoint,
    new: MeasuredPoint,
    unchanged: tuple[MeasuredPoint, MeasuredPoint] | None,
    number: int,
) -> Moved:
    changes = [*_changed_numbers(old.run, new.run), *_changed_peaks(old.run, new.run)]
    ended = bool(old.run.summary), bool(new.run.summary)
    if not all(ended) and any(ended):
        changes.append(f"did not come to its end {'after' if ended[0] else 'before'}")
    curves = [point.losses for point in of_one_seed([old, new])]
    if len(curves) == 2:
        changes += _changed_losses(*curves)
        one, two = (max(curve, default=-1) + 1 for curve in curves)
        changes += [f"steps: {one} and {two}"] if one != two else []
    before, after = old.seconds_by_round, new.seconds_by_round
    if unchanged and new is not unchanged[1]:
        before, after = _over(before, unchanged[0]), _over(after, unchanged[1])
    time = compare_step_times(after, before, num_comparisons=number)
    return Moved(new.name, time, changes)


def _over(seconds: Mapping[Round, float], unchanged: MeasuredPoint) -> dict[Round, float]:
    """Return the seconds over those of the unchanged point in the same round."""
    other = unchanged.seconds_by_round
    return {number: each / other[number] for number, each in seconds.items() if number in other}


# ---- what differs beside the thing that is compared: precision, batch, versions, machine, load


def facts_of_run(run: Run) -> dict[str, str]:
    """Return everything that may make a run's numbers differ from another's, by dotted key."""
    facts = {
        key: DEFAULT if value == "null" else value
        for key, value in run.config.items()
        if not key.startswith(OUTSIDE)
    }
    facts |= {f"engine.{key}": value for key, value in run.engine.items() if value != "null"}
    for key, value in run.environment.items():
        if key.startswith(MACHINE):
            facts[key if key.startswith("machine.") else f"machine.{key}"] = value
    facts |= {k: v for k, v in run.environment.items() if k.startswith(("versions.", "git."))}
    if run.other_cores is not None:
        busy = run.other_cores >= BUSY
        facts["load"] = f"{run.other_cores:.1f} cores used by others" if busy else "none by others"
    return facts


def differences(points: Sequence[MeasuredPoint]) -> dict[str, dict[str, list[str]]]:
    """Return key -> value -> names of the points that have it, for each fact that is not what is compared.

    Left out is also what belongs to a group whose choice is compared, as model.hf_config.n_layer to model.name.
    """
    swept = {*distinguishing_keys([point.run for point in points])}
    return {
        key: values
        for key, values in _differing_facts(points).items()
        if key not in {*COMPARED, *swept}
        and f"{key.partition('.')[0]}.name" not in swept - {*COMPARED}
    }


def lines_of_broken_must_equal(
    points: Sequence[MeasuredPoint], must_equal: Iterable[str]
) -> list[str]:
    """Return one line for each fact that a study wants equal and that differs, also where it was swept."""
    wanted = tuple("engine.transport" if word == "transport" else word for word in must_equal)
    return [
        f"{key} differs: {describe_values(values)}"
        for key, values in _differing_facts(points).items()
        if any(key == word or key.startswith(f"{word}.") for word in wanted)
    ]


def describe_values(values: Mapping[str, Sequence[str]]) -> str:
    """Say which points have which value; the value of most points comes first and names nobody."""
    most, *rest = sorted(values.items(), key=lambda item: -len(item[1]))
    others = "; ".join(f"{value} in {', '.join(names)}" for value, names in rest)
    return f"{most[0]}, but {others}" if others else most[0]


def _differing_facts(points: Sequence[MeasuredPoint]) -> dict[str, dict[str, list[str]]]:
    facts = [(point.name, facts_of_run(run)) for point in points for run in point.finished_runs]
    keys = dict.fromkeys(key for _, one in facts for key in one if key not in QUIET)
    by_key: dict[str, dict[str, list[str]]] = {}
    for key in keys:
        # A dictionary in place of a set, which keeps the order of the points.
        names: dict[str, dict[str, None]] = {}
        for name, one in facts:
            names.setdefault(one.get(key, ABSENT), {})[name] = None
        if len(names) > 1:
            by_key[key] = {value: list(who) for value, who in names.items()}
    return by_key


# ---- what is said of all this


@dataclass(frozen=True)
class Conclusions:
    reference: MeasuredPoint | None
    comparisons: dict[str, Comparison]  # of each other point beside it
    doubts: list[str]  # times that are in doubt
    # Exact numbers that vary, what a study wants equal and differs, and claims that do not hold.
    broken: list[str]
    qualities: list[Quality]  # of each point over seeds; empty where none has several
    claims: list[Claim]
    claim_lines: list[str]  # of a study with plan_must_hold, and of each of several sweeps

    @property
    def verdicts(self) -> list[str]:
        """One line for each point beside the reference; a single line where no point ran twice."""
        compared = self.comparisons
        if self.reference is None or not compared:
            return self._quality_lines
        if all(comparison.num_pairs == 1 for comparison in compared.values()):
            return [ONCE, *self._quality_lines]
        return [
            f"Step time over that of {self.reference.name}, over runs, 95 % for all together:",
            *_aligned({name: comparison.text for name, comparison in compared.items()}),
            *self._quality_lines,
        ]

    @property
    def _quality_lines(self) -> list[str]:
        """One line for each point of several seeds: what it reached, and whether the reference did as well."""
        if not self.qualities:
            return []
        metric = self.qualities[0].metric
        head = f"{metric}: mean and deviation over seeds, beside the reference's by seed:"
        return [head, *_aligned({one.name: one.text for one in self.qualities})]


def conclude(points: Sequence[MeasuredPoint], reference: str | None = None) -> Conclusions:
    """Raises ConfigError if no point has the reference's name."""
    chosen, compared = compare_points(points, reference)
    broken = [line for point in points for line in lines_of_varied_numbers(point)]
    claims, lines = list[Claim](), list[str]()
    for own in by_sweep(points):  # a study speaks of its own points
        studies = [json.loads(point.run.config.get("study.must_equal", "[]")) for point in own]
        must_equal = dict.fromkeys(word for words in studies for word in words)
        broken += [f"study.must_equal: {x}" for x in lines_of_broken_must_equal(own, must_equal)]
        sweep, _, _ = own[0].name.rpartition("/")  # of several each has its name
        found = [replace(claim, sweep=sweep or None) for claim in claims_of(own)]
        claims += found
        told = lines_of(found) if is_proof(own) else []
        if sweep and (told := told or [f"  {claim.line}" for claim in found if claim.holds]):
            told = [f"{sweep}:", *told]
        lines += told
        named = f"{sweep}: " if sweep else ""
        broken += [f"{named}{claim.line}" for claim in found if not claim.holds]
    qualities = _qualities(points, chosen)
    return Conclusions(chosen, compared, _doubts(points), broken, qualities, claims, lines)


def _qualities(points: Sequence[MeasuredPoint], reference: MeasuredPoint | None) -> list[Quality]:
    """Return what points reached over seeds, in the strictest measure that all of them have."""
    seeds = {point.name: point.by_seed for point in points if point.by_seed}
    if reference is None or all(len(each) < 2 for each in seeds.values()):
        return []
    metric, key = next(
        (metric, key)
        for metric, key in METRICS.items()
        if all(getattr(s, key) is not None for each in seeds.values() for s in each.values())
    )
    values = {
        name: {seed: getattr(summary, key) for seed, summary in sorted(each.items())}
        for name, each in seeds.items()
    }
    mine = values[reference.name]
    return [
        compare_quality(
            name, metric, each, mine if name != reference.name else None, len(values) - 1
        )
        for name, each in values.items()
    ]


def _doubts(points: Sequence[MeasuredPoint]) -> list[str]:
    """Say which times others spoilt, or scatter (of many the first), and which runs ran again for that."""
    doubtful = [f"{point.name} ({why})" for point in points if (why := why_doubtful(point))]
    again = [(point.name, sum(AGAIN in run.environment for run in point.runs)) for point in points]
    again = [f"{name} ({number})" for name, number in again if number]
    lines: list[str] = []
    if doubtful:
        who = ", ".join(doubtful)
        if len(doubtful) > MOST_DOUBTS:
            timed = sum(bool(point.seconds_by_round) for point in points)
            who = f"{len(doubtful)} of {timed} points, as of {doubtful[0]}"
        told = "run them again by themselves"
        lines.append(f"In doubt, and marked with ?, are the times of {who}: {told}.")
    if again:
        told = "Run again at the end, once, since their times were in doubt, are runs of"
        lines.append(f"{told} {', '.join(again)}.")
    return lines
