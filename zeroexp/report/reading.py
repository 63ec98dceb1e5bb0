"""Read the run folders of sweeps for a report; a folder that cannot be read costs one line and no other run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from yaml import YAMLError

from zeroexp.config import ConfigError
from zeroexp.measure.formats import KEY, NewerFormat, refuse_newer_format
from zeroexp.measure.record import RunSummary, StepRecord
from zeroexp.tracking.files import RECORDS, read_records
from zeroexp.tracking.run import Run, read_run

# Torn files, and files of other versions, end in one of these.
HEAD = 100  # characters of a file that tell its format
FORMAT_AT = re.compile(rf'(?:{{"otherData": )?{{"{KEY}": (\d+)')
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, YAMLError)


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Return the runs of sweep or run folders in the order they were started, and one line per unreadable run.

    Raises ConfigError for a folder that holds no run at all, or only unreadable ones.
    """
    runs: list[Run] = []
    problems: list[str] = []
    for folder in folders:
        found, unread = _read_folder(folder)
        if not found:
            raise ConfigError(unread[0] if unread else _nothing_in(folder))
        runs += found
        problems += unread
    return runs, problems


def records_of(run: Run) -> list[StepRecord]:
    """Return the run's steps; an unreadable file reads as no step, since its summary may still be whole."""
    try:
        return read_records(run.folder)
    except UNREADABLE:
        return []


def _read_folder(folder: Path) -> tuple[list[Run], list[str]]:
    configs = [*folder.glob("config.yaml")] or sorted(folder.glob("*/config.yaml"))
    runs: list[Run] = []
    problems: list[str] = []
    for config in configs:
        try:
            runs.append(_checked(read_run(config.parent)))
            problems += _newer_files(config.parent)
        except NewerFormat as error:
            problems.append(f"{config.parent}: left out, {error}")
        except UNREADABLE as error:
            problems.append(_why_left_out(config.parent, error))
    return sorted(runs, key=lambda run: (run.times.get("pending_at", 0.0), run.name)), problems


def _newer_files(folder: Path) -> list[str]:
    """Return a line for records and timelines of a later version: they are left out, and the run's results are not."""
    problems: list[str] = []
    for path in [folder / RECORDS, *sorted(folder.glob("trace.*.*.json"))]:
        with suppress(OSError), path.open(errors="replace") as file:
            found = FORMAT_AT.match(file.read(HEAD))
            try:
                refuse_newer_format({KEY: int(found[1]) if found else 1}, path.name)
            except NewerFormat as error:
                problems.append(f"{folder}: {error}")
    return problems


def _checked(run: Run) -> Run:
    """Return the run, after a look at what every table asks of it."""
    _ = run.label, run.world_size, run.config["model.name"]
    if run.summary:
        _check_numbers(run.summary)
    return run


def _check_numbers(summary: RunSummary) -> None:
    for name in ("initial_loss", "final_loss", "step_seconds_median", "tokens_per_second"):
        if not isinstance(getattr(summary, name), int | float):
            raise TypeError(f"{name} in summary.json is no number")
    for kind, ranks in summary.memory.by_kind.items():
        if len(ranks.per_rank) != summary.world_size:
            raise ValueError(f"{kind} in summary.json has {len(ranks.per_rank)} ranks")


def _why_left_out(folder: Path, error: Exception) -> str:
    said = str(error).strip().partition("\n")[0] or "empty"
    if isinstance(error, LookupError):
        said = f"{said} is missing"
    return f"{folder}: left out, its files cannot be read ({type(error).__name__}: {said[:120]})"


def _nothing_in(folder: Path) -> str:
    return f"{folder}: no run in there; give outputs/<sweep>"
