"""The peak of a planned point with activations, logits and temporaries, by a rehearsal of a few of its ranks.

Rehearsed are the first rank, the one whose closed form is the largest, and the last, for a few microbatches of a step.
Where our engine reduces once a step, the second finds the gradients of the first, and further ones find the same. Where
it reduces in each, the later ones also find reductions in flight, each of which may be all of an earlier microbatch.
FSDP2 frees what it gathered in the last one alone, so that one in the middle, which finds gradients too, holds most.

CPU ranks of one host read each other's memory, and send messages to other hosts; they are rehearsed so
(stand_ins.py).

What a GPU rank allocates is replayed through a model of torch's caching allocator, with the device's limit, as
PYTORCH_CUDA_ALLOC_CONF sets it here: ranks inherit the environment. Beside it are the workspaces of cuBLAS.

What rehearses is imported when the first point is rehearsed: fake tensors and the training loop take a second.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from zeroexp.config.gpus import GPUS, USUAL_GPU
from zeroexp.config.keys import Config, ConfigError
from zeroexp.measure.record import STEP_SECONDS
from zeroexp.plan.caching_allocator import OutOfDeviceMemory, expands_segments, replay
from zeroexp.plan.form_terms import ClosedForm
from zeroexp.plan.outcome import PlannedPoint, RankPeak, RehearsedPeaks, plan_point
from zeroexp.plan.sent_bytes import EngineForm
from zeroexp.plan.speed import NOT_CALIBRATED, Speed, speed_of

if TYPE_CHECKING:
    from zeroexp.plan.rehearse import RehearsedRank

MOST_MICROBATCHES, MOST_MICROBATCHES_OF_OTHERS = 2, 3  # the first beside reductions in flight


def with_rehearsal(planned: PlannedPoint, *, quick: bool = False) -> PlannedPoint:
    """Return the point with its rehearsal, or with the reason why there is none.

    quick: of the rank alone that holds most model states.
    """
    outcome = planned.outcome
    print(f"{outcome.name}: rehearsing{'' if quick else ' in full'}", file=sys.stderr, flush=True)
    ranks = [outcome.fullest_rank] if quick else ()
    try:
        rehearsed = rehearse_point(planned, ranks=ranks)
        return planned._replace(outcome=replace(outcome, rehearsed=rehearsed))
    except ConfigError as error:
        without = replace(outcome, rehearsed=None, not_rehearsed=str(error))
        return planned._replace(outcome=without)


def rehearse_point(
    planned: PlannedPoint, *, ranks: Sequence[int] = (), speed: Speed | None = None
) -> RehearsedPeaks:
    """Return the peaks of the ranks that tell of the fullest, and the seconds of the slowest of them.

    ranks: others than these. speed: None: that of the point's machines. Raises ConfigError for what can not be
    rehearsed.
    """
    from zeroexp.plan.rehearse import rehearse
    from zeroexp.plan.timing import compute_seconds, step_seconds

    config, machines, form = planned.config, planned.machines, planned.form
    on_host = machines.device == "cpu"
    of_torch = "gloo" if on_host else "native"
    transport = form.transport if isinstance(form, EngineForm) else of_torch
    speed, most = speed or speed_of(config, machines, transport), _most_microbatches(form)
    rehearsed = [
        rehearse(
            config,
            rank,
            speed=speed,
            ranks_per_host=machines.shape.ranks_per_node if on_host else None,
            most_microbatches=most,
        )
        for rank in ranks or _telling_ranks(planned)
    ]
    untold = 0.0
    if not isinstance(form, EngineForm):  # torch's engines tell of no wait
        traffic = form.traffic(rehearsed[0].rank)
        untold = sum(n / speed.link_rate(kind) for kind, n in traffic.bytes_by_kind.items())
        untold += sum(traffic.calls_by_kind.values()) * speed.latency_seconds
    times = [step_seconds(r.seconds, untold, speed.unsure) for r in rehearsed]
    slowest = max(range(len(times)), key=lambda index: times[index][1])
    expandable = None if on_host else expands_segments(os.environ)
    workspace = GPUS[config.cluster.gpu or USUAL_GPU].workspace_bytes
    limit = planned.outcome.limit_bytes
    return RehearsedPeaks(
        [_rank_peak(each, expandable, limit, workspace) for each in rehearsed],
        rehearsed[0].device,
        step_seconds=times[slowest],
        compute_seconds=compute_seconds(rehearsed[slowest].seconds),
        speed=speed.label,
        allocator="" if on_host else f"expandable_segments:{expandable}",
    )


def rehearsed_beside(config: Config, device: str) -> dict[str, float]:
    """Return the peak of a run that has just been measured, and how many collectives a step of it launches.

    Where this machine is calibrated the seconds of a step too, see STEP_SECONDS. Of ranks the one is rehearsed that
    holds most model states; the others that may hold more only where the plan must hold, since each takes a second.
    Raises ConfigError for what can not be rehearsed. The process must have no process group.
    """
    planned = plan_point(config, None, device)
    ranks = () if config.study.plan_must_hold else [planned.outcome.fullest_rank]
    peaks = rehearse_point(planned, ranks=ranks)
    rehearsed = {"peak": float(peaks.fullest.num_bytes)}
    if NOT_CALIBRATED not in peaks.speed:
        rehearsed |= zip(STEP_SECONDS, peaks.step_seconds, strict=True)
    if isinstance(planned.form, EngineForm):
        calls = [planned.form.traffic(rank).calls_by_kind for rank in range(config.world_size)]
        rehearsed["calls"] = float(max(sum(each.values()) for each in calls))
    return rehearsed


def _telling_ranks(planned: PlannedPoint) -> list[int]:
    """Return the first rank, the last, and the one whose closed form is the largest; of those that are alike one.

    The third is not always the fullest: closed forms know what rests, beside which other ranks may hold more.
    """
    outcome = planned.outcome
    ranks = sorted({0, outcome.fullest_rank, outcome.world_size - 1}, reverse=True)
    return sorted({planned.form.equivalence_key(rank): rank for rank in ranks}.values())


def _most_microbatches(form: ClosedForm) -> int:
    """Return after how many microbatches further ones hold no more."""
    if not isinstance(form, EngineForm):
        return MOST_MICROBATCHES_OF_OTHERS
    waits = form.resolved.reduce_each == "step" or not form.options.overlap
    return MOST_MICROBATCHES + (0 if waits else form.traits.reductions_in_flight)


def _rank_peak(
    rehearsed: RehearsedRank, expandable: bool | None, limit: float, workspace_bytes: int
) -> RankPeak:
    """Return the peak of a rank; expandable: None on a CPU, where no allocator reserves."""
    phase, peaks = rehearsed.peak_phase, rehearsed.peaks
    peak = RankPeak(
        rank=rehearsed.rank,
        phase=phase,
        num_bytes=peaks[phase].num_bytes,
        by_kind=dict(sorted(peaks[phase].by_kind.items(), key=lambda term: -term[1])),
        by_phase={name: each.num_bytes for name, each in peaks.items() if name != "build"},
        largest=peaks[phase].largest,
    )
    if expandable is None:
        return peak
    stream = rehearsed.changes[0][0][2]
    # One for the thread of the forward and one for that of the backward.
    kernels = [(-1, workspace_bytes, stream), (-2, workspace_bytes, stream)]
    changes = kernels, *rehearsed.changes
    held = replay(*changes, expandable=expandable)
    if held.peak_bytes > limit:  # it may give back what is free instead
        with suppress(OutOfDeviceMemory):
            held = replay(*changes, expandable=expandable, limit=limit)
    return replace(peak, reserved_bytes=held.peak_bytes, num_retries=held.num_retries)
