"""Records of one step and one run: plain data without torch.

Bytes and seconds are those of one rank unless a name says otherwise; seconds are wall-clock time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import Any

MOMENTS = ("at_rest", "after_forward", "after_backward", "after_step")
# secondary: copies of parameters for gathers inside of a node (strategy.secondary_partition).
KINDS = ("parameters", "gradients", "optimizer", "master", "secondary", "buffers")
# Further kinds, in no total: states that rest on the host instead (strategy.offload), there in files that are mapped
# into its memory (strategy.offload_folder), and what of these files lies in memory just now.
OFF_DEVICE = HOST, FILES, RESIDENT = "host", "files", "resident"
# A further kind on the device, of seldom synchronised replicas: weights before the interval, and outer momentum.
OUTER = "outer"
# What the bytes at a peak are for. The first five are kinds; "pools" and "buckets" are the kind "buffers".
CAUSES = (
    *("parameters", "gradients", "optimizer", "master", "secondary"),
    "pools",  # memory that units are gathered into
    "buckets",  # gradients and parameters packed for the wire, by our engine or inside of DDP
    "shared memory",  # what ranks of one host share beyond the kinds above: slots of reductions
    "activations",  # what forward keeps for backward
    "logits",  # the model's output, the loss, and their gradients
    "temporaries",  # what an operator allocates on its way, gradients of activations too
    "backend",  # what a collective of the backend allocates
    "other",  # what was there before the step and is no model state: data, tables of positions
)
# Of a rehearsal: the range of a step's seconds, and what is expected.
STEP_SECONDS = ("step_seconds_least", "step_seconds", "step_seconds_most")
ALL_RANKS = "all"  # in place of a rank: a collective was waited for, which tells nobody's name


@dataclass
class Traffic:
    """Bytes and collectives that one rank sent in one step, by kind of message."""

    # gather | reduce | publish | norm | ... -> bytes, and number of collectives
    bytes_by_kind: dict[str, int] = field(default_factory=dict[str, int])
    calls_by_kind: dict[str, int] = field(default_factory=dict[str, int])
    # to_host | to_device -> bytes between this rank's device and its host, which are sent to nobody
    bus_bytes: dict[str, int] = field(default_factory=dict[str, int])


def sum_of_traffic(parts: Iterable[Traffic]) -> Traffic:
    """Return the sum of these parts, kind by kind."""
    total = Traffic()
    for part in parts:
        for name in ("bytes_by_kind", "calls_by_kind", "bus_bytes"):
            sums = getattr(total, name)
            for kind, number in getattr(part, name).items():
                sums[kind] = sums.get(kind, 0) + number
    return total


def kinds_in(moments: Iterable[Mapping[str, float]]) -> tuple[str, ...]:
    """Return the kinds of memory that rest on the device: KINDS, and OUTER where any of these has it."""
    return (*KINDS, OUTER) if any(OUTER in held for held in moments) else KINDS


def on_device(held: Mapping[str, float]) -> float:
    return sum(num_bytes for kind, num_bytes in held.items() if kind not in OFF_DEVICE)


@dataclass
class VerbSeconds:
    """Seconds of one verb (gather, reduce, hand_over, publish, loss, ...) on one rank, see communication_overlap.py."""

    count: float = 0  # moves
    working: float = 0.0  # this rank's thread packs, copies, sums
    overlapped: float = 0.0  # in flight while the rank computes
    exposed: float = 0.0  # the rank waits and does nothing else


@dataclass
class Peak:
    """The moment of one step at which most was allocated, told by cause. It is read in traced steps."""

    step: int
    num_bytes: int  # the sum of bytes_by_cause
    bytes_by_cause: dict[str, int]  # cause of CAUSES -> bytes; without those that are 0
    operator: str  # the operator whose allocation made the peak, as torch names it
    verb: str | None  # the verb of the engine in which that was, with its unit
    phase: str  # data | forward | backward | optimizer | step
    unit: str | None  # the block whose forward or backward ran
    seconds: float  # since the step began
    step_seconds: float  # of this very step, which is slower than others


@dataclass
class StepRecord:
    """One optimizer step as one rank saw it; `loss`, `grad_norm` and `num_tokens` are global.

    Bytes are None where they were not read or can not be known.
    """

    step: int  # 0-based, warm-up steps included
    warmup: bool  # the summary's times leave warm-up steps out
    samples_seen: int  # global position in the data after this step
    loss: float  # mean over the step's valid tokens of all ranks
    grad_norm: float  # global L2 norm before clipping
    lr: float
    num_tokens: int  # valid tokens of all ranks
    step_seconds: float  # the whole step, without the time spent reading memory
    phase_seconds: dict[str, float]  # data | forward | backward | optimizer | step
    memory_bytes: dict[str, dict[str, int]] | None  # moment -> kind -> bytes
    peak_bytes: int | None  # most bytes allocated at once during this step
    allocated_bytes: int | None  # sum of all allocations of this step
    traffic: Traffic
    # What the loss was multiplied by; where the norm is not finite then, nothing was updated. None: no float16.
    loss_scale: float | None = None
    # most bytes allocated at once as memory of the host; None where nothing rests there, or on a GPU
    host_peak_bytes: int | None = None
    wire_bytes: int | None = None  # payload this rank's TCP connections carried
    # payload that this rank's node sent over its link (cluster.link), all its ranks
    link_bytes: int | None = None
    # Training stood still so long before this step to copy a checkpoint; no other time includes it.
    saving_seconds: float = 0.0
    # The mean over the validation samples after this step; None where there was no validation.
    validation_loss: float | None = None
    validation_accuracy: float | None = None  # the share of its labels; of a classification alone
    # verb -> seconds of the moves that ended in this step; native engines show only the loop's own
    verbs: dict[str, VerbSeconds] = field(default_factory=dict[str, VerbSeconds])
    # rank (as text, or "all") -> seconds that this rank waited for it; part of the verbs' exposed seconds
    waited_seconds: dict[str, float] = field(default_factory=dict[str, float])
    peak: Peak | None = None  # in traced steps
    traced: bool = False  # instruments slowed this step down, so that no time counts it
    # Before every tenth step, see measure/drift.py; None in others.
    resting_bytes: int | None = None  # allocated by torch
    num_objects: int | None = None  # blocks that Python's allocator has given out
    collection_seconds: float | None = None  # of a full garbage collection then


@dataclass
class RankTimes:
    """Seconds of one rank's steps by where they went, each the mean over the measured steps."""

    rank: int
    step_seconds: float
    phase_seconds: dict[str, float]  # the phases add up to the step
    verbs: dict[str, VerbSeconds]  # parts of the phases, not beside them
    waited_seconds: dict[str, float]  # rank or "all" -> seconds that this rank waited for it

    @property
    def exposed_seconds(self) -> float:
        """Seconds of a step in which this rank did nothing but wait for others, as far as its engine shows it."""
        return sum(verb.exposed for verb in self.verbs.values())

    @property
    def overlapped_seconds(self) -> float:
        """Seconds in flight while this rank computes, which cost its step nothing."""
        return sum(verb.overlapped for verb in self.verbs.values())


def mean_verb_seconds(ranks: Sequence[RankTimes], part: str) -> dict[str, float]:
    """Return the mean over ranks of this field of VerbSeconds, by verb."""
    verbs = dict.fromkeys(verb for rank in ranks for verb in rank.verbs)
    none = VerbSeconds()
    return {
        verb: fmean(getattr(rank.verbs.get(verb, none), part) for rank in ranks) for verb in verbs
    }


@dataclass
class RankSummary:
    """Memory and traffic of one rank; every rank must contribute its own to the run's summary."""

    rank: int
    memory_bytes: dict[str, int]  # kind -> the most of it at any named moment
    # One number for each Spread of MemorySummary, by its name there; None if unknown.
    memory: dict[str, float | None]
    # wire | link | bus -> bytes per step, mean over the measured ones; None if unknown
    traffic: dict[str, float | None]
    sent_bytes_by_kind: dict[str, float]  # likewise
    calls_by_kind: dict[str, float]  # collectives per step, mean over the measured steps
    # moment -> kind -> bytes; a moment read in several steps shows the step that held most
    memory_bytes_at: dict[str, dict[str, int]]
    times: RankTimes
    peak: Peak | None  # of the traced step that held most
    drift: dict[str, str]  # what rises with the steps, and how


@dataclass
class Spread:
    """One number per rank, with the two figures that tables show."""

    fullest: float  # the largest of all ranks
    mean: float  # over ranks
    per_rank: list[float]  # by rank


def figure(name: str) -> Any:
    """Declare a Spread of bytes that may be unknown, with its name in tables; tables and MLflow show each of these."""
    return field(default=None, metadata={"name": name})


def figures_of(record: type[MemorySummary | RunSummary]) -> dict[str, str]:
    """Return the name in tables of each `figure` of a record, by field."""
    return {each.name: each.metadata["name"] for each in fields(record) if "name" in each.metadata}


@dataclass
class MemorySummary:
    """Bytes of model states, each the most over the named moments, see RankSummary."""

    by_kind: dict[str, Spread]  # one entry for each of KINDS, and for OUTER where it is held
    total: Spread
    peak: Spread | None  # None where some rank cannot know it
    # moment -> kind -> bytes, of the rank that holds most at that moment
    fullest_at: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    # moment -> kind -> bytes, the mean over ranks
    mean_at: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    peaks: list[Peak | None] = field(default_factory=list[Peak | None])  # by rank, see Peak
    # Most bytes allocated at once while model and engine are built; None where some rank cannot know it.
    build_peak: Spread | None = figure("build")
    # States on the host, and the most allocated at once there where that is counted; None: nothing rests there.
    host: Spread | None = figure("host")
    host_peak: Spread | None = figure("host peak")
    # States in files, in no other figure, and what of these lies in memory.
    files: Spread | None = figure("files")
    resident: Spread | None = figure("resident")


@dataclass
class RunSummary:
    """One run in numbers. Times are rank 0's over the measured steps, without warm-up; losses are global."""

    world_size: int
    num_steps: int  # measured
    num_warmup_steps: int
    initial_loss: float  # loss of the first step, warm-up included
    final_loss: float
    step_seconds_median: float
    step_seconds_p95: float
    phase_seconds_median: dict[str, float]  # data | forward | backward | optimizer | step
    tokens_per_second: float  # valid tokens of all ranks over the sum of step and saving times
    memory: MemorySummary
    # Bytes handed to other ranks, over the wire or in shared memory. None where neither engine nor kernel counts them.
    sent_bytes_per_step: Spread | None
    wire_bytes_per_step: Spread | None  # the part that TCP carried; None where it is unknown
    sent_bytes_by_kind: dict[str, float]  # bytes per step of the rank that sends most
    calls_by_kind: dict[str, float]  # collectives per step of the same rank
    saving_seconds: float = 0.0  # time in which measured steps stood still for checkpoints
    data_source: str = ""  # which text, from where, under which licence
    diverged_at: int | None = None  # the first step whose loss or gradient norm is not a number
    validation_loss: float | None = None  # after the last step; None without validation
    validation_accuracy: float | None = None  # beside it; None but for a classification
    num_parameters: int | None = None  # numbers in the whole model
    # By rank, what its node sent over cluster.link.
    link_bytes_per_step: Spread | None = figure("by link")
    # Both ways between device and host, where states rest there.
    bus_bytes_per_step: Spread | None = figure("over bus")
    # What closed forms say of the same run (plan/outcome.py), bytes of the fullest rank: by kind of memory,
    # `total`, `after_backward` (all kinds at that moment), and where the engine counts what it sends `sent`, and `link`
    # of the mean node; `host` and `bus` where states rest on the host, and `files`.
    plan: dict[str, float] = field(default_factory=dict[str, float])
    # What a rehearsal says of the same run: `peak` bytes, `calls`, collectives of a step where the engine counts them,
    # and STEP_SECONDS where the machine is calibrated; empty where there was none, and why.
    rehearsed: dict[str, float] = field(default_factory=dict[str, float])
    not_rehearsed: str | None = None
    # By rank.
    times: list[RankTimes] = field(default_factory=list[RankTimes])
    # What rises with the steps (measure/drift.py) -> by how much, on the first rank where it does.
    drift: dict[str, str] = field(default_factory=dict[str, str])
    # Of all ranks: what the model needs, nothing recomputed.
    model_flops_per_step: float | None = None
    peak_flops_per_second: float | None = None  # of one rank, see peak_flops_source
    peak_flops_source: str = ""  # named | datasheet | calibrated, see measure/peak_flops.py
    peak_flops_name: str = ""  # what it is the peak of: "NVIDIA H100 80GB HBM3, dense bfloat16"

    @property
    def plan_errors(self) -> dict[str, float]:
        """What was measured less what was planned, in bytes of the fullest rank."""
        measured = {kind: ranks.fullest for kind, ranks in self.memory.by_kind.items()}
        measured["total"] = self.memory.total.fullest
        measured["after_backward"] = on_device(self.memory.fullest_at.get("after_backward", {}))
        measured["sent"] = sum(v for k, v in self.sent_bytes_by_kind.items() if k != "loss")
        if self.link_bytes_per_step is not None:
            measured["link"] = self.link_bytes_per_step.mean
        memory, bus = self.memory, self.bus_bytes_per_step
        for name, ranks in (("host", memory.host), ("files", memory.files), ("bus", bus)):
            measured[name] = ranks.fullest if ranks else 0.0
        return {name: measured[name] - planned for name, planned in self.plan.items()}

    @property
    def model_flops_per_second(self) -> float | None:
        """Operations per second of all ranks that the model needs, in the median step."""
        if self.model_flops_per_step is None:
            return None
        return self.model_flops_per_step / self.step_seconds_median

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the share of the ranks' peak that the model's own FLOPs took."""
        if self.model_flops_per_step is None or self.peak_flops_per_second is None:
            return None
        peak = self.peak_flops_per_second * self.world_size * self.step_seconds_median
        return self.model_flops_per_step / peak

    @property
    def verdict(self) -> str | None:
        return verdict_of(self.diverged_at)


def verdict_of(diverged_at: int | None) -> str | None:
    """Return what is wrong with a run that reached its last step, or None."""
    return None if diverged_at is None else f"diverged at step {diverged_at}"
