"""Read everything in a run's folder once; the table and MLflow show only what is read here."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from zeroexp.config.keys import DamagedFile, parse, read_whole
from zeroexp.measure.record import RunSummary
from zeroexp.tracking import attempt, sweep_owner
from zeroexp.tracking.files import ENGINE, read_json, read_summary, require_results

SLURM_FILE = "slurm.json"  # exists in the folder of a run that was submitted to Slurm
PAGE = "report.html"  # in a sweep's folder, see report/page
UNFINISHED = ("pending", "running", "requeued", "preempted")
FINE = ("done", "skipped")  # ends of a point that is not run again


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
    def other_cores(self) -> float | None:
        """Mean number of cores that other programs used meanwhile; None where ranks ran on other machines."""
        cores = self.environment.get("other_cores")
        return None if cores is None else float(cores)

    @property
    def label(self) -> str:
        return f"{self.strategy}-{self.implementation}"

    @property
    def world_size(self) -> int:
        return int(self.config["world_size"])


def read_run(folder: Path) -> Run:
    """Read a run. Raises FileNotFoundError if the folder holds no config.yaml, and DamagedFile.

    Damaged settings of the engine cost no more than themselves.
    """
    state, engine, left_out = state_of(folder), dict[str, Any](), list[str]()
    try:
        engine = read_json(folder / ENGINE) or engine
    except DamagedFile as error:
        left_out.append(f"{error.line}, and left out")
    return Run(
        folder=folder,
        config=_read_config(folder / "config.yaml"),
        status=state["status"],
        reason=state.get("reason"),
        times={key: value for key, value in state.items() if key.endswith("_at")},
        environment=flatten(read_json(folder / "environment.json") or {}),
        engine=flatten(engine),
        summary=read_summary(folder),
        num_attempts=max(1, attempt.newest(folder)),
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


def order_of(run: Run) -> tuple[int, float, str]:
    """Return what puts runs of a sweep in their order, by rounds, which `--rerun` does not change."""
    return int(run.environment.get("repeat") or 0), run.times.get("pending_at", 0.0), run.name


def state_of(folder: Path) -> dict[str, Any]:
    """Return state.json's content; an unfinished point whose process is dead counts as cancelled."""
    state = read_state(folder)
    reason = why_abandoned(folder, state)
    return {**state, "status": "cancelled", "reason": reason} if reason else state


def why_abandoned(folder: Path, state: dict[str, Any]) -> str | None:
    """Return a message if the process of a point in this unfinished state is known to be dead; else None."""
    is_held = (
        state["status"] == "pending" and state["reason"]
    )  # whoever follows the sweep submits it
    by_slurm = is_held or (folder / SLURM_FILE).exists()
    ended = state["status"] not in UNFINISHED
    return None if ended or by_slurm else sweep_owner.death_of_owner(folder)


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
