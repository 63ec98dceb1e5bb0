"""The points of sweeps: runs of one configuration are one point, repeated, or with other seeds.

Repeats are numbered, and repeats of equal seed and number ran after one another: what disturbs one disturbs its
neighbours, so that times are compared within such a round. Losses are the same in every repeat, and are compared seed
by seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median

from zeroexp.config.keys import ENGINE_SETTINGS, Config
from zeroexp.measure.record import OFF_DEVICE, MemorySummary, RunSummary, StepRecord
from zeroexp.measure.summary import of_all
from zeroexp.report.reading import records_of
from zeroexp.tracking.run import Run, flatten

SEED = "train.seed"
# Keys of the config that say why or where a point ran, or are its replicates, not what it was.
OUTSIDE = ("study.", "tracking.", "outputs", "resume", "repeats", "checkpoint.", "events.", SEED)
# How long its job may take, who pays for it, and who waits.
LIMITS = ("timeout_s", "rehearse_s", "heartbeat_s", "start_s", "hang_s", "wait", "force", "requeue")
OF_JOBS = ("account", "partition", "qos", "max_running", "array", "max_requeues", "save_s", "ports")
HOUSEKEEPING = *(f"cluster.{key}" for key in LIMITS), *(f"cluster.slurm.{key}" for key in OF_JOBS)
OUTSIDE = (*OUTSIDE, *HOUSEKEEPING)
# Those of them that tell points apart where they differ between runs that are equal otherwise, in their seed too.
APART = ("resume", "checkpoint.", "events.", "tracking.", *HOUSEKEEPING)
UNIT_OF_NULL = ("strategy.unit", ENGINE_SETTINGS["unit"]["stands_for"])
MOMENT = "after_backward"  # gradients are reduced and the optimizer has not run: stages differ most
# Of a summary: what is pooled over seeds, and what over all runs of a point.
MEANS = ("final_loss", "validation_loss", "validation_accuracy")
MEDIANS = ("step_seconds_median", "step_seconds_p95", "tokens_per_second")
UNCOUNTED = "by TCP"  # the kind of all bytes of an engine that does not count them by kind


Round = tuple[int, int]  # seed, number of the repeat


@dataclass(frozen=True)
class MeasuredPoint:
    """One cell of a sweep; `name` tells it from all others of the report."""

    name: str
    runs: tuple[Run, ...]  # at least one, in the order in which they were started
    # The keys of APART that tell it from points of equal settings.
    apart: frozenset[str] = frozenset()

    @cached_property
    def run(self) -> Run:
        """The first run that came to its end, else the first."""
        return next(iter(self.finished_runs), self.runs[0])

    @property
    def sweep_folder(self) -> Path:
        return self.run.folder.parent

    @property
    def outer_every(self) -> int | None:
        """strategy.outer.every: replicas that are seldom synchronised train, by design, another model."""
        every = self.run.config.get("strategy.outer.every", "null")
        return None if every == "null" else int(every)

    @property
    def summary(self) -> RunSummary | None:
        """The summary of `run`: bytes at rest, bytes sent and losses are the same in every repeat, peaks nearly."""
        return self.run.summary

    @property
    def finished_runs(self) -> list[Run]:
        return [run for run in self.runs if run.summary]

    @property
    def median_run(self) -> Run:
        """The run whose step time is the median of the repeats, or the one below it: its parts belong together."""
        ordered = sorted(self.finished_runs, key=attrgetter("summary.step_seconds_median"))
        return ordered[(len(ordered) - 1) // 2] if ordered else self.run

    @property
    def seconds_by_round(self) -> dict[Round, float]:
        """Median step seconds of each run that came to its end; copies of runs have numbers behind all others."""
        seconds: dict[Round, float] = {}
        copies: list[tuple[int, float]] = []
        for index, run in enumerate(self.runs):
            if run.summary:
                each = seed_of(run), int(run.environment.get("repeat", index))
                if each in seconds:
                    copies.append((seed_of(run), run.summary.step_seconds_median))
                else:
                    seconds[each] = run.summary.step_seconds_median
        behind = 1 + max((number for _, number in seconds), default=0)
        for number, (seed, of_copy) in enumerate(copies, start=behind):
            seconds[seed, number] = of_copy
        return seconds

    @cached_property
    def of_seeds(self) -> dict[int, MeasuredPoint]:
        """The point by seed, with its runs of that seed alone."""
        runs: dict[int, list[Run]] = {}
        for run in self.runs:
            runs.setdefault(seed_of(run), []).append(run)
        return {
            seed: replace(self, runs=tuple(each)) if len(runs) > 1 else self
            for seed, each in runs.items()
        }

    @property
    def by_seed(self) -> dict[int, RunSummary]:
        """The results of the first finished run of each seed."""
        return {seed: each.summary for seed, each in self.of_seeds.items() if each.summary}

    @cached_property
    def records(self) -> list[StepRecord]:
        return records_of(self.run)

    @property
    def losses(self) -> dict[int, float]:
        """By step: a run that goes on from another one's checkpoint begins behind it."""
        return {record.step: record.loss for record in self.records}

    @property
    def held_bytes(self) -> dict[str, float]:
        """Bytes by kind of the fullest rank after backward, on its device."""
        held = self.summary.memory.fullest_at.get(MOMENT, {}) if self.summary else {}
        return {kind: num_bytes for kind, num_bytes in held.items() if kind not in OFF_DEVICE}

    @property
    def sent_bytes(self) -> dict[str, float]:
        """Bytes of a step by kind of message; where TCP carried more, the engine did not count and all is one kind."""
        if self.summary is None:
            return {}
        counted, wire = self.summary.sent_bytes_by_kind, self.summary.wire_bytes_per_step
        if wire and wire.fullest > 1.02 * sum(counted.values()):
            return {UNCOUNTED: wire.fullest}
        return dict(counted)

    @cached_property
    def pooled(self) -> Run:
        """`run` with the median of its runs in every time, the mean over seeds in every loss, and the largest peak.

        It diverged where one of them did.

        Its status is that of a repeat that did not come to its end, if there is one, else its reason that of a run that
        diverged.
        """
        run = self.run
        unlike = [other for other in self.runs if other.status != run.status]
        others = unlike or [each for each in self.finished_runs if each.reason]
        if others and len(self.runs) > 1:
            reason = others[0].reason or others[0].status
            reason = f"{len(others)} of {len(self.runs)} runs: {reason}"
            run = replace(run, status=others[0].status, reason=reason)
        summaries = [run.summary for run in self.finished_runs if run.summary]
        if len(summaries) < 2:
            return run
        seeds = list(self.by_seed.values())
        diverged = [s.diverged_at for s in summaries if s.diverged_at is not None]
        summary = replace(
            summaries[0],
            **{name: of_all([getattr(s, name) for s in seeds], fmean) for name in MEANS},
            **{name: median(getattr(s, name) for s in summaries) for name in MEDIANS},
            memory=max((s.memory for s in summaries), key=_peak),
            diverged_at=min(diverged) if diverged else None,
            phase_seconds_median={
                phase: median(s.phase_seconds_median.get(phase, 0.0) for s in summaries)
                for phase in summaries[0].phase_seconds_median
            },
        )
        return replace(run, summary=summary)


def _peak(memory: MemorySummary) -> float:
    return memory.peak.fullest if memory.peak else 0


def settings_of(run: Run, also: Collection[str] = ()) -> tuple[str, ...]:
    """Return the settings of what ran, and also these, that are no defaults: older runs lack keys of newer ones.

    That a unit is a block stands in the config of our engine's runs alone; torch's leave null, which means the same.
    """
    defaults = _defaults()
    return tuple(
        f"{key}={value}"
        for key, value in run.config.items()
        if key in also or not key.startswith(OUTSIDE)
        if value != defaults.get(key, "null") and (key, value) != UNIT_OF_NULL
    )


@cache
def _defaults() -> dict[str, str]:
    return flatten(asdict(Config()))


def points_of(runs: Sequence[Run]) -> list[MeasuredPoint]:
    """Group runs into points, in the order of their first runs; two sweeps have no point in common."""
    apart = _told_apart(runs)
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        settings = settings_of(run, apart[_cell(run)])
        groups.setdefault((str(run.folder.parent), *settings), []).append(run)
    folders = {run.folder.parent: run.sweep for run in runs}
    if len({*folders.values()}) < len(folders):  # before/compare and after/compare
        folders = {folder: str(folder) for folder in folders}
    sweeps = {folder: f"{name}/" if len(folders) > 1 else "" for folder, name in folders.items()}
    return [
        MeasuredPoint(
            f"{sweeps[group[0].folder.parent]}{_name(group)}",
            tuple(group),
            apart[_cell(group[0])],
        )
        for group in groups.values()
    ]


def by_sweep(points: Sequence[MeasuredPoint]) -> list[list[MeasuredPoint]]:
    sweeps: dict[Path, list[MeasuredPoint]] = {}
    for point in points:
        sweeps.setdefault(point.sweep_folder, []).append(point)
    return [*sweeps.values()]


def _cell(run: Run) -> tuple[str, ...]:
    return str(run.folder.parent), *settings_of(run)


def _told_apart(runs: Sequence[Run]) -> dict[tuple[str, ...], frozenset[str]]:
    """Return the keys of APART, by cell, in which runs of equal settings and seed differ."""
    alike: dict[tuple[tuple[str, ...], int], list[Run]] = {}
    for run in runs:
        alike.setdefault((_cell(run), seed_of(run)), []).append(run)
    found = {cell: frozenset[str]() for cell, _ in alike}
    for (cell, _), own in alike.items():
        keys = {key for run in own for key in run.config if key.startswith(APART)}
        found[cell] |= {key for key in keys if len({run.config.get(key) for run in own}) > 1}
    return found


def of_one_seed(points: Sequence[MeasuredPoint]) -> list[MeasuredPoint]:
    """Return the points with their runs of one seed, of which most have results; points without such runs are left out.

    Losses of two seeds are never alike.
    """
    seeds = Counter(seed for point in points for seed in point.by_seed)
    seeds = seeds or Counter(seed for point in points for seed in point.of_seeds)
    most = max(seeds, key=seeds.__getitem__, default=0)  # of equal ones the first
    return [point.of_seeds[most] for point in points if most in point.of_seeds]


def seed_of(run: Run) -> int:
    return int(run.config.get(SEED, 0))


def _name(runs: Sequence[Run]) -> str:
    """Return the name of the first run, without its seed where others have another one."""
    name, seed = runs[0].name, seed_of(runs[0])
    return name.replace(f"-seed{seed}", "") if {*map(seed_of, runs)} != {seed} else name


# ---- what tells points apart


def distinguishing_keys(runs: Sequence[Run]) -> list[str]:
    """Return the settings that differ between runs with equal strategy, implementation and world size.

    If the choice of a group (model, data) differs, it replaces all settings that follow from it.
    """
    alike: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        alike.setdefault((run.label, run.world_size), []).append(run)
    groups = list(alike.values())
    keys = dict.fromkeys(key for run in runs for key in run.config)
    differ = [key for key in keys if any(len({r.config.get(key) for r in g}) > 1 for g in groups)]
    return [
        key
        for key in differ
        if (choice := _choice(key)) == key
        or choice not in differ
        or not all(_follows(key, choice, group) for group in groups)
    ]


def _choice(key: str) -> str:
    """Return the key of the choice that sets this setting; the precision group sets a strategy's dtypes."""
    group = key.partition(".")[0]
    if group == "strategy" and key.endswith(".dtype"):
        group = "precision"
    return f"{group}.name"


def _follows(key: str, choice: str, runs: Sequence[Run]) -> bool:
    pairs = {(run.config.get(choice), run.config.get(key)) for run in runs}
    return len(pairs) == len({option for option, _ in pairs})
