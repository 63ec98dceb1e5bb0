"""The peak of a planned point with activations, logits and temporaries, by a rehearsal of a few of its ranks.

Rehearsed are the first rank, the one whose closed form is the largest, and the last. Two microbatches are enough: the
second finds the gradients of the first, and further ones find the same.

[Note: ranks of one host] A rehearsal moves messages as GPUs do. CPU ranks of one host read each other's memory
instead. There messages and pools are left out of the rehearsed peak, and the closed form of what such ranks share,
which a test compares with running engines to the byte, takes their place.
"""

from __future__ import annotations

from copy import deepcopy

from zeroexp.config import Config
from zeroexp.plan.closed_forms import ShardedForm
from zeroexp.plan.form_of_config import ClosedForm
from zeroexp.plan.machines import Machines
from zeroexp.plan.outcome import Outcome, RankPeak, RehearsedPeaks
from zeroexp.plan.rehearse import PHASES, RehearsedRank, rehearse
from zeroexp.plan.speed import Speed
from zeroexp.plan.storages import Peak
from zeroexp.plan.timing import step_seconds
from zeroexp.plan.torch_closed_forms import DdpForm

MOST_MICROBATCHES = 2


def rehearse_point(
    config: Config, machines: Machines, form: ClosedForm, outcome: Outcome, speed: Speed
) -> RehearsedPeaks:
    """Rehearse a point that has been planned. Raises ConfigError in one line for what can not be rehearsed."""
    per_rank = outcome.peak.per_rank
    ranks = {0, per_rank.index(max(per_rank)), config.world_size - 1}
    return _rehearse_ranks(config, machines, form, one_rank_of_each_class(form, ranks), speed)


def rehearse_fullest_rank(
    config: Config, machines: Machines, form: ClosedForm, outcome: Outcome
) -> RankPeak:
    """Rehearse the rank alone whose closed form is the largest."""
    per_rank = outcome.peak.per_rank
    return _rehearse_ranks(config, machines, form, [per_rank.index(max(per_rank))]).fullest


def one_rank_of_each_class(form: ClosedForm, ranks: set[int]) -> list[int]:
    """Return the ranks, of those that hold and send as much only the first."""
    first = {form.equivalence_key(rank): rank for rank in sorted(ranks, reverse=True)}
    return sorted(first.values())


def _rehearse_ranks(
    config: Config,
    machines: Machines,
    form: ClosedForm,
    ranks: list[int],
    speed: Speed | None = None,
) -> RehearsedPeaks:
    shares = isinstance(form, ShardedForm) and form.schedule.facts.shares_memory
    shorter = _shortened(config, form if shares else None, machines)
    found = rehearse(shorter, ranks=ranks, reads=False, speed=speed)
    peaks = [_rank_peak(rank, form if shares else None) for rank in found.ranks]
    if speed is None:
        return RehearsedPeaks(peaks, found.device, found.depths)
    microbatches = config.data.global_batch_size / shorter.data.global_batch_size
    untold = 0.0
    if isinstance(form, DdpForm):
        sent = sum(form.traffic(ranks[0]).bytes_by_kind.values())
        untold = sent / speed.link_bytes_per_second
    times = [step_seconds(each.seconds, microbatches, untold, speed.unsure) for each in found.ranks]
    slowest = max(times, key=lambda seconds: seconds[1])
    return RehearsedPeaks(peaks, found.device, found.depths, slowest, speed.label)


def _shortened(config: Config, form: ClosedForm | None, machines: Machines) -> Config:
    config = deepcopy(config)
    if machines.device == "cpu":
        config.cluster.device = "cpu"
    data = config.data
    step = data.micro_batch_size * config.world_size
    data.global_batch_size = min(data.global_batch_size, MOST_MICROBATCHES * step)
    if (
        isinstance(form, ShardedForm)
        and form.schedule.bucket_bytes
        and config.strategy.bucket_mb is None
    ):
        config.strategy.bucket_mb = form.schedule.bucket_bytes / 2**20
    return config


def _rank_peak(found: RehearsedRank, form: ClosedForm | None) -> RankPeak:
    """Return the peak; `form` is given where messages and pools are its, see [Note: ranks of one host]."""
    peaks = {phase: found.peaks[phase] for phase in PHASES}
    if isinstance(form, ShardedForm):
        peaks = {
            phase: _with_shared_memory(found.peaks_without_transport[phase], form, found.rank)
            for phase in PHASES
        }
    phase = max(peaks, key=lambda phase: peaks[phase].num_bytes)
    peak = peaks[phase]
    return RankPeak(
        rank=found.rank,
        phase=phase,
        num_bytes=peak.num_bytes,
        by_kind=dict(sorted(peak.by_kind.items(), key=lambda term: -term[1])),
        by_phase={phase: each.num_bytes for phase, each in peaks.items()},
        largest=peak.largest,
    )


def _with_shared_memory(peak: Peak, form: ShardedForm, rank: int) -> Peak:
    shared = form.buffer_bytes("after_backward", rank)
    named = {name: num_bytes for name, num_bytes in shared.items() if num_bytes}
    return Peak(peak.num_bytes + sum(named.values()), {**peak.by_kind, **named}, peak.largest)
