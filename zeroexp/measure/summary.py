"""Pure functions that turn the records of all steps into the numbers of a run, without torch.

Every rank calls `summarise_rank` on its own records; rank 0 gathers the results and calls `summarise`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from statistics import fmean, median, quantiles
from typing import Any, TypeVar

from zeroexp.measure.drift import rising
from zeroexp.measure.record import (
    HOST,
    OFF_DEVICE,
    MemorySummary,
    RankSummary,
    RankTimes,
    RunSummary,
    Spread,
    StepRecord,
    VerbSeconds,
    kinds_in,
    on_device,
)

LOSS = "loss"  # the kind of message that the training loop sends, whatever the engine
NONE = VerbSeconds()
Of = TypeVar("Of")


def summarise_rank(
    rank: int, records: Sequence[StepRecord], *, build_peak_bytes: int | None = None
) -> RankSummary:
    """Summarise one rank. `records` are all its steps in order, warm-up included.

    Raises ValueError if no step is measured.
    """
    moments = [kinds for r in records for kinds in (r.memory_bytes or {}).values()]
    steps = measured_records(records)
    # Watching sends nothing, and what is gathered ahead of a step counts in the one before, watched or not.
    sending = [r for r in records if not r.warmup]
    offloads = any(HOST in kinds for kinds in moments)  # a rank that owns nothing sends 0 bytes
    return RankSummary(
        rank=rank,
        memory_bytes={kind: _most(m.get(kind) for m in moments) or 0 for kind in kinds_in(moments)},
        memory={
            # The most of all kinds together at one named moment: at most their sum.
            "total": max((int(on_device(m)) for m in moments), default=0),
            "peak": _most(r.peak_bytes for r in records),
            "build_peak": build_peak_bytes,
            "host_peak": _most(r.host_peak_bytes for r in records) or None,
            **{kind: _most(m.get(kind) for m in moments) for kind in OFF_DEVICE},
        },
        traffic={
            "wire": of_all([r.wire_bytes for r in sending], fmean),
            "link": of_all([r.link_bytes for r in sending], fmean),
            "bus": fmean(sum(r.traffic.bus_bytes.values()) for r in sending) if offloads else None,
        },
        sent_bytes_by_kind=_mean_by_kind([r.traffic.bytes_by_kind for r in sending]),
        calls_by_kind=_mean_by_kind([r.traffic.calls_by_kind for r in sending]),
        memory_bytes_at=_fullest_at([r.memory_bytes for r in records if r.memory_bytes]),
        times=_times(rank, steps),
        peak=max((r.peak for r in records if r.peak), key=lambda p: p.num_bytes, default=None),
        drift=rising(records),
    )


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def summarise(records: Sequence[StepRecord], per_rank: Sequence[RankSummary]) -> RunSummary:
    """Summarise the run. `records` are those of rank 0; `per_rank` holds one entry of every rank, in any order."""
    steps = measured_records(records)
    seconds = [r.step_seconds for r in steps]
    saving_seconds = sum(r.saving_seconds for r in steps)
    ranks = sorted(per_rank, key=lambda r: r.rank)
    counted = [sum(r.sent_bytes_by_kind.values()) for r in ranks]
    busiest = ranks[counted.index(max(counted))]
    return RunSummary(
        world_size=len(ranks),
        num_steps=len(steps),
        num_warmup_steps=sum(r.warmup for r in records),
        initial_loss=records[0].loss,
        final_loss=records[-1].loss,
        step_seconds_median=median(seconds),
        step_seconds_p95=_percentile_95(seconds),
        phase_seconds_median={
            phase: median(r.phase_seconds.get(phase, 0.0) for r in steps)
            for phase in steps[0].phase_seconds
        },
        tokens_per_second=sum(r.num_tokens for r in steps) / (sum(seconds) + saving_seconds),
        memory=_memory(ranks),
        sent_bytes_per_step=of_all([_sent_bytes(r, len(ranks)) for r in ranks], spread),
        **_spreads([{f"{k}_bytes_per_step": v for k, v in r.traffic.items()} for r in ranks]),
        sent_bytes_by_kind=busiest.sent_bytes_by_kind,
        calls_by_kind=busiest.calls_by_kind,
        saving_seconds=saving_seconds,
        diverged_at=diverged_at(records),
        validation_loss=records[-1].validation_loss,
        validation_accuracy=records[-1].validation_accuracy,
        times=[r.times for r in ranks],
        drift={k: f"{v}, rank {r.rank}" for r in reversed(ranks) for k, v in r.drift.items()},
    )


def diverged_at(records: Sequence[StepRecord]) -> int | None:
    """Return the first step whose loss or gradient norm is not finite, or None; a loss scale leaves norms out."""
    broken = (
        r.step
        for r in records
        if not (isfinite(r.loss) and (r.loss_scale or isfinite(r.grad_norm)))
    )
    return next(broken, None)


def measured_records(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the steps that count in times: without warm-up, and without traced steps unless all others are gone.

    Raises ValueError if there is none.
    """
    steps = [r for r in records if not r.warmup]
    steps = [r for r in steps if not r.traced] or steps
    if not steps:
        raise ValueError(
            f"none of {len(records)} steps is measured; train.steps must be at least 1"
        )
    return steps


def spread(per_rank: Sequence[float]) -> Spread:
    return Spread(fullest=max(per_rank), mean=fmean(per_rank), per_rank=list(per_rank))


def _percentile_95(values: Sequence[float]) -> float:
    """Interpolate linearly between the two closest values, as numpy does by default."""
    return quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


def _times(rank: int, steps: Sequence[StepRecord]) -> RankTimes:
    """Return the means over the measured `steps`; a verb or phase that a step lacks counts as nothing there.

    Of verbs they are over the steps that timed any: on a GPU not all do.
    """
    timed = [step for step in steps if step.verbs] or steps
    verbs = dict.fromkeys(verb for step in timed for verb in step.verbs)
    return RankTimes(
        rank=rank,
        step_seconds=fmean(step.step_seconds for step in steps),
        phase_seconds=_mean_by_kind([step.phase_seconds for step in steps]),
        verbs={
            verb: VerbSeconds(**_mean_by_kind([vars(s.verbs.get(verb, NONE)) for s in timed]))
            for verb in verbs
        },
        waited_seconds=_mean_by_kind([step.waited_seconds for step in timed]),
    )


def _memory(ranks: Sequence[RankSummary]) -> MemorySummary:
    kinds = kinds_in([r.memory_bytes for r in ranks])
    return MemorySummary(
        by_kind={kind: spread([r.memory_bytes.get(kind, 0) for r in ranks]) for kind in kinds},
        **_spreads([r.memory for r in ranks]),
        fullest_at=_fullest_at([r.memory_bytes_at for r in ranks]),
        mean_at=_mean_at([r.memory_bytes_at for r in ranks]),
        peaks=[r.peak for r in ranks],
    )


def _fullest_at(readings: Sequence[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """Return, for each moment, the bytes by kind of the reading with the largest total."""
    fullest: dict[str, dict[str, int]] = {}
    for reading in readings:
        for moment, kinds in reading.items():
            fullest[moment] = max(fullest.get(moment, kinds), kinds, key=on_device)
    return fullest


def _mean_at(ranks: Sequence[dict[str, dict[str, int]]]) -> dict[str, dict[str, float]]:
    """Return, for each moment that every rank read, the mean bytes of each kind."""
    moments = [moment for moment in ranks[0] if all(moment in rank for rank in ranks)]
    return {moment: _mean_by_kind([rank[moment] for rank in ranks]) for moment in moments}


def _spreads(per_rank: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """Return the Spread of each number, None where some rank can not know it."""
    return {name: of_all([rank[name] for rank in per_rank], spread) for name in per_rank[0]}


def of_all(values: Sequence[float | None], function: Callable[[list[float]], Of]) -> Of | None:
    """Return what a function makes of these numbers, None where one of them is unknown."""
    known = [value for value in values if value is not None]
    return function(known) if len(known) == len(values) else None


def _sent_bytes(rank: RankSummary, world_size: int) -> float | None:
    """Return the bytes that the engine counted, or those on the wire if they are more; None if both are unknown.

    An engine that shares memory with its neighbours sends little over the wire. An engine that sends from C++ counts
    nothing itself, and then only the loss of the training loop is counted.
    """
    wire = rank.traffic["wire"]
    is_counted = world_size == 1 or rank.sent_bytes_by_kind.keys() - {LOSS}
    if wire is None and not is_counted:
        return None
    return max(sum(rank.sent_bytes_by_kind.values()), wire or 0.0)


def _mean_by_kind(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    kinds = dict.fromkeys(kind for row in rows for kind in row)
    return {kind: fmean(row.get(kind, 0) for row in rows) for kind in kinds}
