"""The columns of a sweep's results: every table and export takes its own from these, with keys, units and digits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from zeroexp.config.keys import ConfigError
from zeroexp.measure.record import (
    KINDS,
    OUTER,
    STEP_SECONDS,
    MemorySummary,
    RunSummary,
    figures_of,
)
from zeroexp.report.conclusions import Conclusions
from zeroexp.report.measured_points import MeasuredPoint, distinguishing_keys
from zeroexp.report.statistics import drift_lines, step_time_interval, why_doubtful

MIB = 2**20
SKEW = 1.02  # smaller differences between ranks are not shown
ABSENT = "–"
LONGEST = 24  # characters of a setting; the end of a path says more than its beginning
SHORT = {"parameters": "params", "gradients": "grads"}
FOR_READERS = ("interval", "predicted", "outcome")  # programs have their parts
# What a printed page has room for: parts and single columns, in this order.
PRINTED = ("memory", "traffic", "step_seconds", "verdict", "tokens_per_second", "losses")


@dataclass(frozen=True)
class Column:
    """A number or a word of each point; one without a name is for programs alone."""

    key: str  # in CSV, JSON and --columns, with the unit of `value`
    value: Callable[[MeasuredPoint], Any]  # None where it is unknown
    name: str = ""
    unit: str = ""  # of value × scale
    form: str = ""  # of numbers; words have none, and are aligned left
    scale: float = 1
    part: str = ""  # point | losses | times | memory | plan | traffic | verdict | status
    # Why a reader should not trust it.
    doubt: Callable[[MeasuredPoint], str | None] = lambda _: None
    # Whether a table for readers needs it; without a rule it does where some point has a value.
    is_needed: Callable[[Sequence[MeasuredPoint]], bool] | None = None
    spelled: Callable[[str], str] = str  # a word as a table for readers has it

    def text(self, point: MeasuredPoint) -> str:
        value = self.value(point)
        if value is None:
            return ABSENT
        if not self.form:
            return self.spelled(str(value))
        return format(value * self.scale, self.form) + (" ?" if self.doubt(point) else "")

    def differs(self, points: Sequence[MeasuredPoint]) -> bool:
        texts = self.text if self.form else self.value
        return len({texts(point) for point in points}) > 1

    def is_shown(self, points: Sequence[MeasuredPoint]) -> bool:
        if self.is_needed is not None:
            return self.is_needed(points)
        values = [self.value(point) for point in points]
        # Bytes of a kind that nobody holds say nothing, as other zeros do.
        says_zero = self.form and self.unit != "MiB"
        return any(value is not None if says_zero else value for value in values)


def columns_to_show(
    points: Sequence[MeasuredPoint], conclusions: Conclusions | None = None
) -> list[Column]:
    """Return the columns that have something to say of these points, in the order of a wide table."""
    return [c for c in all_columns(points, conclusions) if c.name and c.is_shown(points)]


def printed_columns(points: Sequence[MeasuredPoint], conclusions: Conclusions) -> list[Column]:
    """Return what a printed page has room for: bytes of the fullest rank, the median step, its verdict, losses."""
    columns = [c for c in columns_to_show(points, conclusions) if not c.key.endswith("_mean")]
    return [column for word in PRINTED for column in columns if word in (column.part, column.key)]


def exported_columns(points: Sequence[MeasuredPoint], conclusions: Conclusions) -> list[Column]:
    return [c for c in all_columns(points, conclusions) if c.key not in FOR_READERS]


def of_parts(columns: Sequence[Column], *parts: str) -> list[Column]:
    return [column for column in columns if column.part in parts]


def chosen_columns(columns: Sequence[Column], keys: Sequence[str]) -> list[Column]:
    """Return the columns of these keys. Raises ConfigError for a key that none has.

    A mean, which may stand apart from the column of the fullest rank, is named after it.
    """
    by_key = {column.key: column for column in columns}
    for key in keys:
        if key not in by_key:
            raise ConfigError(f"--columns {key}: no such column; use some of {', '.join(by_key)}")
    fullest = [by_key.get(key.removesuffix("_mean"), by_key[key]) for key in keys]
    return [
        replace(by_key[key], name=f"{of.name} mean") if key == f"{of.key}_mean" else of
        for key, of in zip(keys, fullest, strict=True)
    ]


def beside_names(names: Sequence[Column], columns: Sequence[Column]) -> list[Column]:
    """Return the columns behind those that name a point, or as they are where who chose them chose such names too."""
    return [*([] if of_parts(columns, "point") else names), *columns]


def all_columns(
    points: Sequence[MeasuredPoint], conclusions: Conclusions | None = None
) -> list[Column]:
    """Return every column, for programs and for who chooses."""
    return [
        POINT,
        *point_columns(points),
        *_numbers(points),
        *(_conclusion_columns(conclusions) if conclusions else []),
        *_columns_for_programs(points),
        STATUS,
    ]


# ---- what tells points apart


def point_columns(points: Sequence[MeasuredPoint]) -> list[Column]:
    """Return strategy, implementation, the settings that tell points with equal ones apart, and ranks."""
    keys = distinguishing_keys([point.run for point in points])

    def setting(key: str) -> Column:
        def value(point: MeasuredPoint) -> str | None:
            return point.run.config.get(key)

        name = column_name(key, keys)
        return Column(key, value, name, spelled=setting_text, part="point")

    return [
        Column("strategy", lambda p: p.run.strategy, "strategy", part="point"),
        Column("implementation", lambda p: p.run.implementation, "implementation", part="point"),
        *map(setting, keys),
        Column("world_size", lambda p: p.run.world_size, "ranks", form="d", part="point"),
    ]


def column_name(key: str, keys: Sequence[str]) -> str:
    """Shorten model.name to model and data.seq_len to seq_len; keep the full key if two short names are equal."""

    def short(key: str) -> str:
        return key.removesuffix(".name").rpartition(".")[2]

    return short(key) if [*map(short, keys)].count(short(key)) == 1 else key


def setting_text(value: str) -> str:
    if "." in value or "e" in value:
        with contextlib.suppress(ValueError):
            return format(float(value), ".6g")
    return value if len(value) <= LONGEST else "…" + value[1 - LONGEST :]


# ---- numbers of runs that came to their end

MEBIBYTES = (",.1f", 1 / MIB)


def _numbers(points: Sequence[MeasuredPoint]) -> list[Column]:
    """Return losses, times, memory, what was planned of them, and traffic."""
    peaks = peaks_of(points)
    losses, times, plan = (1, "losses"), (",.1f", 1e3, "times"), (*MEBIBYTES, "plan")
    return [
        _number("final_loss", "loss", "last step", ".4f", *losses),
        _number("validation_loss", "validation", "loss", ".4f", *losses),
        _number("validation_accuracy", "accuracy", "%", ".2f", 100, "losses"),
        _number(
            "step_seconds",
            "step",
            "ms median",
            *times,
            path="step_seconds_median",
            doubt=why_doubtful,
        ),
        _number("step_seconds_p95", "step", "ms p95", *times),
        _number("tokens_per_second", "tokens/s", "all ranks", ",.0f", 1, "times"),
        Column("mfu", lambda p: utilisation(p, peaks), "MFU", "%", ".1f", 100, "times"),
        *chain.from_iterable(
            _spread(f"{kind}_bytes", f"memory.by_kind.{kind}", SHORT.get(kind, kind))
            for kind in (*KINDS, OUTER)
        ),
        *_spread("total_bytes", "memory.total", "total"),
        *_spread("peak_bytes", "memory.peak", "peak", bool),  # unknown without a compiler: –
        _number("planned_peak_bytes", "planned", "MiB", *plan, path="rehearsed.peak"),
        *chain.from_iterable(
            _spread(f"{each}_bytes", f"memory.{each}", name)
            for each, name in figures_of(MemorySummary).items()
        ),
        Column("predicted", _predicted, "predicted", "step, ms", part="plan"),
        *(_number(f"planned_{name}", path=f"rehearsed.{name}") for name in STEP_SECONDS),
        _number("planned_bytes", path="plan.total"),
        _number("not_rehearsed"),
        *_spread("sent_bytes_per_step", "sent_bytes_per_step", "sent/step"),
        *_spread("wire_bytes_per_step", "wire_bytes_per_step", "by TCP", shares_memory),
        *chain.from_iterable(
            _spread(each, each, name) for each, name in figures_of(RunSummary).items()
        ),
    ]


def _number(
    key: str,
    *looks: Any,
    path: str = "",
    of: Callable[[MeasuredPoint], Any] = lambda p: p.pooled.summary,
    **more: Any,
) -> Column:
    """Return the column of what lies at this path, by default the key, of something of a point.

    Times are medians over repeats.
    """

    def value(point: MeasuredPoint) -> Any:
        found = of(point)
        for name in (path or key).split("."):
            found = found.get(name) if isinstance(found, dict) else getattr(found, name, None)
        return found

    return Column(key, value, *looks, **more)


def _spread(
    key: str,
    path: str,
    name: str,
    is_needed: Callable[[Sequence[MeasuredPoint]], bool] | None = None,
) -> list[Column]:
    """Return a column of the fullest rank, and one of the mean over ranks, shown if the ranks of some run differ."""

    def needs_mean(points: Sequence[MeasuredPoint]) -> bool:
        skewed = any((fullest.value(p) or 0) > SKEW * (mean.value(p) or 0) for p in points)
        return fullest.is_shown(points) and (name == "total" or skewed)

    looks = ("MiB", *MEBIBYTES, "traffic" if key.endswith("_per_step") else "memory")
    fullest = _number(key, name, *looks, path=f"{path}.fullest", is_needed=is_needed)
    mean = _number(f"{key}_mean", "mean", *looks, path=f"{path}.mean", is_needed=needs_mean)
    return [fullest, mean]


def _predicted(point: MeasuredPoint) -> str | None:
    """Return the range of the step's milliseconds, by a rehearsal."""
    rehearsed = point.summary.rehearsed if point.summary else {}
    times = [1e3 * rehearsed[key] for key in STEP_SECONDS[::2] if key in rehearsed]
    return "–".join(f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}" for ms in times) or None


def shares_memory(points: Sequence[MeasuredPoint]) -> bool:
    """Do ranks share memory? They do if they exchange more bytes than TCP carried."""
    summaries = [point.summary for point in points if point.summary]
    pairs = [(s.sent_bytes_per_step, s.wire_bytes_per_step) for s in summaries]
    return any(sent and wire and sent.mean > SKEW * wire.mean for sent, wire in pairs)


class PeakFlops(NamedTuple):
    """The most operations per second of one rank, and what it is the peak of."""

    name: str
    per_second: float


def utilisation(point: MeasuredPoint, peaks: Mapping[str, PeakFlops]) -> float | None:
    """Return the share of its ranks' peak that the model's operations take, by the peaks of `peaks_of`."""
    summary = point.pooled.summary
    rate = summary and summary.model_flops_per_second
    peak = peaks.get(point.name)
    return rate / (peak.per_second * point.run.world_size) if rate and peak else None


def peaks_of(points: Sequence[MeasuredPoint]) -> dict[str, PeakFlops]:
    """Return the peak of a rank of each point whose run knows it.

    A peak that several runs measured on one processor is the largest of theirs: a busy machine only makes it smaller,
    and points are compared with one another.
    """
    summaries = [(point, point.summary) for point in points if point.summary]
    known = [(p, s) for p, s in summaries if s.model_flops_per_step and s.peak_flops_per_second]
    # That of a data sheet holds beside any processor.
    measured = {p.name: _processor(p) for p, s in known if s.peak_flops_source == "calibrated"}
    names = {point.name: s.peak_flops_name or s.peak_flops_source for point, s in known}
    if len({*measured.values()}) > 1:
        names |= {name: f"{names[name]}, {processor}" for name, processor in measured.items()}
    most: dict[str, float] = {}
    for point, summary in known:
        name = names[point.name]
        most[name] = max(most.get(name, 0.0), summary.peak_flops_per_second or 0.0)
    return {point: PeakFlops(name, most[name]) for point, name in names.items()}


def _processor(point: MeasuredPoint) -> str:
    return point.run.environment.get("machine.processor", "unknown processor")


# ---- how points compare, and what programs want beside all that


def _conclusion_columns(conclusions: Conclusions) -> list[Column]:
    """Return what was reached over seeds, then the step time over that of the reference."""
    qualities = {quality.name: quality for quality in conclusions.qualities}
    reached = partial(_number, of=lambda p: qualities.get(p.name))
    compared = partial(_number, of=lambda p: conclusions.comparisons.get(p.name))
    return [
        reached("quality_deviation", "±", "over seeds", ".4f", part="losses", path="deviation"),
        reached("quality_verdict", "quality", "over seeds", part="losses", path="verdict"),
        reached("num_seeds", "seeds", "", "d", part="losses"),
        compared("ratio", "ratio", "", ".2f", part="verdict"),
        compared("interval", "95 %", part="verdict"),
        compared("verdict", "verdict", part="verdict"),
        compared("ratio_low", path="low"),
        compared("ratio_high", path="high"),
        compared("num_pairs"),
    ]


def _columns_for_programs(points: Sequence[MeasuredPoint]) -> list[Column]:
    peaks = peaks_of(points)
    summaries = [point.summary for point in points if point.summary]
    phases = dict.fromkeys(phase for s in summaries for phase in s.phase_seconds_median)

    return [
        Column("sweep", lambda p: p.run.sweep),
        Column("num_runs", lambda p: len(p.runs)),
        Column("status", lambda p: p.pooled.status),
        Column("reason", lambda p: p.pooled.reason),
        _number("step_seconds_low", path="low", of=step_time_interval),
        _number("step_seconds_high", path="high", of=step_time_interval),
        _number("interval_over", path="over", of=step_time_interval),
        *(_number(f"{each}_phase_seconds", path=f"phase_seconds_median.{each}") for each in phases),
        _number("model_flops_per_second"),
        Column("peak_flops_per_second", lambda p: getattr(peaks.get(p.name), "per_second", None)),
        Column("peak_flops", lambda p: getattr(peaks.get(p.name), "name", None)),
        _number("diverged_at"),
        Column("doubt", why_doubtful),
        Column("drift", lambda p: " ".join(drift_lines([p])) or None),
    ]


def status_column(points: Sequence[MeasuredPoint]) -> list[Column]:
    """Return it where a point has more to say than that it is done."""
    return [STATUS] if any(p.pooled.status != "done" or p.pooled.reason for p in points) else []


def _outcome(point: MeasuredPoint) -> str:
    run = point.pooled
    reason = (run.reason or "").strip()
    status = run.status if run.num_attempts == 1 else f"{run.status} (attempt {run.num_attempts})"
    return f"{status}: {reason.splitlines()[0]}" if reason else status


POINT = Column("point", lambda point: point.name, "point", part="point", is_needed=lambda _: False)
STATUS = Column("outcome", _outcome, "status", part="status")
