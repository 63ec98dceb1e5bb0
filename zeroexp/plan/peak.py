"""The peak of a planned point with activations, logits and temporaries, by a rehearsal of a few of its ranks.

Rehearsed are the first rank, the one whose closed form is the largest, and the last, for a few microbatches of a step.
Where our engine reduces once a step, the second finds the gradients of the first, and further ones find the same. Where
it reduces in each, the later ones also find reductions in flight, each of which may be all of an earlier microbatch.
FSDP2 frees what it gathered in the last one alone, so that one in the middle, which finds gradients too, holds most.

CPU ranks of one host read each other's memory, and send messages to other hosts; they are rehearsed so
(stand_ins.py). FSDP2's collectives are gloo's there, which may let go late: the fullest rank is rehearsed once
more to tell what that adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from zeroexp.config.gpus import GPUS, NETWORKS, USUAL_GPU, USUAL_NETWORK
from zeroexp.config.keys import Config, ConfigError
from zeroexp.plan.closed_forms import ShardedForm
from zeroexp.plan.form_of_config import ClosedForm
from zeroexp.plan.hidden_memory import ProductScratch, prior_product_scratch
from zeroexp.plan.machines import Machines
from zeroexp.plan.outcome import Outcome, PlannedPoint, RankPeak, RehearsedPeaks
from zeroexp.plan.rehearse import PHASES, Rehearsal, RehearsedRank, rehearse
from zeroexp.plan.speed import (
    Speed,
    calibrated_gpu_speed,
    calibrated_speed,
    calibration_path,
    cpu_prior_speed,
    load,
    prior_speed,
)
from zeroexp.plan.timing import compute_seconds, step_seconds
from zeroexp.plan.torch_closed_forms import DdpForm, FsdpForm

MOST_MICROBATCHES, MOST_MICROBATCHES_OF_OTHERS = 2, 3  # the first beside reductions in flight
OUTPUTS = "outputs"  # where runs and calibrations are kept


def rehearse_at_speeds(planned: PlannedPoint, speeds: Sequence[Speed]) -> list[RehearsedPeaks]:
    """Rehearse the rank alone whose closed form is the largest, and tell its seconds at each speed."""
    config, machines, form, outcome = planned
    return _rehearse_ranks(config, machines, form, [_fullest_rank(outcome)], speeds)


def with_rehearsal(planned: PlannedPoint) -> PlannedPoint:
    """Return the point with its rehearsal, or with the reason why there is none.

    Seconds are those of the device's calibration, where there is one; else a prior's.
    """
    config, machines, form, outcome = planned
    ranks, speed = _telling_ranks(form, outcome), speed_of(config, machines)
    try:
        (found,) = _rehearse_ranks(config, machines, form, ranks, [speed])
    except ConfigError as error:
        return planned._replace(outcome=replace(outcome, not_rehearsed=str(error)))
    return planned._replace(outcome=replace(outcome, rehearsed=found))


def speed_of(config: Config, machines: Machines) -> Speed:
    """Return the speed of the device's calibration, where there is one and no GPU is named; else a prior's."""
    found = load(calibration_path(Path(OUTPUTS), machines.device))
    if machines.device == "cuda":
        shape = machines.shape.nodes, machines.shape.ranks_per_node
        cluster = config.cluster
        network = NETWORKS[cluster.network or USUAL_NETWORK]
        if found and cluster.gpu is None:
            return calibrated_gpu_speed(found, *shape, network)
        return prior_speed(*shape, network, GPUS[cluster.gpu or USUAL_GPU])
    return (
        calibrated_speed(found, machines.transport)
        if found
        else cpu_prior_speed(machines.transport)
    )


def product_scratch_of(machines: Machines) -> ProductScratch | None:
    """Return what a CPU's calibration measured, or what its instructions say; None for GPUs."""
    if machines.device != "cpu":
        return None
    found = load(calibration_path(Path(OUTPUTS), "cpu"))
    if found is None or found.product_scratch is None:
        return prior_product_scratch()
    return ProductScratch(found.product_scratch, "measured")


def rehearse_fullest_rank(planned: PlannedPoint) -> RankPeak:
    """Rehearse the ranks that tell of the peak, and return the fullest."""
    config, machines, form, outcome = planned
    (found,) = _rehearse_ranks(config, machines, form, _telling_ranks(form, outcome), [])
    return found.fullest


def _telling_ranks(form: ClosedForm, outcome: Outcome) -> list[int]:
    """Return the first rank, the last, and the one whose closed form is the largest; of those that are alike one.

    The third is not always the fullest: closed forms know what rests, beside which other ranks may hold more.
    """
    ranks = sorted({0, _fullest_rank(outcome), outcome.world_size - 1}, reverse=True)
    return sorted({form.equivalence_key(rank): rank for rank in ranks}.values())


def _fullest_rank(outcome: Outcome) -> int:
    per_rank = outcome.total.per_rank
    return per_rank.index(max(per_rank))


def rehearse_spending(
    config: Config, machines: Machines, form: ClosedForm, speed: Speed
) -> dict[str, dict[str, float]]:
    """Return, by phase, on what rank 0 spends the seconds of a step of a few microbatches."""
    found = _rehearse(config, machines, form, [0], [speed])
    phases = found.ranks[0].seconds[speed.label]
    return {phase: seconds.spent for phase, seconds in phases.items()}


def _rehearse_ranks(
    config: Config,
    machines: Machines,
    form: ClosedForm,
    ranks: list[int],
    speeds: Sequence[Speed],
) -> list[RehearsedPeaks]:
    """Return what is rehearsed at each speed, or once without seconds where there is none."""
    found = _rehearse(config, machines, form, ranks, speeds)
    peaks = [_rank_peak(rank) for rank in found.ranks]
    if machines.device == "cpu" and isinstance(form, FsdpForm):
        fullest = max(peaks, key=lambda peak: peak.num_bytes)
        (late,) = _rehearse(config, machines, form, [fullest.rank], [], late=True).ranks
        added = late.peak_bytes - fullest.num_bytes
        peaks = [replace(peak, late_bytes=added) for peak in peaks]
    narrow = config.precision.autocast or config.precision.compute == "bfloat16"
    scratch = str(product_scratch_of(machines) or "") if narrow else ""
    without = RehearsedPeaks(peaks, found.device, found.depths, product_scratch=scratch)
    data = config.data
    num_microbatches = data.global_batch_size // (data.micro_batch_size * config.world_size)
    microbatches = max(1.0, num_microbatches / _most_microbatches(form))  # for each rehearsed one
    timed: list[RehearsedPeaks] = []
    for speed in speeds:
        untold = 0.0
        if isinstance(form, DdpForm):
            sent = sum(form.traffic(ranks[0]).bytes_by_kind.values())
            untold = sent / speed.link_bytes_per_second
        phases = [each.seconds[speed.label] for each in found.ranks]
        times = [step_seconds(each, microbatches, untold, speed.unsure) for each in phases]
        slowest = max(range(len(times)), key=lambda index: times[index][1])
        computes = compute_seconds(phases[slowest], microbatches)
        more = {"step_seconds": times[slowest], "compute_seconds": computes, "speed": speed.label}
        timed.append(replace(without, **more))
    return timed or [without]


def _rehearse(
    config: Config,
    machines: Machines,
    form: ClosedForm,
    ranks: list[int],
    speeds: Sequence[Speed],
    *,
    late: bool = False,
) -> Rehearsal:
    on_host = machines.device == "cpu"
    if on_host:
        config = deepcopy(config)
        config.cluster.device = "cpu"
    return rehearse(
        config,
        ranks=ranks,
        reads=False,
        speeds=speeds,
        ranks_per_host=machines.shape.ranks_per_node if on_host else None,
        most_microbatches=_most_microbatches(form),
        late=late,
        product_scratch=product_scratch_of(machines),
    )


def _most_microbatches(form: ClosedForm) -> int:
    """Return after how many microbatches further ones hold no more."""
    if not isinstance(form, ShardedForm):
        return MOST_MICROBATCHES_OF_OTHERS
    schedule = form.schedule
    waits = schedule.reduce_each == "step" or not schedule.overlap
    return MOST_MICROBATCHES + (0 if waits else schedule.facts.reductions_in_flight)


def _rank_peak(found: RehearsedRank) -> RankPeak:
    peak = found.peaks[found.peak_phase]
    return RankPeak(
        rank=found.rank,
        phase=found.peak_phase,
        num_bytes=peak.num_bytes,
        by_kind=dict(sorted(peak.by_kind.items(), key=lambda term: -term[1])),
        by_phase={phase: found.peaks[phase].num_bytes for phase in PHASES},
        largest=peak.largest,
    )
