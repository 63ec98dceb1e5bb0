"""The columns of a sweep's results: every table takes its own from these, with their units and digits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zeroexp.measure.record import RunSummary, Spread
from zeroexp.report.settings import ABSENT, Column, point_columns
from zeroexp.tracking.run import Run

MIB = 2**20
SKEW = 1.02  # smaller differences between ranks are not shown


@dataclass(frozen=True)
class Columns:
    """The columns that these runs need; a group is one of the fullest rank and, where ranks differ, one of the mean."""

    point: list[Column]
    losses: list[Column]
    times: list[
        Column
    ]  # step, its 95th percentile, tokens/s, and the utilisation where some run knows it
    memory: list[list[Column]]
    planned: list[Column]
    traffic: list[list[Column]]
    status: Column

    @property
    def fullest(self) -> list[Column]:
        """Bytes of the fullest rank alone."""
        return [group[0] for group in [*self.memory, *self.traffic] if group]


def columns_of(runs: Sequence[Run]) -> Columns:
    summaries = [run.summary for run in runs if run.summary]

    def of_bytes(
        name: str, read: Callable[[RunSummary], Spread | None], **rules: bool
    ) -> list[Column]:
        return _bytes_columns(summaries, name, read, **rules)

    def of_kind(name: str, kind: str, **rules: bool) -> list[Column]:
        return of_bytes(name, lambda s: s.memory.by_kind[kind], **rules)

    return Columns(
        point=point_columns(runs),
        losses=[LOSS, *([VALIDATION] if any(map(VALIDATION.is_known, runs)) else [])],
        times=[STEP, STEP_P95, TOKENS, *_utilisation_column(runs)],
        memory=[
            of_kind("params", "parameters"),
            of_kind("grads", "gradients"),
            of_kind("optimizer", "optimizer"),
            of_kind("master", "master", rare=True),
            of_kind("buffers", "buffers", rare=True),
            of_bytes("total", lambda s: s.memory.total, always_mean=True),
            of_bytes("peak", lambda s: s.memory.peak),
            of_bytes("build", lambda s: s.memory.build_peak, rare=True),
        ],
        planned=[PLANNED] if any(map(PLANNED.is_known, runs)) else [],
        traffic=[
            of_bytes("sent/step", lambda s: s.sent_bytes_per_step),
            *([of_bytes("by TCP", lambda s: s.wire_bytes_per_step)] if shares_memory(runs) else []),
        ],
        status=STATUS,
    )


def printed_columns(runs: Sequence[Run]) -> list[Column]:
    """Return the results that a printed page has room for: bytes of the fullest rank, the median step, losses."""
    columns = columns_of(runs)
    return [*columns.fullest, STEP, TOKENS, *columns.losses]


def number_column(
    name: str, unit: str, read: Callable[[RunSummary], float | None], form: str
) -> Column:
    def text(run: Run) -> str:
        value = read(run.summary) if run.summary else None
        return ABSENT if value is None else format(value, form)

    return Column(name, unit, text)


def _bytes_columns(
    summaries: Sequence[RunSummary],
    name: str,
    spread: Callable[[RunSummary], Spread | None],
    *,
    rare: bool = False,  # True: no column if all values are zero
    always_mean: bool = False,
) -> list[Column]:
    """Return a column of the fullest rank, and one of the mean over ranks if the ranks of some run differ."""

    def column(name: str, part: Callable[[Spread], float]) -> Column:
        def mebibytes(summary: RunSummary) -> float | None:
            ranks = spread(summary)
            return None if ranks is None else part(ranks) / MIB

        return number_column(name, "MiB", mebibytes, ",.1f")

    all_ranks = [ranks for summary in summaries if (ranks := spread(summary))]
    if rare and not any(ranks.fullest for ranks in all_ranks):
        return []
    columns = [column(name, lambda ranks: ranks.fullest)]
    if always_mean or any(ranks.fullest > SKEW * ranks.mean for ranks in all_ranks):
        columns.append(column("mean", lambda ranks: ranks.mean))
    return columns


def _utilisation_column(runs: Sequence[Run]) -> list[Column]:
    peaks = peak_flops_by_name(runs)

    def percent(summary: RunSummary) -> float | None:
        share = utilisation(summary, peaks)
        return None if share is None else 100 * share

    return [number_column("MFU", "%", percent, ".1f")] if peaks else []


def utilisation(summary: RunSummary, peaks: Mapping[str, float]) -> float | None:
    """Return the share of its ranks' peak that the model's operations take, by the peaks of `peak_flops_by_name`."""
    rate, peak = summary.model_flops_per_second, peaks.get(peak_name(summary))
    return rate / (peak * summary.world_size) if rate and peak else None


def peak_flops_by_name(runs: Sequence[Run]) -> dict[str, float]:
    """Return the peaks of a rank that runs know, operations per second by name.

    A peak that several runs measured is the largest of theirs: a busy machine only makes it smaller, and points are
    compared with one another.
    """
    peaks: dict[str, float] = {}
    for summary in (run.summary for run in runs if run.summary):
        if summary.model_flops_per_step and summary.peak_flops_per_second:
            name = peak_name(summary)
            peaks[name] = max(peaks.get(name, 0.0), summary.peak_flops_per_second)
    return peaks


def describe_peak_flops(runs: Sequence[Run]) -> str:
    """Say what utilisation is a share of; empty where no run knows it."""
    peaks = peak_flops_by_name(runs).items()
    shown = " or ".join(f"{peak / 1e12:,.3g} TFLOP/s a rank ({name})" for name, peak in peaks)
    return f"MFU: the operations that the model needs, as a share of {shown}." if shown else ""


def peak_name(summary: RunSummary) -> str:
    return summary.peak_flops_name or summary.peak_flops_source


def shares_memory(runs: Sequence[Run]) -> bool:
    """Do ranks share memory? They do if they exchange more bytes than TCP carried."""
    pairs = [(s.sent_bytes_per_step, s.wire_bytes_per_step) for run in runs if (s := run.summary)]
    return any(sent and wire and sent.mean > SKEW * wire.mean for sent, wire in pairs)


def _status_cell(run: Run) -> str:
    reason = (run.reason or "").strip()
    status = run.status if run.num_attempts == 1 else f"{run.status} (attempt {run.num_attempts})"
    return f"{status}: {reason.splitlines()[0]}" if reason else status


LOSS = number_column("loss", "last step", lambda s: s.final_loss, ".4f")
VALIDATION = number_column("validation", "loss", lambda s: s.validation_loss, ".4f")
STEP = number_column("step", "ms median", lambda s: s.step_seconds_median * 1e3, ",.1f")
STEP_P95 = number_column("step", "ms p95", lambda s: s.step_seconds_p95 * 1e3, ",.1f")
TOKENS = number_column("tokens/s", "all ranks", lambda s: s.tokens_per_second, ",.0f")
PLANNED = number_column(
    "planned", "MiB", lambda s: s.plan["total"] / MIB if "total" in s.plan else None, ",.1f"
)
STATUS = Column("status", "", _status_cell, left=True)
