"""What is written down about one step and one run: plain data without torch.

Bytes and seconds are those of one rank unless a name says otherwise; seconds are wall-clock time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MOMENTS = ("at_rest", "after_forward", "after_backward", "after_step")
KINDS = ("parameters", "gradients", "optimizer", "master", "buffers")


@dataclass
class Traffic:
    """What one rank sent in one step, by kind of message."""

    # gather | reduce | publish | norm | ... -> bytes, and number of collectives
    bytes_by_kind: dict[str, int] = field(default_factory=dict[str, int])
    calls_by_kind: dict[str, int] = field(default_factory=dict[str, int])


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
    phase_seconds: dict[str, float]  # forward | backward | step
    memory_bytes: dict[str, dict[str, int]] | None  # moment -> kind -> bytes
    peak_bytes: int | None  # most bytes allocated at once during this step
    allocated_bytes: int | None  # sum of all allocations of this step
    traffic: Traffic
    wire_bytes: int | None = None  # payload this rank's TCP connections carried
    # Training stood still so long before this step to copy a checkpoint; no other time includes it.
    saving_seconds: float = 0.0


@dataclass
class RankSummary:
    """What one rank held and sent: the part of a run's summary that every rank must contribute."""

    rank: int
    memory_bytes: dict[str, int]  # kind -> the most of it at any named moment
    total_bytes: int  # the most of all kinds together at one named moment: at most their sum
    peak_bytes: int | None  # most bytes allocated at once in any step; None if unknown
    sent_bytes_by_kind: dict[str, float]  # per step, mean over the measured steps
    calls_by_kind: dict[str, float]  # collectives per step, mean over the measured steps
    wire_bytes: float | None = None  # per step, mean over the measured ones; None if unknown
    num_private_units: int = 0  # units that found their pool in use and got their own memory
    # moment -> kind -> bytes; a moment read in several steps shows the step that held most
    memory_bytes_at: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])


@dataclass
class Spread:
    """One number per rank, with the two figures that tables show."""

    fullest: float  # the largest of all ranks
    mean: float  # over ranks
    per_rank: list[float]  # by rank


@dataclass
class MemorySummary:
    """Bytes of model states, each the most over the named moments, see RankSummary."""

    by_kind: dict[str, Spread]  # one entry for each of KINDS
    total: Spread
    peak: Spread | None  # None where some rank cannot know it
    # moment -> kind -> bytes, of the rank that holds most at that moment
    fullest_at: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])


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
    phase_seconds_median: dict[str, float]  # forward | backward | step
    tokens_per_second: float  # valid tokens of all ranks over the sum of step and saving times
    memory: MemorySummary
    # Bytes handed to other ranks, over the wire or in shared memory. None where neither engine nor kernel counts them.
    sent_bytes_per_step: Spread | None
    wire_bytes_per_step: Spread | None  # the part that TCP carried; None where it is unknown
    sent_bytes_by_kind: dict[str, float]  # bytes per step of the rank that sends most
    calls_by_kind: dict[str, float]  # collectives per step of the same rank
    saving_seconds: float = 0.0  # time in which measured steps stood still for checkpoints
    num_private_units: int = 0  # the most of all ranks, see RankSummary
    data_source: str = ""  # which text, from where, under which licence
    diverged_at: int | None = None  # the first step whose loss or gradient norm is not a number

    @property
    def verdict(self) -> str | None:
        return verdict_of(self.diverged_at)


def verdict_of(diverged_at: int | None) -> str | None:
    """Return what is wrong with a run that reached its last step, or None."""
    return None if diverged_at is None else f"diverged at step {diverged_at}"
