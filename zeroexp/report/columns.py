"""The columns of a sweep's results: every table and export takes its own from these, with keys, units and digits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any

from zeroexp.config.keys import ConfigError
from zeroexp.measure.record import OUTER, STEP_SECONDS, RunSummary, Spread
from zeroexp.report.compare import Conclusions
from zeroexp.report.measured_points import Point, distinguishing_keys
from zeroexp.report.statistics import drift_lines, step_time_interval, why_doubtful

MIB = 2**20
SKEW = 1.02  # smaller differences between ranks are not shown
ABSENT = "–"
LONGEST = 24  # characters of a setting; the end of a path says more than its beginning
RARE = (
    *("master", "secondary", "buffers", "outer", "build", "by link"),
    *("host", "host peak", "files", "resident", "over bus"),
)  # bytes that most runs do not have, or know
FOR_READERS = ("interval", "predicted", "outcome")  # programs have their parts


@dataclass(frozen=True)
class Column:
    """A number or a word of each point; one without a name is for programs alone."""

    key: str  # in CSV, JSON and --columns, with the unit of `value`
    value: Callable[[Point], Any]  # None where it is unknown
    name: str = ""
    unit: str = ""  # of value × scale
    form: str = ""  # of numbers; words have none
    scale: float = 1
    part: str = ""  # point | losses | times | memory | plan | traffic | verdict | status
    is_mean: bool = False  # over ranks, beside the fullest rank's
    doubt: Callable[[Point], str | None] = lambda _: None  # why a reader should not trust it
    is_shown: Callable[[Sequence[Point]], bool] = bool  # whether a table for readers needs it

    @property
    def is_left(self) -> bool:
        """Words are aligned left, numbers right."""
        return not self.form

    def text(self, point: Point) -> str:
        value = self.value(point)
        if value is None:
            return ABSENT
        if not self.form:
            return str(value)
        return format(value * self.scale, self.form) + (" ?" if self.doubt(point) else "")

    def differs(self, points: Sequence[Point]) -> bool:
        return len({self.text(point) for point in points}) > 1


def columns_of(points: Sequence[Point], conclusions: Conclusions | None = None) -> list[Column]:
    """Return the columns that have something to say of these points, in the order of a wide table."""
    return [c for c in all_columns(points, conclusions) if c.name and c.is_shown(points)]


def printed_columns(points: Sequence[Point], conclusions: Conclusions) -> list[Column]:
    """Return what a printed page has room for: bytes of the fullest rank, the median step, its verdict, losses."""
    columns = [column for column in columns_of(points, conclusions) if not column.is_mean]
    step, _, tokens, *_ = of_parts(columns, "times")
    numbers = of_parts(columns, "memory", "traffic")
    verdict, losses = of_parts(columns, "verdict"), of_parts(columns, "losses")
    return [*numbers, step, *verdict, tokens, *losses]


def exported_columns(points: Sequence[Point], conclusions: Conclusions) -> list[Column]:
    """Return what programs read."""
    return [c for c in all_columns(points, conclusions) if c.key not in FOR_READERS]


def of_parts(columns: Sequence[Column], *parts: str) -> list[Column]:
    return [column for column in columns if column.part in parts]


def chosen_columns(columns: Sequence[Column], keys: Sequence[str]) -> list[Column]:
    """Return the columns of these keys. Raises ConfigError for a key that none has."""
    by_key = {column.key: column for column in columns}
    for key in keys:
        if key not in by_key:
            raise ConfigError(f"--columns {key}: no such column; use some of {', '.join(by_key)}")
    return [by_key[key] for key in keys]


def beside_names(names: Sequence[Column], columns: Sequence[Column]) -> list[Column]:
    """Return the columns behind those that name a point, or as they are where who chose them chose such names too."""
    return [*([] if of_parts(columns, "point") else names), *columns]


def all_columns(points: Sequence[Point], conclusions: Conclusions | None = None) -> list[Column]:
    """Return every column, for programs and for who chooses."""
    peaks = peak_flops_by_name(points)
    loss, validation, accuracy, step, *times = (
        _number(k, attrgetter(path), *looks) for k, path, *looks in NUMBERS
    )
    mfu = _number("mfu", lambda s: utilisation(s, peaks), "MFU", "%", ".1f", 100, "times")
    planned, predicted, *plan = _plan_columns()
    *memory, build, host, host_peak, files, resident, sent, wire, link, bus = map(_spread, SPREADS)
    return [
        *[POINT, *point_columns(points), loss, _if_any(validation), _if_any(accuracy)],
        *[replace(step, doubt=why_doubtful), *times, _if_any(mfu)],
        *[*chain(*memory), _if_any(planned), *build, *host, *host_peak],
        *[*files, *resident],
        *[_if_any(predicted), *plan, *sent, *wire, *link, *bus],
        *(_conclusion_columns(conclusions) if conclusions else []),
        *_columns_for_programs(points, peaks),
        STATUS,
    ]


# ---- what tells points apart


def point_columns(points: Sequence[Point]) -> list[Column]:
    """Return strategy, implementation, the settings that tell points with equal ones apart, and ranks."""
    keys = distinguishing_keys([point.run for point in points])

    def setting(key: str) -> Column:
        def value(point: Point) -> str | None:
            word = point.run.config.get(key)
            return None if word is None else setting_text(word)

        return Column(key, value, column_name(key, keys), part="point")

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

MEBIBYTES = ("MiB", ",.1f", 1 / MIB)
NUMBERS = (  # key, attribute of the summary, and how a table shows it
    ("final_loss", "final_loss", "loss", "last step", ".4f", 1, "losses"),
    ("validation_loss", "validation_loss", "validation", "loss", ".4f", 1, "losses"),
    ("validation_accuracy", "validation_accuracy", "accuracy", "%", ".2f", 100, "losses"),
    ("step_seconds", "step_seconds_median", "step", "ms median", ",.1f", 1e3, "times"),
    ("step_seconds_p95", "step_seconds_p95", "step", "ms p95", ",.1f", 1e3, "times"),
    ("tokens_per_second", "tokens_per_second", "tokens/s", "all ranks", ",.0f", 1, "times"),
)
SPREADS: dict[str, tuple[str, Callable[[RunSummary], Spread | None]]] = {
    "parameters_bytes": ("params", lambda s: s.memory.by_kind["parameters"]),
    "gradients_bytes": ("grads", lambda s: s.memory.by_kind["gradients"]),
    "optimizer_bytes": ("optimizer", lambda s: s.memory.by_kind["optimizer"]),
    "master_bytes": ("master", lambda s: s.memory.by_kind["master"]),
    "secondary_bytes": ("secondary", lambda s: s.memory.by_kind.get("secondary")),
    "buffers_bytes": ("buffers", lambda s: s.memory.by_kind["buffers"]),
    "outer_bytes": ("outer", lambda s: s.memory.by_kind.get(OUTER)),
    "total_bytes": ("total", lambda s: s.memory.total),
    "peak_bytes": ("peak", lambda s: s.memory.peak),
    "build_peak_bytes": ("build", lambda s: s.memory.build_peak),
    "host_bytes": ("host", lambda s: s.memory.host),
    "host_peak_bytes": ("host peak", lambda s: s.memory.host_peak),
    "files_bytes": ("files", lambda s: s.memory.files),
    "resident_bytes": ("resident", lambda s: s.memory.resident),
    "sent_bytes_per_step": ("sent/step", lambda s: s.sent_bytes_per_step),
    "wire_bytes_per_step": ("by TCP", lambda s: s.wire_bytes_per_step),
    "link_bytes_per_step": ("by link", lambda s: s.link_bytes_per_step),
    "bus_bytes_per_step": ("over bus", lambda s: s.bus_bytes_per_step),
}


def _number(key: str, read: Callable[[RunSummary], Any], *looks: Any) -> Column:
    """Return the column of a number of the summary; times are medians over repeats."""

    def value(point: Point) -> Any:
        summary = point.pooled.summary
        return read(summary) if summary else None

    return Column(key, value, *looks)


def _spread(key: str) -> list[Column]:
    """Return a column of the fullest rank, and one of the mean over ranks, shown if the ranks of some run differ."""
    name, read = SPREADS[key]

    def number(key: str, name: str, part: str) -> Column:
        group = "traffic" if key.endswith("_per_step") else "memory"
        return _number(key, lambda s: getattr(read(s), part, None), name, *MEBIBYTES, group)

    fullest, mean = number(key, name, "fullest"), number(f"{key}_mean", "mean", "mean")

    def differs(points: Sequence[Point]) -> bool:
        return any((fullest.value(p) or 0) > SKEW * (mean.value(p) or 0) for p in points)

    shown = {"by TCP": shares_memory, **dict.fromkeys(RARE, _any(fullest))}.get(name, bool)
    shows_mean = bool if name == "total" else lambda points: shown(points) and differs(points)
    return [replace(fullest, is_shown=shown), replace(mean, is_mean=True, is_shown=shows_mean)]


def _plan_columns() -> list[Column]:
    """Return the rehearsed peak and the range of the step, then what is for programs alone."""

    def rehearsed(key: str, name: str, *looks: Any) -> Column:
        return _number(key, lambda s: s.rehearsed.get(name), *looks)

    def range_text(point: Point) -> str | None:
        seconds = (
            [point.summary.rehearsed.get(key) for key in STEP_SECONDS] if point.summary else []
        )
        times = [1e3 * each for each in seconds[::2] if each is not None]
        ends = [f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}" for ms in times]
        return "–".join(ends) or None

    return [
        rehearsed("planned_peak_bytes", "peak", "planned", "peak", *MEBIBYTES[1:], "plan"),
        Column("predicted", range_text, "predicted", "step, ms", part="plan"),
        *(rehearsed(f"planned_{name}", name) for name in STEP_SECONDS),
        _number("planned_bytes", lambda s: s.plan.get("total")),
        Column("not_rehearsed", lambda p: p.summary and p.summary.not_rehearsed),
    ]


def describe_rehearsals(points: Sequence[Point]) -> list[str]:
    """Say what `planned` and `predicted` are, and why some points have none, once for all of a reason."""
    summaries = {point.name: point.summary for point in points if point.summary}
    found = {name for summary in summaries.values() for name in summary.rehearsed}
    said = {
        "peak": "planned: the peak of the rank with most model states, rehearsed (zeroexp plan --rehearse).",
        STEP_SECONDS[
            0
        ]: "predicted: the range of its step, by what zeroexp calibrate has measured of this machine.",
    }
    reasons: dict[str, list[str]] = {}
    for name, summary in summaries.items():
        if summary.not_rehearsed:
            reasons.setdefault(summary.not_rehearsed, []).append(name)
    without = [f"No peak is planned of {', '.join(who)}: {why}." for why, who in reasons.items()]
    return [*(text for name, text in said.items() if name in found), *without]


def _any(column: Column) -> Callable[[Sequence[Point]], bool]:
    return lambda points: any(column.value(point) for point in points)


def _if_any(column: Column) -> Column:
    """Return the column as a table shows it, only where some point has a value."""
    return replace(column, is_shown=_any(column))


def shares_memory(points: Sequence[Point]) -> bool:
    """Do ranks share memory? They do if they exchange more bytes than TCP carried."""
    summaries = [point.summary for point in points if point.summary]
    pairs = [(s.sent_bytes_per_step, s.wire_bytes_per_step) for s in summaries]
    return any(sent and wire and sent.mean > SKEW * wire.mean for sent, wire in pairs)


def utilisation(summary: RunSummary, peaks: Mapping[str, float]) -> float | None:
    """Return the share of its ranks' peak that the model's operations take, by the peaks of `peak_flops_by_name`."""
    rate, peak = summary.model_flops_per_second, peaks.get(peak_name(summary))
    return rate / (peak * summary.world_size) if rate and peak else None


def peak_flops_by_name(points: Sequence[Point]) -> dict[str, float]:
    """Return the peaks of a rank that runs know, operations per second by name.

    A peak that several runs measured is the largest of theirs: a busy machine only makes it smaller, and points are
    compared with one another.
    """
    peaks: dict[str, float] = {}
    for summary in (point.summary for point in points if point.summary):
        if summary.model_flops_per_step and summary.peak_flops_per_second:
            name = peak_name(summary)
            peaks[name] = max(peaks.get(name, 0.0), summary.peak_flops_per_second)
    return peaks


def describe_peak_flops(points: Sequence[Point]) -> str:
    """Say what utilisation is a share of; empty where no run knows it."""
    peaks = peak_flops_by_name(points).items()
    shown = " or ".join(f"{peak / 1e12:,.3g} TFLOP/s a rank ({name})" for name, peak in peaks)
    return f"MFU: the operations that the model needs, as a share of {shown}." if shown else ""


def peak_name(summary: RunSummary) -> str:
    return summary.peak_flops_name or summary.peak_flops_source


# ---- how points compare, and what programs want beside all that


def _conclusion_columns(conclusions: Conclusions) -> list[Column]:
    """Return what was reached over seeds, then the step time over that of the reference."""
    qualities = {quality.name: quality for quality in conclusions.qualities}
    compared = {one.point.name: one.comparison for one in conclusions.judged if one.comparison}

    def of(found: Mapping[str, Any], key: str, attribute: str, *looks: Any) -> Column:
        """Return the column of an attribute of what was found of each point, if anything was."""

        def value(point: Point) -> Any:
            number = attrgetter(attribute)(found[point.name]) if point.name in found else None
            return None if number == "" else number

        return Column(key, value, *looks, is_shown=lambda _: bool(found))

    losses, verdict = (1, "losses"), (1, "verdict")
    return [
        of(qualities, "quality_deviation", "deviation", "±", "over seeds", ".4f", *losses),
        of(qualities, "quality_verdict", "verdict", "quality", "over seeds", "", *losses),
        of(qualities, "num_seeds", "num_seeds", "seeds", "", "d", *losses),
        of(compared, "ratio", "ratio", "ratio", "", ".2f", *verdict),
        of(compared, "interval", "interval", "95 %", "", "", *verdict),
        of(compared, "verdict", "verdict.value", "verdict", "", "", *verdict),
        of(compared, "ratio_low", "low"),
        of(compared, "ratio_high", "high"),
        of(compared, "num_pairs", "num_pairs"),
    ]


def _columns_for_programs(points: Sequence[Point], peaks: Mapping[str, float]) -> list[Column]:
    summaries = [point.summary for point in points if point.summary]
    phases = dict.fromkeys(phase for s in summaries for phase in s.phase_seconds_median)

    def of_interval(key: str, name: str) -> Column:
        return Column(key, lambda p: getattr(step_time_interval(p), name, None))

    def of_phase(phase: str) -> Column:
        return _number(f"{phase}_phase_seconds", lambda s: s.phase_seconds_median.get(phase))

    return [
        Column("sweep", lambda p: p.run.sweep),
        Column("num_runs", lambda p: len(p.runs)),
        Column("status", lambda p: p.pooled.status),
        Column("reason", lambda p: p.pooled.reason),
        of_interval("step_seconds_low", "low"),
        of_interval("step_seconds_high", "high"),
        of_interval("interval_over", "over"),
        *map(of_phase, phases),
        _number("model_flops_per_second", lambda s: s.model_flops_per_second),
        _number("peak_flops_per_second", lambda s: peaks.get(peak_name(s))),
        _number("peak_flops", lambda s: peak_name(s) or None),
        _number("diverged_at", lambda s: s.diverged_at),
        Column("doubt", why_doubtful),
        Column("drift", lambda p: " ".join(drift_lines([p])) or None),
    ]


def _outcome(point: Point) -> str:
    run = point.pooled
    reason = (run.reason or "").strip()
    status = run.status if run.num_attempts == 1 else f"{run.status} (attempt {run.num_attempts})"
    return f"{status}: {reason.splitlines()[0]}" if reason else status


POINT = Column("point", lambda point: point.name, "point", part="point", is_shown=lambda _: False)
STATUS = Column("outcome", _outcome, "status", part="status")
