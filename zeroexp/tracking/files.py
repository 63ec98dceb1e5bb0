"""The files of a run: engine.json holds its settings and dtypes, records.jsonl its steps, and summary.json its results.

engine.json holds the values of settings that the config left open, records.jsonl grows while rank 0 trains, and
summary.json appears when the run has ended.

A line of records.jsonl is a StepRecord and `written_at`, the Unix time at which it was written. A process killed while
it writes a line leaves an incomplete one, which readers drop; of two lines about one step they use the later. A run
that resumes from its checkpoint first drops the lines of the steps that it repeats.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from zeroexp.config.keys import DamagedFile
from zeroexp.measure.formats import FORMAT, KEY, from_json, refuse_newer_format
from zeroexp.measure.record import RunSummary, StepRecord
from zeroexp.process.durable import replace_durably, sync
from zeroexp.tracking import attempt
from zeroexp.tracking.json_files import dumps, loads, read_json, write_json

RECORDS = "records.jsonl"
SUMMARY = "summary.json"
ENGINE = "engine.json"
MAKING = ".making"  # in a sweep's folder while those of its points are made
MARK_BYTES = 256  # bytes before the position, kept to recognize a replaced file


class RecordWriter:
    """Appends to <folder>/records.jsonl; every line has reached the system when `write` returns.

    Steps from `from_step` on are about to be repeated, see `drop_records`. Writing takes microseconds, but call it
    outside the timed region all the same. Raises Superseded if a later attempt of the run has begun.
    """

    def __init__(
        self, folder: Path, *, from_step: int | None = None, rests_on: bool = False
    ) -> None:
        attempt.refuse_superseded(folder)
        self._folder = folder
        drop_records(folder, from_step=from_step, rests_on=rests_on)
        self._file = (folder / RECORDS).open("a", buffering=1, encoding="utf-8")

    def write(self, record: StepRecord) -> None:
        attempt.refuse_superseded(self._folder)
        line = {KEY: FORMAT, **asdict(record), "written_at": time.time()}
        self._file.write(dumps(line) + "\n")

    def sync(self) -> None:
        """Bring all lines to the disk, since a checkpoint or the summary is about to rest on them."""
        os.fsync(self._file.fileno())
        sync(self._folder)

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.sync()
        self._file.close()


class Tail:
    """The lines of a file that need not exist yet; who wants later ones alone drops what `new_lines` returns first.

    A run that resumes from a checkpoint replaces the file by a shorter one. If the last bytes returned are no longer in
    front of the position, all lines are returned again. (The inode cannot show this: a freed number goes to the next
    file.)
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position, self._told = 0, b""

    def new_lines(self) -> list[str]:
        """Return the new complete lines; a line still being written is left for the next call."""
        content = b""
        # It may be set aside at any time, by a command that runs the run again.
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._position - len(self._told))
            content = file.read()
            if not content.startswith(self._told):
                file.seek(0)
                content, self._position, self._told = file.read(), 0, b""
        complete, newline, _ = content[len(self._told) :].rpartition(b"\n")
        self._position += len(complete) + len(newline)
        self._told = (self._told + complete + newline)[-MARK_BYTES:]
        return complete.decode().splitlines()


def read_timed_records(folder: Path) -> list[tuple[float, StepRecord]]:
    """Return (Unix seconds of writing, record) sorted by step; the list is empty if nothing was written yet.

    Raises DamagedFile for a curve with a hole.
    """
    path = folder / RECORDS
    rows = read_rows(lines := _lines_of(path))
    if len(rows) < len(lines):
        raise DamagedFile(path, f"{len(lines) - len(rows)} lines are no steps")
    _require_no_hole(path, rows)
    by_step = {row["step"]: row for row in rows}
    return [(row["written_at"], step_record(row)) for _, row in sorted(by_step.items())]


def read_records(folder: Path) -> list[StepRecord]:
    return [record for _, record in read_timed_records(folder)]


def read_rows(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return the steps in these lines of records.jsonl, without lines that a power cut has damaged."""
    rows: list[dict[str, Any]] = []
    for line in lines:
        with contextlib.suppress(ValueError):
            row = loads(line)
            if isinstance(row, dict) and "step" in row:
                rows.append(row)
    return rows


def _lines_of(path: Path) -> list[str]:
    """Return the whole lines, none where there is no file: the text after the last newline is empty or incomplete."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    except FileNotFoundError:
        return []


def _require_no_hole(path: Path, rows: Sequence[dict[str, Any]], until: int | None = None) -> None:
    """Raise DamagedFile if a step is missing between the first and the last, or before `until`."""
    steps = {row["step"] for row in rows}
    end = max(steps, default=-1) + 1 if until is None else until
    if missing := [step for step in range(min(steps, default=0), end) if step not in steps]:
        what = f"{len(missing)} steps are missing from {missing[0]} on"
        raise DamagedFile(path, what, "restore it, or run the steps again with --rerun")


def require_results(folder: Path) -> None:
    """Raise DamagedFile for a damaged or lost summary, or where steps that it sums up are lost from the curve."""
    if SUMMARY not in os.listdir(folder):  # NFS caches that a file is missing
        raise DamagedFile(folder / SUMMARY, "lost")
    summary, path = read_json(folder / SUMMARY), folder / RECORDS
    if summary is None or not path.exists():
        return
    num_steps = summary.get("num_warmup_steps", 0) + summary.get("num_steps", 0)
    state = path.stat()
    if (num_lines := _num_whole_lines(path, state.st_mtime_ns, state.st_size)) < num_steps:
        raise DamagedFile(path, f"{num_steps - num_lines} of {num_steps} steps are missing")


@lru_cache(maxsize=4096)
def _num_whole_lines(path: Path, modified_ns: int, num_bytes: int) -> int:
    """Count the steps without parsing them, once per state of the file: who follows a sweep asks again and again."""
    with path.open("rb") as file:
        return sum(line.startswith(b"{") and line.endswith(b"}\n") for line in file)


def drop_records(folder: Path, *, from_step: int | None = None, rests_on: bool = False) -> None:
    """Drop an incomplete last line and the lines of steps from `from_step` on.

    rests_on: a checkpoint of this run is about to go on at `from_step`. Raises DamagedFile where its curve would have a
    hole then.

    This replaces the file, which matters to its readers and to a writer left over from an earlier attempt.
    """
    path = folder / RECORDS
    rows = read_rows(_lines_of(path))
    kept = [row for row in rows if from_step is None or row["step"] < from_step]
    _require_no_hole(path, kept, until=from_step if rests_on else None)
    if path.exists():
        replace_durably(path, "".join(f"{dumps(row)}\n" for row in kept).encode())


def write_engine(folder: Path, settings: dict[str, Any]) -> None:
    """Write the engine's values of settings that the config left open. Raises Superseded as `write_summary` does."""
    attempt.refuse_superseded(folder)
    write_json(folder / ENGINE, settings)


def write_summary(folder: Path, summary: RunSummary) -> None:
    """Write the summary. Raises Superseded if a later attempt of the run has begun."""
    attempt.refuse_superseded(folder)
    write_json(folder / SUMMARY, {KEY: FORMAT, **asdict(summary)})


def read_summary(folder: Path) -> RunSummary | None:
    """Read the summary; None if the run has not finished. Raises NewerFormat for one of a later version."""
    content = read_json(folder / SUMMARY)
    if content is None:
        return None
    refuse_newer_format(content, SUMMARY)
    return from_json(RunSummary, content, f"{SUMMARY}: run")


def working_folder_of(folder: Path) -> Path | None:
    """Return the folder from which the command of a run was given; None where the run does not tell."""
    folder_of_command = (read_json(folder / "environment.json") or {}).get("folder")
    return Path(folder_of_command) if folder_of_command else None


def step_record(row: dict[str, Any]) -> StepRecord:
    """Make a StepRecord from one parsed line of records.jsonl. Raises NewerFormat for one of a later version."""
    refuse_newer_format(row, RECORDS)
    return from_json(StepRecord, row, f"{RECORDS}: step")
