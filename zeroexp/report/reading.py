"""Read the run folders of sweeps for a report; a folder that cannot be read costs one line and no other run."""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Sequence
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from yaml import YAMLError

from zeroexp.config.keys import ConfigError
from zeroexp.measure.formats import KEY, NewerFormat, refuse_newer_format
from zeroexp.measure.record import RunSummary, StepRecord
from zeroexp.report.theory import table_bytes, table_traffic
from zeroexp.tracking.files import RECORDS, read_records
from zeroexp.tracking.run import Run, read_run

MUST_EQUAL = "study.must_equal"
HEAD = 100  # characters of a file that tell its format
FORMAT_AT = re.compile(rf'(?:{{"otherData": )?{{"{KEY}": (\d+)')
# Torn files, and files of other versions, end in one of these.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, YAMLError)
UNREADABLE += (ArithmeticError, RecursionError)
LATEST = 1e11  # Unix seconds: no calendar goes further
NUMBER = (int, float)


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Return the runs of sweep or run folders in the order they were started, and one line per unreadable run.

    Raises ConfigError for a folder that holds no run at all, or only unreadable ones.
    """
    runs: list[Run] = []
    problems: list[str] = []
    for folder in folders:
        read, unread = _read_folder(folder)
        if not read:
            raise ConfigError(
                unread[0] if unread else f"{folder}: no run in there; give outputs/<sweep>"
            )
        runs += read
        problems += unread
    return runs, problems


def records_of(run: Run) -> list[StepRecord]:
    """Return the run's steps; an unreadable file reads as no step, since its summary may still be whole."""
    try:
        return _records(run.folder)
    except UNREADABLE:
        return []


def _records(folder: Path) -> list[StepRecord]:
    records = read_records(folder)
    for record in records:
        if not isinstance(record.loss + record.step_seconds, int | float):
            raise TypeError(f"step {record.step} in {RECORDS} has no numbers")
    return records


def _read_folder(folder: Path) -> tuple[list[Run], list[str]]:
    configs = [*folder.glob("config.yaml")] or sorted(folder.glob("*/config.yaml"))
    runs: list[Run] = []
    problems: list[str] = []
    for config in configs:
        try:
            runs.append(_checked(read_run(config.parent)))
            problems += _files_left_out(runs[-1])
        except NewerFormat as error:
            problems.append(f"{config.parent}: left out, {error}")
        except UNREADABLE as error:
            problems.append(_why_left_out(config.parent, error))
    return sorted(runs, key=lambda run: (run.times.get("pending_at", 0.0), run.name)), problems


def _files_left_out(run: Run) -> list[str]:
    """Return a line for records and timelines that are torn or of a later version: the run's results are shown."""
    problems: list[str] = []
    if run.summary and not (run.folder / RECORDS).exists():
        problems.append(f"{run.folder}: {RECORDS} is missing, so that it has no curve")
    for path in [run.folder / RECORDS, *sorted(run.folder.glob("trace.*.*.json"))]:
        try:
            _records(run.folder) if path.name == RECORDS else _try_ends(path)
        except NewerFormat as error:
            problems.append(f"{run.folder}: {error}")
        except UNREADABLE:
            problems.append(f"{run.folder}: {path.name} is torn and left out")
    return problems


def _try_ends(path: Path) -> None:
    """Raise ValueError if a file is torn or newer, from its head and its end: it may be large."""
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    format_ = FORMAT_AT.match(text[:HEAD])
    refuse_newer_format({KEY: int(format_[1]) if format_ else 1}, path.name)
    if not (text.startswith("{") and text.endswith("}")):
        raise ValueError("torn")


def _checked(run: Run) -> Run:
    """Return the run, after a look at what a report asks of it."""
    refuse_wrong_types(run, "run")
    _ = run.label, run.world_size, run.config["model.name"], int(run.environment.get("repeat", 0))
    _ = table_bytes(run), table_traffic(run), list(json.loads(run.config.get(MUST_EQUAL, "[]")))
    if not all(0 <= at < LATEST for at in run.times.values()):
        raise ValueError("state.json has a time that no calendar has")
    if run.summary:
        _check_numbers(run, run.summary)
    return run


def _check_numbers(run: Run, summary: RunSummary) -> None:
    if summary.world_size != run.world_size:
        raise ValueError(f"{summary.world_size} ranks in summary.json, {run.world_size} in config")
    for name in ("step_seconds_median", "step_seconds_p95", "tokens_per_second"):
        if not 0 < getattr(summary, name) < math.inf:
            raise ValueError(f"{name} in summary.json is {getattr(summary, name)}")
    for kind, ranks in summary.memory.by_kind.items():
        if len(ranks.per_rank) != summary.world_size:
            raise ValueError(f"{kind} in summary.json has {len(ranks.per_rank)} ranks")


def _why_left_out(folder: Path, error: Exception) -> str:
    reason = str(error).strip().partition("\n")[0] or "empty"
    if isinstance(error, LookupError):
        reason = f"{reason} is missing"
    return f"{folder}: left out, its files cannot be read ({type(error).__name__}: {reason[:120]})"


# ---- types: Python takes whatever it is given, so that a torn file would fail far from where it was read


def refuse_wrong_types(content: Any, name: str) -> None:
    """Raise TypeError naming the first field of a dataclass, or of what it holds, that has not its declared type."""
    for field, declared in _hints(type(content)).items():
        _check_type(getattr(content, field), declared, f"{name}.{field}")


# A report of hundreds of runs checks a hundred thousand values, of a few types.
_hints = cache(get_type_hints)


@cache
def _parts(declared: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(declared) or declared, get_args(declared)


def _check_type(value: Any, declared: Any, name: str) -> None:
    kind, parts = _parts(declared)
    if kind in (Union, types.UnionType):
        if value is not None or types.NoneType not in parts:
            _check_type(value, next(part for part in parts if part is not types.NoneType), name)
        return
    if not isinstance(value, NUMBER if kind in NUMBER else kind):
        raise TypeError(f"{name} is {value!r}")
    if parts and kind in (list, dict):
        for key, each in value.items() if kind is dict else enumerate(value):
            _check_type(each, parts[-1], f"{name}.{key}")
    if is_dataclass(value):
        refuse_wrong_types(value, name)
