"""The columns of a sweep's table: those that identify a point, and those of its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zeroexp.measure.record import RunSummary, Spread
from zeroexp.report.settings import column_name, distinguishing_keys, setting_text
from zeroexp.tracking.run import Run

MIB = 2**20
ABSENT = "–"
SKEW = 1.02  # smaller differences between ranks are not shown


@dataclass(frozen=True)
class Column:
    name: str
    unit: str
    value: Callable[[Run], str]
    left: bool = False  # words are aligned left, numbers right


def point_columns(runs: Sequence[Run]) -> list[Column]:
    keys = distinguishing_keys(runs)
    return [
        Column("strategy", "", lambda run: run.strategy, left=True),
        Column("implementation", "", lambda run: run.implementation, left=True),
        *[_setting_column(key, keys) for key in keys],
        Column("ranks", "", lambda run: str(run.world_size)),
    ]


def traffic_columns(runs: Sequence[Run]) -> list[list[Column]]:
    """Return the traffic columns, each grouped with the column of its mean, if it has one."""
    return [
        _bytes_columns(runs, "sent/step", lambda s: s.sent_bytes_per_step),
        *(
            [_bytes_columns(runs, "by TCP", lambda s: s.wire_bytes_per_step)]
            if shares_memory(runs)
            else []
        ),
    ]


def memory_columns(runs: Sequence[Run]) -> list[list[Column]]:
    def kind(name: str, kind: str, *, rare: bool = False) -> list[Column]:
        return _bytes_columns(runs, name, lambda s: s.memory.by_kind[kind], rare=rare)

    return [
        kind("params", "parameters"),
        kind("grads", "gradients"),
        kind("optimizer", "optimizer"),
        kind("master", "master", rare=True),
        kind("buffers", "buffers", rare=True),
        _bytes_columns(runs, "total", lambda s: s.memory.total, always_mean=True),
        _bytes_columns(runs, "peak", lambda s: s.memory.peak),
        _bytes_columns(runs, "build", lambda s: s.memory.build_peak, rare=True),
    ]


def plan_column(runs: Sequence[Run]) -> list[Column]:
    """Return the column of the total that the closed forms say, unless no run has it."""
    if not any(run.summary and run.summary.plan for run in runs):
        return []
    total = _number_column(lambda s: s.plan["total"] / MIB if s.plan else None, ",.1f")
    return [Column("planned", "MiB", total)]


def _setting_column(key: str, keys: Sequence[str]) -> Column:
    name = column_name(key, keys)
    return Column(name, "", lambda run: setting_text(run.config.get(key, ABSENT)), left=True)


def _number_column(read: Callable[[RunSummary], float | None], form: str) -> Callable[[Run], str]:
    def text(run: Run) -> str:
        value = read(run.summary) if run.summary else None
        return ABSENT if value is None else format(value, form)

    return text


def _bytes_columns(
    runs: Sequence[Run],
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

        return Column(name, "MiB", _number_column(mebibytes, ",.1f"))

    all_ranks = [ranks for run in runs if run.summary and (ranks := spread(run.summary))]
    if rare and not any(ranks.fullest for ranks in all_ranks):
        return []
    columns = [column(name, lambda ranks: ranks.fullest)]
    if always_mean or any(ranks.fullest > SKEW * ranks.mean for ranks in all_ranks):
        columns.append(column("mean", lambda ranks: ranks.mean))
    return columns


def loss_columns(runs: Sequence[Run]) -> list[Column]:
    """Return the column of the loss, and one of the validation loss if some run has one."""
    validated = any(run.summary and run.summary.validation_loss is not None for run in runs)
    return [LOSS, VALIDATION] if validated else [LOSS]


def time_columns(runs: Sequence[Run]) -> list[Column]:
    """Return the columns of time, with the utilisation where some run knows it."""
    peaks = peak_flops_by_name(runs)

    def percent(summary: RunSummary) -> float | None:
        share = utilisation(summary, peaks)
        return None if share is None else 100 * share

    return [*TIMES, Column("MFU", "%", _number_column(percent, ".1f"))] if peaks else TIMES


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
    told = [
        f"{peak / 1e12:,.3g} TFLOP/s a rank ({name})"
        for name, peak in peak_flops_by_name(runs).items()
    ]
    return (
        f"MFU: the operations that the model needs, as a share of {' or '.join(told)}."
        if told
        else ""
    )


def peak_name(summary: RunSummary) -> str:
    return summary.peak_flops_name or summary.peak_flops_source


def shares_memory(runs: Sequence[Run]) -> bool:
    """Do ranks share memory? They do if they exchange more bytes than TCP carried."""
    pairs = [
        (run.summary.sent_bytes_per_step, run.summary.wire_bytes_per_step)
        for run in runs
        if run.summary
    ]
    return any(sent and wire and sent.mean > SKEW * wire.mean for sent, wire in pairs)


def _status_cell(run: Run) -> str:
    reason = (run.reason or "").strip()
    status = run.status if run.num_attempts == 1 else f"{run.status} (attempt {run.num_attempts})"
    return f"{status}: {reason.splitlines()[0]}" if reason else status


LOSS = Column("loss", "last step", _number_column(lambda s: s.final_loss, ".4f"))
VALIDATION = Column("validation", "loss", _number_column(lambda s: s.validation_loss, ".4f"))
TIMES = [
    Column("step", "ms median", _number_column(lambda s: s.step_seconds_median * 1e3, ",.1f")),
    Column("step", "ms p95", _number_column(lambda s: s.step_seconds_p95 * 1e3, ",.1f")),
    Column("tokens/s", "all ranks", _number_column(lambda s: s.tokens_per_second, ",.0f")),
]
STATUS = Column("status", "", _status_cell, left=True)
