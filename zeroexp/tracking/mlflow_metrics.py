"""Convert a run's records and summary to MLflow's metrics. Pure: one folder always gives the same entries.
`mlflow_store.py` sends them.

Metric timestamps are the times at which the lines of records.jsonl were written, so that sending twice writes the same
rows. Names contain the units, since MLflow has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from zeroexp.measure.record import (
    STEP_SECONDS,
    MemorySummary,
    RunSummary,
    StepRecord,
    figures_of,
    mean_verb_seconds,
)
from zeroexp.measure.summary import LOSS
from zeroexp.tracking.json_files import loads

MIB = 2**20
LAST_OF_STEP = "traffic/step_sent_mib"  # a store that has it has all of its step
# What is named otherwise here than in the files.
NAMES = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim",
    "sent": "sent_per_step",
    "link": "link_per_step",
    "bus": "bus_per_step",
}


class Entry(NamedTuple):
    """One metric value; the order of fields is that of mlflow.entities.Metric."""

    key: str
    value: float
    timestamp: int  # Unix milliseconds
    step: int


def step_entries(written_at: float, record: StepRecord) -> list[Entry]:
    values = {
        "loss": record.loss,
        "grad_norm": record.grad_norm,
        "lr": record.lr,
        "time/step_ms": _milliseconds(record.step_seconds),
        "tokens_per_s": _digits(record.num_tokens / record.step_seconds),
        **{f"phase/{name}_ms": _milliseconds(s) for name, s in record.phase_seconds.items()},
    }
    values |= {
        key: value
        for key in ("loss_scale", "validation_loss", "validation_accuracy")
        if (value := getattr(record, key)) is not None
    }
    if record.saving_seconds:
        values["time/saving_ms"] = _milliseconds(record.saving_seconds)
    if record.peak_bytes is not None:
        values["memory/step_peak_mib"] = _mib(record.peak_bytes)
    if record.verbs.keys() - {LOSS}:
        exposed = sum(verb.exposed for verb in record.verbs.values())
        values["time/step_exposed_ms"] = _milliseconds(exposed)
    counted = record.traffic.bytes_by_kind
    # Of an engine that counts none of it, what TCP carried.
    carried = None if counted.keys() - {LOSS} else record.wire_bytes
    values[LAST_OF_STEP] = _mib(carried or sum(counted.values()))
    return _entries(values, written_at, record.step)


def summary_entries(at: float, summary: RunSummary) -> list[Entry]:
    """Return the metrics of the whole run.

    Metrics that scale with the world size use it as their step: grouped by strategy, MLflow then draws scaling curves.
    """
    scaling = {
        "scaling/step_ms": _milliseconds(summary.step_seconds_median),
        "scaling/tokens_per_s": _digits(summary.tokens_per_second),
        "scaling/memory_total_mib": _mib(summary.memory.total.fullest),
    }
    phases = summary.phase_seconds_median  # one phase is called step, like the whole step
    plain = {
        "time/step_ms_median": scaling["scaling/step_ms"],
        "time/step_ms_p95": _milliseconds(summary.step_seconds_p95),
        "tokens_per_s_mean": scaling["scaling/tokens_per_s"],
        **{f"phase/{name}_ms_median": _milliseconds(s) for name, s in phases.items()},
        **_speed_entries(summary),
        **_verb_entries(summary),
        **_byte_entries(summary),
        **_plan_entries(summary),
        "world_size": summary.world_size,
    }
    return [*_entries(plain, at, 0), *_entries(scaling, at, summary.world_size)]


def system_entries(folder: Path) -> list[Entry]:
    """Return what nodes were busy with, under the names of MLflow's own system metrics, without torn lines."""
    made: list[Entry] = []
    for path in sorted(folder.glob("system.*.jsonl")):
        node = path.name.removeprefix("system.").removesuffix(".jsonl")
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1]):
            with suppress(ValueError):  # cut by a full disk; another attempt wrote behind it
                row = loads(line)
                at = row.pop("written_at")
                named = {f"system/{node}/{name}": n for name, n in row.items()}
                made += _entries(named, at, number)
    return made


def _speed_entries(summary: RunSummary) -> dict[str, float]:
    """Return what the model computes, and its share of what the ranks could."""
    values = {
        "model_tflop_per_step": (summary.model_flops_per_step, 1e-12),
        "model_tflop_per_s": (summary.model_flops_per_second, 1e-12),
        "peak_tflop_per_s_per_rank": (summary.peak_flops_per_second, 1e-12),
        "mfu_percent": (summary.mfu, 100),
    }
    return {name: _digits(n * factor) for name, (n, factor) in values.items() if n is not None}


def _verb_entries(summary: RunSummary) -> dict[str, float]:
    """Return what each verb costs in a step, mean over ranks: seconds in which ranks only wait, and all of them."""
    ranks = summary.times
    parts = {part: mean_verb_seconds(ranks, part) for part in ("working", "overlapped", "exposed")}
    values = {
        f"verb/{verb}_{part}_ms": _milliseconds(means[verb])
        for verb in parts["working"]
        for part, means in parts.items()
    }
    if parts["working"].keys() - {LOSS}:
        exposed = fmean(rank.exposed_seconds for rank in ranks)
        hidden = fmean(rank.overlapped_seconds for rank in ranks)
        values["time/exposed_ms"] = _milliseconds(exposed)
        if exposed + hidden:  # by the name and definition of PyTorch's Holistic Trace Analysis
            values["comp_comm_overlap_pctg"] = _digits(100 * hidden / (exposed + hidden))
    return values


def _byte_entries(summary: RunSummary) -> dict[str, float]:
    """Return the fullest rank's MiB under each name, and the mean over ranks under `<name>_mean`; then what is sent."""
    held = ("total", "peak", *figures_of(MemorySummary))
    memory = summary.memory.by_kind | {name: getattr(summary.memory, name) for name in held}
    spreads = {f"memory/{NAMES.get(name, name)}_mib": ranks for name, ranks in memory.items()}
    for name in ("sent_bytes_per_step", "wire_bytes_per_step", *figures_of(RunSummary)):
        spreads[f"traffic/{name.replace('bytes', 'mib')}"] = getattr(summary, name)
    values: dict[str, float] = {}
    for name, ranks in spreads.items():
        if ranks is not None:
            values |= {name: _mib(ranks.fullest), f"{name}_mean": _mib(ranks.mean)}
    sent = summary.sent_bytes_by_kind.items()
    return values | {f"traffic/{kind}_mib_per_step": _mib(number) for kind, number in sent}


def _plan_entries(summary: RunSummary) -> dict[str, float]:
    """Return what was planned, and by how much the measurement differs; zero means to the byte."""
    planned = {f"plan_{NAMES.get(n, n)}_mib": _mib(v) for n, v in summary.plan.items()}
    errors = {f"plan_error_{NAMES.get(n, n)}_mib": _mib(v) for n, v in summary.plan_errors.items()}
    if (peak := summary.rehearsed.get("peak")) is not None:
        planned["plan_peak_mib"] = _mib(peak)
        if summary.memory.peak:
            errors["plan_error_peak_mib"] = _mib(summary.memory.peak.fullest - peak)
    seconds = {name: summary.rehearsed[name] for name in STEP_SECONDS if name in summary.rehearsed}
    times = {f"plan_{n.replace('seconds', 'ms')}": _milliseconds(s) for n, s in seconds.items()}
    return planned | errors | times


def _mib(num_bytes: float) -> float:
    """Convert to MiB of seven digits, because the page shows every digit; one byte is not 0, and files have all."""
    return _digits(num_bytes / MIB)


def _digits(value: float) -> float:
    return float(f"{value:.7g}")


def _milliseconds(seconds: float) -> float:
    """Convert to milliseconds, rounded to the microsecond, because the page shows every digit."""
    return round(seconds * 1e3, 3)


def _entries(values: Mapping[str, float], at: float, step: int) -> list[Entry]:
    """Return values of one moment, `at` in Unix seconds."""
    timestamp = int(at * 1000)
    return [Entry(key, value, timestamp, step) for key, value in values.items()]
