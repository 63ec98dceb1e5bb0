"""Read everything in a run's folder once; the table and MLflow show only what is read here."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from zeroexp.config.keys import DamagedFile, parse, read_whole
from zeroexp.measure.formats import NewerFormat
from zeroexp.measure.record import RunSummary
from zeroexp.tracking import attempt, owner
from zeroexp.tracking.files import ENGINE, read_json, read_summary, require_results

LOAD_FILE = "load.json"  # exists where ranks ran on the machine of the sweep
SLURM_FILE = "slurm.json"  # exists in the folder of a run that was submitted to Slurm
HELD_FILE = "held.json"  # exists while Slurm would not take the run yet; whoever follows the sweep submits it
PAGE = "report.html"  # in a sweep's folder, see report/page
UNFINISHED = ("pending", "running", "requeued", "preempted")


@dataclass(frozen=True)
class Run:
    folder: Path
    config: dict[str, str]  # the resolved config, dotted key -> value
    status: str  # a word of cluster.job.Status
    reason: str | None  # why it was skipped, failed or stopped
    times: dict[str, float]  # "<status>_at" -> Unix seconds
    environment: dict[str, str]  # versions, git commit, host, device
    # These are the engine's values of settings that the config left open: transport, bucket, ...
    engine: dict[str, str]
    summary: RunSummary | None  # None if the run did not finish
    num_attempts: int = 1  # at least 1
    # Mean number of cores that other programs used meanwhile; nan where its file is damaged, None where there is none.
    other_cores: float | None = None
    # A line for each file beside the results that is damaged.
    left_out: list[str] = field(default_factory=list[str])

    @property
    def name(self) -> str:
        return Path(os.path.abspath(self.folder)).name

    @property
    def sweep(self) -> str:
        return Path(os.path.abspath(self.folder)).parent.name  # of `.` and `..` too

    @property
    def strategy(self) -> str:
        return self.config["strategy.name"]

    @property
    def implementation(self) -> str:
        return self.config["strategy.implementation"]

    @property
    def label(self) -> str:
        return f"{self.strategy}-{self.implementation}"

    @property
    def world_size(self) -> int:
        return int(self.config["world_size"])


def read_run(folder: Path) -> Run:
    """Read a run. Raises FileNotFoundError if the folder holds no config.yaml, and DamagedFile.

    Damaged settings of the engine, or a damaged load of others, cost no more than themselves: times are in doubt then.
    """
    state, beside, left_out = state_of(folder), dict[str, dict[str, Any]](), list[str]()
    for name, absent in ((ENGINE, {}), (LOAD_FILE, {"other_cores": None})):
        try:
            beside[name] = absent if (found := read_json(folder / name)) is None else found
        except DamagedFile as error:
            beside[name] = {}
            left_out.append(f"{error.line}, and left out")
    return Run(
        folder=folder,
        config=_read_config(folder / "config.yaml"),
        status=state["status"],
        reason=state.get("reason"),
        times={key: value for key, value in state.items() if key.endswith("_at")},
        environment=flatten(read_json(folder / "environment.json") or {}),
        engine=flatten(beside[ENGINE]),
        summary=read_summary(folder),
        num_attempts=max(1, attempt.newest(folder)),
        other_cores=beside[LOAD_FILE].get("other_cores", math.nan),
        left_out=left_out,
    )


def read_state(folder: Path) -> dict[str, Any]:
    """Return state.json's content; a run whose state or results are damaged counts as failed, to be run again."""
    state: dict[str, Any] = {"status": "pending", "reason": None}
    try:
        state = read_json(folder / "state.json") or state
        if state["status"] == "done":
            require_results(folder)
    except DamagedFile as error:
        return {**state, "status": "failed", "reason": error.line}
    return state


def run_folders(sweep: Path) -> list[Path]:
    """Return the folders of a sweep's runs. `.hydra` in a run is none, which has a config.yaml too."""
    return [config.parent for config in sweep.glob("[!.]*/config.yaml")]


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """Read runs, in their order; a line on standard error names one whose files are damaged, or of a later version."""
    runs: list[Run] = []
    for folder in folders:
        try:
            runs.append(read_run(folder))
            for line in runs[-1].left_out:
                print(f"zeroexp: {line}", file=sys.stderr)
        except (DamagedFile, NewerFormat) as error:
            print(f"zeroexp: {folder.name} is left out: {error}", file=sys.stderr)
    return sorted(runs, key=order_of)


def order_of(run: Run) -> tuple[int, float, str]:
    """Return what puts runs of a sweep in their order, by rounds, which `--rerun` does not change."""
    return int(run.environment.get("repeat") or 0), run.times.get("pending_at", 0.0), run.name


def state_of(folder: Path) -> dict[str, Any]:
    """Return state.json's content; an unfinished point whose process is dead counts as cancelled."""
    state = read_state(folder)
    by_slurm = (folder / SLURM_FILE).exists() or (folder / HELD_FILE).exists()
    if state["status"] in UNFINISHED and not by_slurm and (reason := owner.is_abandoned(folder)):
        return {**state, "status": "cancelled", "reason": reason}
    return state


def _read_config(path: Path) -> dict[str, str]:
    text = read_whole(path)
    try:
        return dict(_flat_config(text))
    except (ValueError, AttributeError) as error:
        raise DamagedFile(path, "no YAML") from error


@lru_cache(maxsize=256)
def _flat_config(text: str) -> dict[str, str]:
    """Parse a config; repeats of a point have the same, and parsing it is most of what reading a run takes."""
    return flatten(parse(text))


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten {"a": {"b": 1}} to {"a.b": "1"}; strings stay as they are, all else (lists too) becomes JSON."""
    flat: dict[str, str] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return flat
