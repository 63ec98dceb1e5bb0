"""`--fit`: the fewest ranks at which every strategy of the line fits, and how much work fits there."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from typing import Any

from zeroexp.config.keys import ConfigError
from zeroexp.models.module import longest_sequence
from zeroexp.plan.changes import MICRO, SEQ_LEN, planned_change, with_settings
from zeroexp.plan.composed_points import BATCH
from zeroexp.plan.outcome import PlannedPoint, plan_point
from zeroexp.plan.peak import rehearse_point, with_rehearsal
from zeroexp.plan.plan_points import Plans
from zeroexp.plan.plan_table import json_entry, row_of, settings_of, skipped_sentences
from zeroexp.plan.text_table import Row, lines_of, unit_of, wrapped
from zeroexp.process import signals

MOST_RANKS = {"cuda": 4096, "cpu": 64}  # CPU ranks share a host, where each pair counts apart
MOST_SAMPLES, TOKENS = 1 << 16, 64  # the largest micro-batch that is tried; the step of sequences
MOST_TOKENS = 1 << 20  # of a model that names no longest sequence
HEAD = (
    "The fewest {device} ranks, among powers of two (where groups or nodes are of 3, times 3), at which a step fits "
    "{limit:.4g} GiB{unsure}, and there the largest micro-batch (one in a step) and the longest sequence, each alone. "
    "Rehearsed: peak and left are {unit} of the fullest rank, with activations; on GPUs what torch's allocator "
    "reserves for them."
)
ROWS = "rows that were made"


HEADS = {
    **{"model": "model", "strategy": "strategy", "implementation": "layout", "world_size": "ranks"},
    **{"peak_bytes": "peak", "left_bytes": "left", "samples": "batch", "seq_len": "seq_len"},
    "settings": "settings",
}


@dataclass(frozen=True)
class Fit:
    asked: PlannedPoint
    at: PlannedPoint | None  # at the fewest ranks; None: not up to MOST_RANKS
    # The largest micro-batch, alone in a step, and the longest sequence there; None: not one, or nothing is rehearsed.
    samples: int | None = None
    tokens: int | None = None


def fit_lines(plans: Plans) -> str:
    """Return a line for each strategy, layout and settings. Raises ConfigError without a limit."""
    points = _asked(plans)
    unit, size = unit_of([each.outcome.sure_bytes for each in points])
    heads = dict.fromkeys(
        HEAD.format(device=each.machines.device, unit=unit, **_limit(each)) for each in points
    )
    fits = signals.until_interrupted(map(_fit, points), ROWS)
    reasons = [fit.at.outcome.not_rehearsed for fit in fits if fit.at]
    notes = [f"Model states alone: {reason}." for reason in reasons if reason]
    notes += skipped_sentences(plans.entries)
    rows = [*map(_row, fits)]
    lines = [*wrapped(*heads), "", *lines_of(HEADS, rows, size, 4), "", *wrapped(*notes)]
    return "\n".join(lines).rstrip()


def fit_json(plans: Plans) -> str:
    """Return the same with the plan at the fewest ranks; null: it does not fit. Raises ConfigError without a limit."""
    fits = signals.until_interrupted(map(_fit, _asked(plans)), ROWS)
    return json.dumps([_entry(fit) for fit in fits], indent=1)


def _asked(plans: Plans) -> list[PlannedPoint]:
    """Return the line's points, those that differ in their number of ranks once."""
    asked: dict[tuple[str, ...], PlannedPoint] = {}
    for each in plans.planned:
        outcome = each.outcome
        if outcome.memory_gib is None:
            remedy = "set it to the memory of one device"
            raise ConfigError(f"cluster.device_memory_gib=null: --fit needs a limit; {remedy}")
        names = (outcome.model, outcome.strategy, outcome.implementation)
        asked.setdefault((*names, settings_of(outcome)), each)
    return [*asked.values()]


def _fit(point: PlannedPoint) -> Fit:
    """Return the fewest ranks at which the point fits its limit, and how much work fits there."""
    outcome = point.outcome
    print(f"{outcome.strategy} {outcome.implementation}: rehearsing", file=sys.stderr, flush=True)
    at = fewest_ranks(point)
    if at is None or at.outcome.not_rehearsed:
        return Fit(point, at)
    return Fit(point, at, *_most_work(at))


def _limit(point: PlannedPoint) -> dict[str, Any]:
    """Return what --advise allows too."""
    whole, unsure = point.outcome.memory_gib or 0.0, point.outcome.unsure_gib
    why = f" (of {whole:g}, of which driver, CUDA and NCCL may take the rest)" if unsure else ""
    return {"limit": whole - unsure, "unsure": why}


def _row(fit: Fit) -> Row:
    row = row_of(fit.asked) | {"settings": settings_of(fit.asked.outcome)}
    row |= {"samples": fit.samples or "-", "seq_len": fit.tokens or "-"}
    if fit.at is None:
        most = MOST_RANKS[fit.asked.machines.device]
        return row | {"world_size": f"not up to {most}", "peak_bytes": "-", "left_bytes": "-"}
    held, limit = fit.at.outcome.peak_bytes, fit.at.outcome.sure_bytes
    row |= {"world_size": fit.at.config.world_size, "peak_bytes": held, "left_bytes": limit - held}
    return row


def _entry(fit: Fit) -> dict[str, object]:
    outcome, at = fit.asked.outcome, fit.at
    names = ("model", "strategy", "implementation")
    return {
        **{name: getattr(outcome, name) for name in names},
        "settings": settings_of(outcome),
        "world_size": at and at.config.world_size,
        "micro_batch_size": fit.samples,
        "seq_len": fit.tokens,
        "peak_bytes": at and at.outcome.peak_bytes,
        "limit_bytes": outcome.sure_bytes,
        "plan": at and json_entry(at),
    }


def fewest_ranks(point: PlannedPoint) -> PlannedPoint | None:
    """Return the point at the fewest ranks at which its rehearsed peak fits, or model states where none is known."""
    strategy, most = point.config.strategy, MOST_RANKS[point.machines.device]
    num_nodes = point.config.cluster.num_nodes  # of a local run
    groups = lcm(strategy.replicas or 1, strategy.secondary_partition or 1, num_nodes)
    odd = groups // (groups & -groups)  # no power of two is in groups of three
    for power in range((most // odd).bit_length()):
        try:
            at = planned_change(point, {"world_size": odd * 2**power})
        except ConfigError:  # as of fewer ranks than a group has
            continue
        if at.outcome.has_room and (at := with_rehearsal(at)).outcome.has_room:
            return at
    return None


def _most_work(at: PlannedPoint) -> tuple[int | None, int | None]:
    """Return the largest micro-batch, alone in a step, and the longest sequence that fit. Raises ConfigError."""
    config, limit = at.config, at.outcome.sure_bytes
    unit, size = unit_of([limit])

    def peak(settings: dict[str, int]) -> int:
        changed = plan_point(with_settings(config, settings), at.model, at.machines.device)
        needed = rehearse_point(changed).fullest.needed_bytes
        words = " ".join(f"{key}={value}" for key, value in settings.items())
        peaks = f"{needed / size:,.1f} of {limit / size:,.1f} {unit}"
        print(f"{words}: {peaks}", file=sys.stderr, flush=True)  # some models take minutes
        return needed

    def peak_of_samples(samples: int) -> int:
        return peak({MICRO: samples, BATCH: samples * config.world_size})

    step, longest = min(TOKENS, config.data.seq_len), longest_sequence(at.model) or MOST_TOKENS
    return (
        largest(peak_of_samples, limit, step=1, most=MOST_SAMPLES),
        largest(lambda tokens: peak({SEQ_LEN: tokens}), limit, step=step, most=longest),
    )


def largest(peak: Callable[[int], int], limit: float, *, step: int, most: int) -> int | None:
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


def _on_the_line(peaks: dict[int, int], fits: int, exceeds: int, limit: float) -> int:
    """Return where the line through `fits` and another known number meets the limit; `fits` if nothing is left."""
    smaller = max((steps for steps in peaks if steps < fits), default=None)
    other = exceeds if exceeds in peaks else smaller
    if other is None:
        return min(2 * fits, exceeds - 1)
    rise = (peaks[other] - peaks[fits]) / (other - fits)
    further = int((limit - peaks[fits]) / rise) if rise > 0 else exceeds
    return min(fits + max(further, 1), exceeds - 1)
