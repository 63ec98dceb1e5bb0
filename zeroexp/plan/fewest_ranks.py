"""`--fit`: the fewest ranks at which every strategy of the line fits, and how much work fits there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

from zeroexp.config.keys import Config, ConfigError
from zeroexp.plan.changes import MICRO, SEQ_LEN, longest_sequence, with_settings
from zeroexp.plan.composed_points import BATCH
from zeroexp.plan.outcome import PlannedPoint, plan_point
from zeroexp.plan.peak import rehearse_point
from zeroexp.plan.plan_points import Plans
from zeroexp.plan.plan_table import settings_of, skipped_sentences
from zeroexp.plan.search import MOST_RANKS, first_that_fits, more_ranks
from zeroexp.plan.text_table import GIB, Column, amount, lines_of, unit_of, wrapped

MOST_SAMPLES, TOKENS = 1 << 16, 64  # the largest micro-batch that is tried; the step of sequences
MOST_TOKENS = 1 << 20  # of a model that names no longest sequence
HEAD = (
    "The fewest {device} ranks, among powers of two, at which a step fits {limit:g} GiB, and there the largest "
    "micro-batch (one in a step) and the longest sequence, each alone. Rehearsed: peak and left are {unit} of the "
    "fullest rank, with activations."
)


class Fit(NamedTuple):
    """Fewest ranks and peaks of one point. Bytes are those of the fullest rank."""

    point: PlannedPoint
    limit: int
    world_size: int | None = None  # the fewest ranks; None: it fits none that is tried
    num_bytes: float = 0.0  # the rehearsed peak, or model states where there is no rehearsal
    samples: int | None = None  # the largest micro-batch there, one in a step
    seq_len: int | None = None  # the longest sequence there
    not_rehearsed: str | None = None


def fit_lines(plans: Plans) -> str:
    """Return a line for each strategy, layout and settings. Raises ConfigError without a limit."""
    asked: dict[tuple[str, ...], PlannedPoint] = {}
    for each in plans.planned:
        outcome = each.outcome
        if outcome.memory_gib is None:
            remedy = "set it to the memory of one device"
            raise ConfigError(f"cluster.device_memory_gib=null: --fit needs a limit; {remedy}")
        names = (outcome.model, outcome.strategy, outcome.implementation)
        asked.setdefault((*names, settings_of(outcome)), each)
    rows = [_fit(each) for each in asked.values()]
    unit, size = unit_of([row.limit for row in rows])

    def if_fits(row: Fit, num_bytes: float) -> str:
        return amount(num_bytes, size) if row.world_size else "-"

    columns: list[Column[Fit]] = [
        Column("model", lambda row: row.point.outcome.model, left=True),
        Column("strategy", lambda row: row.point.outcome.strategy, left=True),
        Column("layout", lambda row: row.point.outcome.implementation, left=True),
        Column("ranks", _ranks),
        Column("peak", lambda row: if_fits(row, row.num_bytes)),
        Column("left", lambda row: if_fits(row, row.limit - row.num_bytes)),
        Column("batch", lambda row: str(row.samples or "-")),
        Column("seq_len", lambda row: str(row.seq_len or "-")),
        Column("settings", lambda row: settings_of(row.point.outcome), left=True),
    ]
    heads = dict.fromkeys(
        HEAD.format(device=row.point.device, limit=row.limit / GIB, unit=unit) for row in rows
    )
    notes = [
        *(f"Model states alone: {row.not_rehearsed}." for row in rows if row.not_rehearsed),
        *skipped_sentences(plans.entries),
    ]
    lines = [*wrapped(*heads), "", *lines_of(columns, rows, 4), "", *wrapped(*notes)]
    return "\n".join(lines).rstrip()


def _fit(point: PlannedPoint) -> Fit:
    """Return the fewest ranks, among powers of two, at which the point fits its limit, and how much work fits there."""
    print(
        f"{point.outcome.strategy} {point.outcome.implementation}: rehearsing",
        file=sys.stderr,
        flush=True,
    )
    none = Fit(point, int((point.outcome.memory_gib or 0.0) * GIB))
    start = first_that_fits(more_ranks(point.config, point.device), point)
    if start is None:
        return none
    size = start.planned.config.world_size
    try:
        for at in more_ranks(point.config, point.device, above=size // 2):
            peak = _peak(at.config, point)
            if peak <= none.limit:
                samples, tokens = _most_work(at.config, point, none.limit)
                return Fit(point, none.limit, at.config.world_size, peak, samples, tokens)
    except ConfigError as refusal:
        total = start.planned.outcome.total.fullest
        return Fit(point, none.limit, size, total, not_rehearsed=str(refusal))
    return none


def _ranks(row: Fit) -> str:
    return str(row.world_size or f"not up to {MOST_RANKS[row.point.device]}")


def _peak(config: Config, of: PlannedPoint) -> int:
    """Return the most bytes that a rank may hold in a step. Raises ConfigError for what can not be rehearsed."""
    return rehearse_point(plan_point(config, of.model, of.device)).fullest.num_bytes


def _most_work(config: Config, of: PlannedPoint, limit: int) -> tuple[int | None, int | None]:
    """Return the largest micro-batch, alone in a step, and the longest sequence that fit."""

    def of_samples(samples: int) -> int:
        batch = {MICRO: samples, BATCH: samples * config.world_size}
        return _peak(with_settings(config, batch), of)

    def of_tokens(tokens: int) -> int:
        return _peak(with_settings(config, {SEQ_LEN: tokens}), of)

    step = min(TOKENS, config.data.seq_len)
    longest = longest_sequence(of.model) or MOST_TOKENS
    return (
        largest(of_samples, limit, step=1, most=MOST_SAMPLES),
        largest(of_tokens, limit, step=step, most=longest),
    )


def largest(peak: Callable[[int], int], limit: int, *, step: int, most: int) -> int | None:
    """Return the largest multiple of `step`, or `most`, whose peak is within the limit; None if not even one step is.

    The next multiple has been seen to exceed the limit. Peaks are nearly on a line, so the line through two known ones
    tells where to look; where that does not halve what is left, the middle does.
    """
    peaks: dict[int, int] = {}  # by steps
    fits, exceeds = 0, -(-most // step) + 1
    guess = 1
    while fits < guess < exceeds:
        left = exceeds - fits
        peaks[guess] = peak(min(guess * step, most))
        if peaks[guess] <= limit:
            fits = guess
        else:
            exceeds = guess
        if not fits:
            return None
        is_slow = exceeds in peaks and 2 * (exceeds - fits) > left
        guess = (fits + exceeds) // 2 if is_slow else _on_the_line(peaks, fits, exceeds, limit)
    return min(fits * step, most)


def _on_the_line(peaks: dict[int, int], fits: int, exceeds: int, limit: int) -> int:
    """Return where the line through `fits` and another known number meets the limit; `fits` if nothing is left."""
    smaller = max((steps for steps in peaks if steps < fits), default=None)
    other = exceeds if exceeds in peaks else smaller
    if other is None:
        return min(2 * fits, exceeds - 1)
    rise = (peaks[other] - peaks[fits]) / (other - fits)
    further = int((limit - peaks[fits]) / rise) if rise > 0 else exceeds
    return min(fits + max(further, 1), exceeds - 1)
