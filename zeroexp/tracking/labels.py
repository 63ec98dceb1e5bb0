"""What MLflow keeps of a run beside its metrics: params, tags, data set, files, status and times. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from zeroexp.measure.record import StepRecord
from zeroexp.tracking.files import ENGINE, RECORDS, SUMMARY
from zeroexp.tracking.run import Run

DIGEST_LENGTH = 36  # of a data set: MLflow takes no more
FILES = (
    "config.yaml",
    "environment.json",
    "state.json",
    "failure.json",
    "load.json",
    "slurm.json",
    "attempts.json",
    ENGINE,
    RECORDS,
    SUMMARY,
    "logs",
)
# What instruments leave where they were asked for: timelines, torch's profiles and snapshots, hashes, samples of nodes.
PATTERNS = ("trace.*.json", "profile.*", "memory.*.pickle", "hashes.*.jsonl", "system.*.jsonl")
# An engine keeps its colour in every chart of every sweep: Okabe and Ito's for the strategy, paler by implementation.
COLOURS = {
    "ddp": (0x8A, 0x8A, 0x8A),
    "zero1": (0x00, 0x72, 0xB2),
    "zero1_allreduce": (0xCC, 0x79, 0xA7),
    "zero2": (0x00, 0x9E, 0x73),
    "zero3": (0xD5, 0x5E, 0x00),
}
PALER = {"buffer": 0.0, "tensor": 0.2, "parameter": 0.4, "torch": 0.6}  # share of white
MACHINE = {"git.commit": "git_commit", "git.dirty": "git_dirty", "host": "host", "device": "device"}
FINISHED, FAILED, KILLED, RUNNING = "FINISHED", "FAILED", "KILLED", "RUNNING"
MLFLOW_STATUS = {
    "done": FINISHED,
    "failed": FAILED,
    "out_of_memory": FAILED,
    "node_lost": FAILED,
    "timed_out": FAILED,
    "cancelled": KILLED,
    "pending": RUNNING,
    "running": RUNNING,
    "requeued": RUNNING,
    "preempted": RUNNING,
}


def run_params(run: Run) -> dict[str, str]:
    """Return the resolved config with dotted keys. `study` is left out: it says why a point ran, not what it was."""
    return {key: value for key, value in run.config.items() if not key.startswith("study.")}


def run_tags(run: Run, status: str) -> dict[str, str]:
    tags = {tag: run.environment[key] for key, tag in MACHINE.items() if key in run.environment}
    return {
        "sweep": run.sweep,
        "strategy": run.label,
        "status": status,
        **({"attempts": str(run.num_attempts)} if run.num_attempts > 1 else {}),
        **({"reason": run.reason} if run.reason else {}),
        **({"verdict": run.summary.verdict} if run.summary and run.summary.verdict else {}),
        **({"data": run.summary.data_source} if run.summary and run.summary.data_source else {}),
        **({"peak_flops": run.summary.peak_flops_name} if run.summary and run.summary.mfu else {}),
        **tags,
        **_of_mlflow(run),
        # These are tags, since another attempt may find other links, and MLflow writes a param only once.
        **{f"engine.{key}": value for key, value in run.engine.items() if value != "null"},
    }


def _of_mlflow(run: Run) -> dict[str, str]:
    """Return the tags that MLflow itself shows: where the code came from, and the run's colour in charts."""
    values = {
        "mlflow.source.git.commit": run.environment.get("git.commit"),
        "mlflow.source.name": run.environment.get("command"),
        "mlflow.runColor": _colour(run),
    }
    return {key: value for key, value in values.items() if value and value != "null"}


def _colour(run: Run) -> str | None:
    """Return #rrggbb; None for a strategy or implementation that somebody added, which MLflow colours itself."""
    colour, white = COLOURS.get(run.strategy), PALER.get(run.implementation)
    if colour is None or white is None:
        return None
    return "#" + "".join(f"{round(part + white * (255 - part)):02x}" for part in colour)


def dataset_fields(run: Run) -> tuple[str, str, str, str] | None:
    """Return name, digest, kind and source of the data that the run trained on; None until it is known."""
    if run.summary is None or not run.summary.data_source:
        return None
    settings = {key: value for key, value in run.config.items() if key.startswith("data.")}
    source = json.dumps({"source": run.summary.data_source, **settings}, sort_keys=True)
    digest = sha256(source.encode()).hexdigest()[:DIGEST_LENGTH]
    return settings.get("data.name", "data"), digest, settings.get("data.kind", "data"), source


def artifacts(folder: Path) -> list[Path]:
    """Return the files and folders of a run that MLflow keeps."""
    named = [folder / name for name in FILES if (folder / name).exists()]
    return named + [path for pattern in PATTERNS for path in sorted(folder.glob(pattern))]


def start_time(run: Run) -> float:
    """Return the start in Unix seconds, from state.json; else the time at which the config was written."""
    return run.times.get("running_at", (run.folder / "config.yaml").stat().st_mtime)


def end_time(run: Run, status: str, records: Sequence[tuple[float, StepRecord]]) -> float:
    """Return the end in Unix seconds, from state.json; else the time of the last record."""
    last_seen = records[-1][0] if records else start_time(run)
    return max(start_time(run), run.times.get(f"{status}_at", last_seen))
