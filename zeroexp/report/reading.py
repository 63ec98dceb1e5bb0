"""Read the run folders of sweeps for a report; a folder that cannot be read costs one line and no other run."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from yaml import YAMLError

from zeroexp.config.keys import ConfigError
from zeroexp.measure.formats import NewerFormat, from_json
from zeroexp.measure.record import RunSummary, StepRecord
from zeroexp.tracking.files import MAKING, RECORDS, SUMMARY, read_records
from zeroexp.tracking.run import Run, order_of, read_run, run_folders

MUST_EQUAL = "study.must_equal"
# Torn files, and files of other versions, end in one of these.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, YAMLError)
UNREADABLE += (ArithmeticError, RecursionError)


def read_runs(folder: Path) -> tuple[list[Run], list[str]]:
    """Return the runs of a sweep's or a run's folder in the order they were started, and one line per unreadable run.

    Raises ConfigError for a folder that holds no run at all, or only unreadable ones.
    """
    own = [config.parent for config in folder.glob("config.yaml")]
    runs, problems = _read(own or sorted(run_folders(folder)))
    if not runs:
        raise ConfigError([*problems, f"{folder}: no run in there; give outputs/<sweep>"][0])
    if (folder / MAKING).exists():
        problem = "its points are made just now, or it was ended while they were"
        problems.append(f"{folder}: {problem}: some may be missing")
    return runs, problems


def readable_runs(folders: Iterable[Path]) -> list[Run]:
    """Return the runs of these folders in their order; a line on standard error names what is left out."""
    runs, problems = _read(folders)
    for line in problems:
        print(f"zeroexp: {line}", file=sys.stderr)
    return runs


def _read(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    runs: list[Run] = []
    problems: list[str] = []
    for each in folders:
        try:
            runs.append(_checked(read_run(each)))
            problems += [*runs[-1].left_out, *_files_left_out(runs[-1])]
        except NewerFormat as error:
            problems.append(f"{each}: left out, {error}")
        except UNREADABLE as error:
            problems.append(_why_left_out(each, error))
    return sorted(runs, key=order_of), problems


def records_of(run: Run) -> list[StepRecord]:
    """Return the run's steps; an unreadable file reads as no step, since its summary may still be whole."""
    try:
        return read_records(run.folder)
    except UNREADABLE:
        return []


def _files_left_out(run: Run) -> list[str]:
    """Return a line for records that are missing, torn or of a later version: the run's results are shown."""
    if run.summary and not (run.folder / RECORDS).exists():
        return [f"{run.folder}: {RECORDS} is missing, so that it has no curve"]
    try:
        read_records(run.folder)
    except NewerFormat as error:
        return [f"{run.folder}: {error}"]
    except UNREADABLE:
        return [f"{run.folder}: {RECORDS} is torn and left out"]
    return []


def _checked(run: Run) -> Run:
    """Return the run, after a look at what a report asks of it: whole files may hold what no run writes."""
    from_json(Run, {**vars(run), "summary": None}, "state.json: run")
    _ = [datetime.fromtimestamp(at) for at in run.times.values()]
    for name in ("repeat", "machine.num_cpus", "other_cores"):
        if not float(run.environment.get(name, 0)) >= 0:
            raise ValueError(f"environment.json: {name} is {run.environment[name]}")
    _ = run.label, run.world_size, run.config["model.name"]
    _ = list(json.loads(run.config.get(MUST_EQUAL, "[]")))
    if run.summary:
        _check_summary(run.world_size, run.summary)
    return run


def _check_summary(num_ranks: int, summary: RunSummary) -> None:
    """Raise ValueError for ranks that the run had not, and for seconds that are none."""
    memory = summary.memory
    sizes = {len(each.per_rank) for each in memory.by_kind.values()}
    if {*sizes, summary.world_size} != {num_ranks}:
        raise ValueError(f"{SUMMARY}: not of {num_ranks} ranks")
    for name in ("step_seconds_median", "step_seconds_p95", "tokens_per_second"):
        if not 0 < getattr(summary, name) < math.inf:
            raise ValueError(f"{SUMMARY}: {name} is {getattr(summary, name)}")


def _why_left_out(folder: Path, error: Exception) -> str:
    reason = str(error).strip().partition("\n")[0] or "empty"
    if isinstance(error, LookupError):
        reason = f"{reason} is missing"
    why = f"its files cannot be read ({type(error).__name__}: {reason[:120]})"
    return f"{folder}: left out, {why}; restore or remove them"
