"""`--advise`: which strategy on these ranks, and how fast: the fastest that fits of all that do the same work.

Compared are every stage, with and without recomputation, at every micro-batch (powers of two) of one global batch; of
what the line names, only what it names. Every candidate that closed forms do not rule out is rehearsed quickly, with
its activations, until a minute is over; `--rehearse` gives all the time it takes. What is likely to be the answer comes
first: what is expected to fit, without recomputation, with a large micro-batch and a stage that sends little. A
rehearsal tells how many bytes a sample takes beside model states, so that the next guess is a better one. What only
saves memory, beside one that fits, comes last. The one that would be named is rehearsed in full before it is: where
that finds more bytes or seconds, another may take its place. Points of the line that differ in more than the way to do
the work, as in the GPU, have an answer each.

[Note: defaults] What the line leaves open is what people run on the device. On GPUs that is bf16 with fp32 masters,
sequences as long as the model's own context where no data are named, and the memory of an H100. Points of the line that
are compared are all in fp32 where one of them is not defined in bf16, as torch's DDP. A batch that is not named has
eight samples for each rank, or what a named micro-batch divides: six of three.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import lcm
from pathlib import Path
from typing import Any

from zeroexp.check import check
from zeroexp.check.sweep_points import fitting_batch
from zeroexp.config.gpus import USUAL_GPU
from zeroexp.config.keys import Config, ConfigError
from zeroexp.models.module import longest_sequence
from zeroexp.plan.changes import MICRO, OPEN, RECOMPUTES, SEQ_LEN, planned_change, with_settings
from zeroexp.plan.composed_points import BATCH
from zeroexp.plan.outcome import PlannedPoint
from zeroexp.plan.peak import with_rehearsal
from zeroexp.plan.plan_points import Plans
from zeroexp.plan.plan_table import settings_of
from zeroexp.plan.speed import calibration_path
from zeroexp.process import signals

STAGES = ("ddp", "zero1", "zero2", "zero3")  # those that send little come first
# Of a batch and of sequences that the line does not name.
SAMPLES_PER_RANK, MOST_TOKENS = 8, 1 << 15
BUDGET_SECONDS, CONFIRM_SECONDS = 60, 15  # of all; kept for what would be named
ALIKE = 0.01  # seconds that differ by less are one speed: no estimate is that good
LAYOUT = "strategy.implementation"


@dataclass
class Advice:
    """What was compared for one model on one number of ranks."""

    config: Config  # the line's point with what is taken for what it leaves open
    candidates: list[PlannedPoint]
    settings: str = ""  # that tell it from other work of the line
    named: Collection[str] = ()  # the keys that the line sets
    # Why, by stage, where none of its candidates is defined.
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])

    def rehearse(self, at: int, *, quick: bool) -> PlannedPoint:
        self.candidates[at] = with_rehearsal(self.candidates[at], quick=quick)
        return self.candidates[at]

    @property
    def rehearsed(self) -> list[PlannedPoint]:
        """The rehearsed candidates, the fastest first; of two that are as fast the one that holds less."""
        found = [each for each in self.candidates if each.outcome.rehearsed]
        return sorted(found, key=lambda each: (each.seconds, each.outcome.peak_bytes))

    @property
    def fitting(self) -> list[PlannedPoint]:
        return [each for each in self.rehearsed if each.outcome.has_room]

    @property
    def best(self) -> PlannedPoint | None:
        """The fastest that fits; of those that are as fast, see ALIKE, the one that holds least."""
        fitting = self.fitting
        alike = [each for each in fitting if each.seconds <= (1 + ALIKE) * fitting[0].seconds]
        return min(alike, key=lambda each: each.outcome.peak_bytes, default=None)

    @property
    def leanest(self) -> PlannedPoint | None:
        """What leaves most memory free: the fastest of the stage and recomputation that can hold least.

        It holds no more than the best, which a larger micro-batch may where others were not rehearsed in time.
        """
        best, fitting = self.best, self.fitting
        if best is None:
            return None
        least = min(fitting, key=lambda each: each.outcome.peak_bytes)
        of_its_way = (each for each in fitting if way_of(each) == way_of(least))
        return next(e for e in of_its_way if e.outcome.peak_bytes <= best.outcome.peak_bytes)

    @property
    def frontier(self) -> list[PlannedPoint]:
        """The candidates that no other beats in both time and memory."""
        best: list[PlannedPoint] = []
        for each in self.rehearsed:
            if not best or each.outcome.peak_bytes < best[-1].outcome.peak_bytes:
                best.append(each)
        return best

    def only_saves_memory(self, each: PlannedPoint) -> bool:
        """Whether a candidate of its stage fits that takes as many samples at once and recomputes no more."""
        return any(
            fits.outcome.strategy == each.outcome.strategy
            and fits.micro >= each.micro
            and fits.recomputes <= each.recomputes
            for fits in self.fitting
        )

    @property
    def left_unrehearsed(self) -> list[PlannedPoint]:
        """What may fit and was not rehearsed, since the time was over."""
        others = (e for e in self.candidates if e.outcome.fits and not e.outcome.rehearsed)
        return [e for e in others if not e.outcome.not_rehearsed]


def way_of(each: PlannedPoint) -> tuple[str, bool]:
    return each.outcome.strategy, each.recomputes


def advise(plans: Plans, *, now: Callable[[], float] = time.monotonic) -> list[Advice]:
    """Return the advice for each work of a line. Raises ConfigError where nothing is defined."""
    return signals.until_interrupted(_advices(plans, now), "candidates that were rehearsed")


def _advices(plans: Plans, now: Callable[[], float]) -> Iterator[Advice]:
    """Yield the advice for each group of points; of an interrupted one, before it ends, what has been rehearsed."""
    groups: dict[str, list[PlannedPoint]] = {}
    for each in plans.planned:
        groups.setdefault(_work_of(each.config, plans.named), []).append(each)
    for points in groups.values():
        seconds = (BUDGET_SECONDS - CONFIRM_SECONDS) / len(groups)
        until = None if plans.gives_time else now() + seconds
        micro = lcm(*(each.micro for each in points)) if MICRO in plans.named else 1
        bf16 = _take_bf16(points)
        configs = [_with_defaults(each, plans.named, micro, bf16=bf16) for each in points]
        bases = [each._replace(config=of) for each, of in zip(points, configs, strict=True)]
        candidates, refused = _candidates(bases, plans.named)
        if not candidates:
            raise ConfigError(next(iter(refused.values())))
        advice = Advice(configs[0], candidates, _shared_settings(points), plans.named, refused)
        try:
            _rehearse_likely_first(advice, until, now)
            confirm_best(advice)
        except KeyboardInterrupt:
            if advice.rehearsed:
                yield advice
            raise
        yield advice


def _work_of(config: Config, named: Collection[str]) -> str:
    """Return what must be alike in points that are compared: all but the ways to do it."""
    alike = {"strategy": STAGES[0], LAYOUT: "buffer", MICRO: 1, RECOMPUTES: False}
    keys = (f"strategy.{key}" for key in OPEN)
    own: dict[str, Any] = {key: None for key in keys if key not in named}  # what was filled in
    settings = config.strategy.settings.items()
    own["strategy.settings"] = {k: v for k, v in settings if f"strategy.settings.{k}" in named}
    batch = {} if _of_line(BATCH, named) else {BATCH: 1}
    return repr(with_settings(config, {**alike, **own, **batch}, named))


def _shared_settings(points: Sequence[PlannedPoint]) -> str:
    """Return the settings in the name of each of these points, where the line sweeps them."""
    of_points = [settings_of(each.outcome).split("-") for each in points]
    return "-".join(part for part in of_points[0] if all(part in each for each in of_points))


def _of_line(key: str, named: Collection[str]) -> bool:
    """Tell whether the line sets the key, or may do so by a study, of whose file no words are known."""
    return "study" in named or any(each == key or each.startswith(f"{key}.") for each in named)


def _take_bf16(points: Sequence[PlannedPoint]) -> bool:
    """Tell whether all of these points are defined in bf16 with fp32 masters."""
    try:
        for each in points:
            check(with_settings(each.config, {"precision": "bf16_master"}), on_paper=True)
    except ConfigError:
        return False
    return True


def _with_defaults(
    planned: PlannedPoint, named: Collection[str], micro: int, *, bf16: bool = True
) -> Config:
    """Return the config with what is taken for what the line leaves open, see [Note: defaults].

    micro: what must divide a rank's samples, and bf16: what each takes, of the points that are compared with this one.
    """
    config, settings = planned.config, dict[str, Any]()
    if planned.machines.device == "cuda":
        if bf16 and not _of_line("precision", named):
            settings["precision"] = "bf16_master"
        names_length = "data" in named or _of_line(SEQ_LEN, named)
        if not names_length and (longest := longest_sequence(planned.model)):
            settings[SEQ_LEN] = min(longest, MOST_TOKENS)
        is_calibrated = calibration_path(Path(config.outputs), "cuda").exists()
        if planned.outcome.memory_gib is None and not is_calibrated:
            settings["cluster.gpu"] = USUAL_GPU
    if not _of_line(BATCH, named):
        settings[MICRO] = config.data.micro_batch_size if MICRO in named else 1
        settings[BATCH] = fitting_batch(SAMPLES_PER_RANK, micro) * config.world_size
    return with_settings(config, settings)


def _candidates(
    bases: Sequence[PlannedPoint], named: Collection[str]
) -> tuple[list[PlannedPoint], dict[str, str]]:
    """Return the ways to do the work of these points that are defined, and by stage why none of it is."""
    candidates, refused = list[PlannedPoint](), dict[str, str]()
    for base in bases:
        for settings in _ways(base.config, named):
            try:
                candidates.append(planned_change(base, settings, named))
            except ConfigError as error:
                refused.setdefault(settings["strategy"], str(error))
    found = {each.outcome.strategy for each in candidates}
    return candidates, {stage: why for stage, why in refused.items() if stage not in found}


def _ways(config: Config, named: Collection[str]) -> Iterator[dict[str, Any]]:
    of_line = {"strategy", "study"} & {*named}
    own = config.strategy.name
    stages = (own,) if of_line or own not in STAGES else STAGES
    each = config.data.global_batch_size // config.world_size
    halves = [2**i for i in range(each.bit_length()) if each % 2**i == 0]
    micros = (config.data.micro_batch_size,) if MICRO in named else halves
    choices = (config.train.activation_checkpointing,) if RECOMPUTES in named else (False, True)
    layout = {LAYOUT: config.strategy.implementation} if LAYOUT in named else {}
    for stage, recomputes, micro in product(stages, choices, micros):
        yield {**layout, "strategy": stage, MICRO: micro, RECOMPUTES: recomputes}


def _rehearse_likely_first(advice: Advice, until: float | None, now: Callable[[], float]) -> None:
    """Rehearse the candidates whose model states fit, the likely ones first, until the time is over.

    It is not over before one is found that fits.
    """
    left = {at: each for at, each in enumerate(advice.candidates) if each.outcome.fits}
    bytes_per_sample: dict[bool, float] = {}  # with and without recomputation

    def unlikely(at: int) -> tuple[bool, bool, bool, int, int]:
        each = left[at]
        of_samples = each.micro * bytes_per_sample.get(each.recomputes, 0.0)
        is_large = each.outcome.total.fullest + of_samples > each.outcome.limit_bytes
        return is_large, advice.only_saves_memory(each), each.recomputes, -each.micro, at

    while left and (until is None or now() < until or not advice.best):
        at = min(left, key=unlikely)
        del left[at]
        tried = advice.rehearse(at, quick=True)
        outcome = tried.outcome
        if outcome.rehearsed is None:
            layout = outcome.implementation  # of which no other one can be
            for same in [at for at, e in left.items() if e.outcome.implementation == layout]:
                why = replace(left.pop(same).outcome, not_rehearsed=outcome.not_rehearsed)
                advice.candidates[same] = advice.candidates[same]._replace(outcome=why)
            continue
        beside = (outcome.peak_bytes - outcome.total.fullest) / tried.micro
        bytes_per_sample[tried.recomputes] = max(beside, 0.0)


def confirm_best(advice: Advice) -> None:
    """Rehearse in full what would be named, and what then would be."""
    confirmed: set[int] = set()
    while (best := advice.best) and (at := advice.candidates.index(best)) not in confirmed:
        confirmed.add(at)
        advice.rehearse(at, quick=False)
