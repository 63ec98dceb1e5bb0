"""What `events` says becomes of real runs: ended, tried again, told about."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.test_sweep import ONE, jobs, statuses, zeroexp
from zeroexp.cluster.job import JobOutcome, event_of
from zeroexp.config.keys import EventsConfig
from zeroexp.run.rank import NotFinite
from zeroexp.tracking import attempt
from zeroexp.tracking.files import read_records

# In the rank's process, for its first two attempts: the second optimizer step asks for what no machine has.
HUNGRY_TWICE = """
import os, pathlib, torch

updated = torch.optim.AdamW.step

def step(self, *args, **kwargs):
    tries = pathlib.Path("tries")
    self.num_updates = getattr(self, "num_updates", 0) + 1
    if "RANK" in os.environ and self.num_updates == 2:
        with tries.open("a") as file:
            file.write("x")
        if len(tries.read_text()) <= 2:
            torch.empty(1 << 56, dtype=torch.uint8)
    return updated(self, *args, **kwargs)

torch.optim.AdamW.step = step
"""
HUNGRY = ["plugins=hungry", "optimizer.fused=false", "events.out_of_memory=retry", *ONE]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hungry.py").write_text(HUNGRY_TWICE)
    return tmp_path


@pytest.mark.slow
def test_a_loss_that_is_no_number_ends_the_run_and_is_told(tmp_path: Path) -> None:
    words = [*ONE, "optimizer=sgd", "optimizer.lr=1e6", "train.steps=20", "events.nan=end"]
    done = zeroexp(tmp_path, *words, "events.tell='cat >> told'")
    assert done.returncode == 1, done.stderr
    (job,) = jobs(tmp_path).values()
    reason = job.state["reason"]
    assert job.status == "failed" and ": NotFinite: loss " in reason
    assert (tmp_path / "told").read_text() == f"{job.folder}: failed: {reason}\n"
    last = read_records(job.folder)[-1]
    assert last.step < 20 and f"at step {last.step + 1}; with events.nan=go_on" in reason


@pytest.mark.slow
def test_a_run_that_lacked_memory_is_tried_as_often_as_asked(folder: Path) -> None:
    done = zeroexp(folder, *HUNGRY, "events.retries=2", "events.tell='cat >> told'")
    assert done.returncode == 0, done.stderr
    assert [*statuses(folder).values()] == ["done"]
    (job,) = jobs(folder).values()
    assert sorted(path.name for path in job.folder.glob("earlier/*")) == ["1", "2"]
    assert [record.step for record in read_records(job.folder)] == [0, 1, 2]
    *failed, last = attempt.read(job.folder)
    told = (folder / "told").read_text().splitlines()
    assert told == [f"{job.folder}: out_of_memory: {each['reason']}" for each in failed]
    assert "reason" not in last
    assert len(told) == 2 and all("out_of_memory: rank 0 on " in line for line in told)


@pytest.mark.slow
def test_no_run_is_tried_more_often_or_unasked(folder: Path) -> None:
    done = zeroexp(folder, *HUNGRY)
    assert done.returncode == 1 and (folder / "tries").read_text() == "xx", done.stderr
    assert [*statuses(folder).values()] == ["out_of_memory"]
    # Once more, and the retries of another command count for nothing.
    (folder / "tries").write_text("x")
    (job,) = jobs(folder).values()
    again = zeroexp(folder, "--rerun", str(job.folder.parent))
    assert again.returncode == 0 and [*statuses(folder).values()] == ["done"], again.stderr
    (folder / "tries").unlink()
    words = ["events.out_of_memory=end", "events.tell='exit 3'", "outputs=others"]
    done = zeroexp(folder, *HUNGRY, *words)
    assert done.returncode == 1 and (folder / "tries").read_text() == "x", done.stderr
    # A command that fails costs a line.
    assert "zeroexp: events.tell: Command 'exit 3' returned non-zero exit status 3." in done.stderr


@pytest.mark.parametrize(
    ("outcome", "event"),
    [
        (JobOutcome("failed", {"exception": "Hang"}), "stall"),
        (JobOutcome("failed", {"exception": NotFinite.__name__}), "nan"),
        (JobOutcome("out_of_memory", {"exception": "RuntimeError"}), "out_of_memory"),
        (JobOutcome("failed", {"exception": "RuntimeError"}), None),
        (JobOutcome("timed_out"), None),
        (JobOutcome("done"), None),
    ],
)
def test_each_event_is_known_by_how_the_job_ended(outcome: JobOutcome, event: str | None) -> None:
    assert event_of(outcome) == event
    assert event is None or hasattr(EventsConfig(), event)
