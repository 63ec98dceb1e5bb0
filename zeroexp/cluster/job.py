"""One run as a cluster sees it: a folder with a resolved config, and a state that outlives this process.

A `Job` holds only its folder, so it can be pickled, sent to another machine, or made again from a path.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from zeroexp.checkpoint.folders import complete_checkpoints, pin, step_of
from zeroexp.config.keys import Config, DamagedFile, load
from zeroexp.measure.record import verdict_of
from zeroexp.tracking import attempt
from zeroexp.tracking.files import drop_records, read_json, write_json
from zeroexp.tracking.json_files import remove_unfinished
from zeroexp.tracking.run import SLURM_FILE, UNFINISHED, read_state

Ending = Literal["done", "failed", "out_of_memory", "node_lost", "timed_out", "cancelled"]
Status = Literal[Ending, "pending", "running", "requeued", "preempted", "skipped"]


@dataclass(frozen=True)
class JobOutcome:
    """The end of a job; `cause` is what the first failing rank wrote into failure.json."""

    status: Ending
    cause: dict[str, Any] | None = None


@dataclass(frozen=True)
class Job:
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def config(self) -> Config:
        """The resolved config of the run."""
        return load(self.folder / "config.yaml")

    @property
    def state(self) -> dict[str, Any]:
        """`status`, `reason` and one `<status>_at` (Unix seconds) for each status so far."""
        return read_state(self.folder)

    @property
    def status(self) -> str:
        return self.state["status"]

    @property
    def summary(self) -> dict[str, Any] | None:
        return read_json(self.folder / "summary.json")

    @property
    def verdict(self) -> str | None:
        """The problem with a finished run's result, if any."""
        return verdict_of((self.summary or {}).get("diverged_at"))

    @property
    def failure(self) -> dict[str, Any] | None:
        return read_json(self.folder / "failure.json")

    def enter(
        self, status: Status, reason: str | None = None, *, since: float | None = None
    ) -> None:
        """Write the next state atomically: a reader sees the old or the new one. since: when it began, if not now."""
        passed = {key: value for key, value in self.state.items() if key.endswith("_at")}
        state = {"status": status, "reason": reason, **passed, f"{status}_at": since or time.time()}
        write_json(self.folder / "state.json", state)

    def put_back(self) -> None:
        """Make room for another attempt, in the run's place among the others: its files move to earlier/<number>/.

        Records that a checkpoint continues stay: only the steps behind the checkpoint are dropped, since they run
        again. A checkpoint before which steps are lost from the records moves too, and a line says so.
        """
        state = self.state
        if state["status"] not in UNFINISHED:  # else nobody saw how it ended
            attempt.explain(self.folder, state["reason"] or state["status"])
        moved = ["failure.json", "state.json", SLURM_FILE, "logs"]
        num_steps = self.config.train.warmup_steps + self.config.train.steps
        checkpoints = complete_checkpoints(self.folder)
        if checkpoints and step_of(checkpoints[-1]) >= num_steps and not self._has_results():
            last = checkpoints.pop()  # from it no step is left that could bring the results again
            moved.append(str(last.relative_to(self.folder)))
        while checkpoints:
            try:
                drop_records(self.folder, from_step=step_of(checkpoints[-1]), rests_on=True)
                break
            except DamagedFile as error:
                again = "goes on from an older checkpoint, if there is one"
                print(f"zeroexp: {self.name} {again}: {error.line}", file=sys.stderr)
                moved.append(str(checkpoints.pop().relative_to(self.folder)))
        steps_done = step_of(checkpoints[-1]) if checkpoints else 0
        if steps_done < num_steps:
            moved.append("summary.json")
        if not checkpoints:
            moved.append("records.jsonl")
        remove_unfinished(self.folder)
        earlier = self.folder / "earlier"
        earlier.mkdir(exist_ok=True)
        taken = [int(path.name) for path in earlier.iterdir() if path.name.isdecimal()]
        there = earlier / str(max(taken, default=0) + 1)
        there.mkdir()
        for name in moved:
            if (self.folder / name).exists():
                (self.folder / name).rename(there / Path(name).name)
        self.enter("pending", since=state.get("pending_at"))
        if self.config.resume:
            pin(Path(self.config.resume), self.folder)

    def _has_results(self) -> bool:
        try:
            return self.summary is not None
        except DamagedFile:
            return False


def ending_of(status: Ending, failure: dict[str, Any] | None) -> Ending:
    """Return the status, where a failure for lack of memory becomes out_of_memory."""
    short = status == "failed" and failure and failure.get("out_of_memory")
    return "out_of_memory" if short else status


def event_of(outcome: JobOutcome) -> str | None:
    """Return the key of `events` that is about this end of a job, if one is."""
    if outcome.status == "out_of_memory":
        return "out_of_memory"
    return {"Hang": "stall", "NotFinite": "nan"}.get((outcome.cause or {}).get("exception", ""))


def reason_of(status: Ending, job: Job) -> str | None:
    """Return the reason that belongs to this end of a job, in one line.

    A rank that lost its peers may still write a failure while a job is ended from outside: that is no reason then.
    """
    if status == "done":
        return job.verdict
    if status == "timed_out":
        return f"time limit of {job.config.cluster.timeout_s} s (cluster.timeout_s)"
    if status == "cancelled":
        return "the process that ran it hung up"
    return first_cause(job.failure) or f"nobody could write down why; see {job.folder / 'logs'}"


def first_cause(failure: dict[str, Any] | None) -> str | None:
    """Summarize failure.json in one line, which names the log; behind it stand more lines of the message, if any."""
    if failure is None:
        return None
    who = "" if failure["rank"] is None else f"rank {failure['rank']} on {failure['host']}: "
    log = f" ({failure['log']})" if failure["log"] else ""
    first, *more = failure["message"].split("\n")
    return "\n".join([f"{who}{failure['exception']}: {first}{log}", *more])
