"""One search for all answers: changes of a point are planned, rehearsed where it counts, and the best is kept.

    remedies    later stages and more ranks, by closed forms: the first at which model states fit
    fit         more ranks, rehearsed: the first at which a step fits, and there the largest micro-batch and sequence
    advise      stages, recomputation and micro-batches, rehearsed: the fastest that fits (advise.py)
    --explain   every other value of one setting, and what it changes (explain_plan.py)

Closed forms come first everywhere: what does not fit by its model states alone is not rehearsed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from zeroexp.check import check
from zeroexp.check.try_strategy import check_strategy
from zeroexp.config.keys import Config, ConfigError
from zeroexp.models.module import BuiltModel
from zeroexp.plan.changes import (
    Change,
    complete_words,
    with_batch,
    with_length,
    with_stage,
    with_world,
)
from zeroexp.plan.outcome import PlannedPoint, plan_point

GIB = 2**30
LATER = ("zero1", "zero2", "zero3")
MOST_RANKS, MOST_CPU_RANKS = 4096, 64
MOST_SAMPLES, TOKENS = 1 << 16, 64  # the largest micro-batch that is tried; the step of sequences
MOST_TOKENS = 1 << 20  # of a model that names no longest sequence


class Fit(NamedTuple):
    """What `--fit` finds for one strategy. Bytes are those of the fullest rank."""

    world_size: int | None = None  # the fewest ranks; None: it fits none that is tried
    num_bytes: float = 0.0  # the rehearsed peak, or model states where there is no rehearsal
    samples: int | None = None  # the largest micro-batch there, one in a step
    seq_len: int | None = None  # the longest sequence there
    not_rehearsed: str | None = None


def plan_if_defined(config: Config, model: BuiltModel, device: str) -> PlannedPoint | None:
    """Plan a changed point; None if it is not defined."""
    try:
        check(config, on_paper=True)
        check_strategy(config)
        return plan_point(config, model, device)
    except ConfigError:
        return None


def first_that_fits(
    changes: Iterable[Change], model: BuiltModel, device: str
) -> tuple[Change, PlannedPoint] | None:
    """Return the first change at which model states fit, by closed forms."""
    for change in changes:
        planned = plan_if_defined(change.config, model, device)
        if planned is not None and planned.outcome.fits:
            return change, planned
    return None


def remedies(
    config: Config, model: BuiltModel, device: str, named: Collection[str] = ()
) -> list[str]:
    """Return the words after which model states fit: the earliest stage, and the fewest ranks (doubled each time)."""
    now = config.strategy.name
    later = LATER[LATER.index(now) + 1 if now in LATER else 0 :]
    stages = [Change(f"strategy={stage}", with_stage(config, stage)) for stage in later]
    found = [first_that_fits(stages, model, device)]
    for stage in dict.fromkeys((now, "zero3")):
        words = "" if stage == now else f"strategy={stage} "
        ranks = more_ranks(with_stage(config, stage), device, words, start=2 * config.world_size)
        if more := first_that_fits(ranks, model, device):
            found.append(more)
            break
    return [complete_words(each[0], config, device, named) for each in found if each]


def most_ranks(device: str) -> int:
    """Return the largest world size that is tried: CPU ranks share a host, where each pair of ranks counts apart."""
    return MOST_RANKS if device == "cuda" else MOST_CPU_RANKS


def more_ranks(config: Config, device: str, words: str = "", *, start: int = 1) -> Iterator[Change]:
    """Yield the config at `start` ranks, and at twice as many each time, up to `most_ranks`."""
    while start <= most_ranks(device):
        yield Change(f"{words}world_size={start}", with_world(config, start))
        start *= 2


def rehearsed_peak(config: Config, model: BuiltModel, device: str) -> int:
    """Return the most bytes that a rank may hold in a step. Raises ConfigError for what can not be rehearsed."""
    # The training loop takes a second to import.
    from zeroexp.plan.peak import rehearse_fullest_rank

    return rehearse_fullest_rank(plan_point(config, model, device)).most_bytes


def fit(planned: PlannedPoint, model: BuiltModel) -> Fit:
    """Return the fewest ranks, among powers of two, at which the point fits its limit, and how much work fits there."""
    device, limit = planned.device, int((planned.outcome.memory_gib or 0.0) * GIB)
    start = first_that_fits(more_ranks(planned.config, device), model, device)
    if start is None:
        return Fit()
    change, states = start
    try:
        for at in more_ranks(planned.config, device, start=change.config.world_size):
            peak = rehearsed_peak(at.config, model, device)
            if peak <= limit:
                work = _most_work(at.config, model, device, limit)
                return Fit(at.config.world_size, peak, *work)
    except ConfigError as refusal:
        total = states.outcome.total.fullest
        return Fit(change.config.world_size, total, not_rehearsed=str(refusal))
    return Fit()


def _most_work(
    config: Config, model: BuiltModel, device: str, limit: int
) -> tuple[int | None, int | None]:
    """Return the largest micro-batch, alone in a step, and the longest sequence that fit."""

    def peak_of_samples(samples: int) -> int:
        alone = with_batch(config, samples, samples * config.world_size)
        return rehearsed_peak(alone, model, device)

    def peak_of_tokens(tokens: int) -> int:
        return rehearsed_peak(with_length(config, tokens), model, device)

    step = min(TOKENS, config.data.seq_len)
    longest = longest_sequence(model) or MOST_TOKENS
    return (
        largest(peak_of_samples, limit, step=1, most=MOST_SAMPLES),
        largest(peak_of_tokens, limit, step=step, most=longest),
    )


def longest_sequence(model: BuiltModel) -> int | None:
    """Return the most positions that the model's config names."""
    shape = getattr(model.module, "config", None)
    return getattr(shape, "max_position_embeddings", None)


def largest(peak: Callable[[int], int], limit: int, *, step: int, most: int) -> int | None:
    """Return the largest multiple of `step`, or `most`, whose peak is within the limit; None if not even one step is.

    The next multiple has been seen to exceed the limit. Peaks are nearly on a line, so the line through two known ones
    tells where to look; where that does not halve what is left, the middle does.
    """
    known: dict[int, int] = {}  # steps -> peak
    fits, exceeds = 0, -(-most // step) + 1
    guess = 1
    while fits < guess < exceeds:
        left = exceeds - fits
        known[guess] = peak(min(guess * step, most))
        if known[guess] <= limit:
            fits = guess
        else:
            exceeds = guess
        if not fits:
            return None
        is_slow = exceeds in known and 2 * (exceeds - fits) > left
        guess = (fits + exceeds) // 2 if is_slow else _next(known, fits, exceeds, limit)
    return min(fits * step, most)


def _next(known: dict[int, int], fits: int, exceeds: int, limit: int) -> int:
    """Return where the line through `fits` and another known number meets the limit; `fits` if nothing is left."""
    smaller = max((steps for steps in known if steps < fits), default=None)
    undershot = list(known)[-1] == fits
    other = exceeds if exceeds in known and (undershot or smaller is None) else smaller
    if other is None:
        return min(2 * fits, exceeds - 1)
    rise = (known[other] - known[fits]) / (other - fits)
    further = int((limit - known[fits]) / rise) if rise > 0 else 16 * fits
    if exceeds not in known:
        further = max(further, fits)
    return max(fits, min(fits + max(further, 1), exceeds - 1))
