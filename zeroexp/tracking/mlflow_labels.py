"""What MLflow keeps of a run beside its metrics: params, tags, files, status and times. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zeroexp.measure.record import StepRecord
from zeroexp.tracking.run import UNFINISHED, Run

ENVIRONMENT = {  # tag -> key of a run's environment
    "git_commit": "git.commit",
    "git_dirty": "git.dirty",
    "host": "host",
    "device": "device",
    # MLflow itself shows where the code came from.
    "mlflow.source.git.commit": "git.commit",
    "mlflow.source.name": "command",
}
LINK = "mlflow.json"  # the MLflow run that a folder became: of a run, and of a sweep's page
FINISHED, FAILED, KILLED, RUNNING = "FINISHED", "FAILED", "KILLED", "RUNNING"


def mlflow_status(status: str) -> str:
    """Return MLflow's word for a status of state.json."""
    ended = {"done": FINISHED, "cancelled": KILLED}
    return RUNNING if status in UNFINISHED else ended.get(status, FAILED)


def run_params(run: Run) -> dict[str, str]:
    """Return the resolved config with dotted keys. `study` is left out: it says why a point ran, not what it was."""
    return {key: value for key, value in run.config.items() if not key.startswith("study.")}


def run_tags(run: Run, status: str) -> dict[str, str]:
    summary = run.summary
    tags = {
        "sweep": run.sweep,
        "strategy": run.label,
        "status": status,
        "attempts": str(run.num_attempts) if run.num_attempts > 1 else None,
        "reason": run.reason,
        "verdict": summary and summary.verdict,
        "drift": summary and "; ".join(map(" ".join, summary.drift.items())),
        "data": summary and summary.data_source,
        "peak_flops": summary.peak_flops_name if summary and summary.mfu else None,
        **{tag: run.environment.get(key) for tag, key in ENVIRONMENT.items()},
        # These are tags, since another attempt may find other links, and MLflow writes a param only once.
        **{f"engine.{key}": value for key, value in run.engine.items()},
    }
    # What an attempt before has told ends with it.
    ended = ("reason", "verdict", "drift") if run.num_attempts > 1 else ()
    return {
        tag: value or ""
        for tag, value in tags.items()
        if (value and value != "null") or tag in ended
    }


def artifacts(folder: Path) -> list[Path]:
    """Return what MLflow keeps of a run: its files, also those of instruments, and the folder of its logs."""
    own = [path for path in sorted(folder.glob("[!.]*")) if path.is_file() and path.name != LINK]
    return [*own, *folder.glob("logs")]


def start_time(run: Run) -> float:
    """Return the start in Unix seconds, from state.json; else the time at which the config was written."""
    return run.times.get("running_at", (run.folder / "config.yaml").stat().st_mtime)


def end_time(run: Run, status: str, records: Sequence[tuple[float, StepRecord]]) -> float:
    """Return the end in Unix seconds, from state.json; else the time of the last record."""
    last_seen = records[-1][0] if records else start_time(run)
    return max(start_time(run), run.times.get(f"{status}_at", last_seen))
