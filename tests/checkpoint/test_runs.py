"""Whole runs that save: killed at any moment, damaged since, resumed by others, on a full disk or one that is shut."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.composing import compose_once
from tests.small_disks import mounted
from tests.test_rank import log_of, make_job
from zeroexp import __main__ as zeroexp
from zeroexp.checkpoint import folders
from zeroexp.checkpoint.check_hashes import check_pieces
from zeroexp.checkpoint.folders import LOG
from zeroexp.checkpoint.manifest import MANIFEST, read_manifest
from zeroexp.cluster.job import Job
from zeroexp.cluster.local import LocalCluster
from zeroexp.cluster.local_points import LocalPoints
from zeroexp.tracking.files import RECORDS, Tail, read_records, read_summary

MODEL = {"width": 256, "depth": 4}  # a step takes a few milliseconds, writing its state some dozens
STEPS = 12  # and one of warm-up
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}


def job_at(folder: Path, steps: int = STEPS, **changes: Any) -> Job:
    options = {"model__mlp": MODEL, "data__global_batch_size": 6, "train__steps": steps}
    return make_job(folder, **{**options, "checkpoint__every": 1, **changes})


def numbers(job: Job) -> list[tuple[float, ...]]:
    records = read_records(job.folder)
    return [(r.step, r.samples_seen, r.lr, r.loss, r.grad_norm) for r in records]


def steps_of(job: Job) -> list[int]:
    """The steps whose checkpoints are there, each undamaged."""
    there = folders.complete_checkpoints(job.folder)
    for checkpoint in there:
        check_pieces(checkpoint, read_manifest(checkpoint))
    return [folders.step_of(one) for one in there]


@pytest.fixture(scope="module")
def undisturbed(local, tmp_path_factory) -> Job:
    """A run that is saved at three steps and at its end. It is to be read, and copied before it is changed."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    job = job_at(folder, checkpoint__every=4, checkpoint__keep=3)
    assert local.run(job).status == "done"
    return job


@pytest.fixture
def copied(undisturbed, tmp_path) -> Job:
    shutil.copytree(undisturbed.folder, tmp_path / "copied")
    return Job(tmp_path / "copied")


def run_again(local: LocalCluster, job: Job) -> list[str]:
    """Run it again as one that has failed; returns the complaints that its user is shown."""
    job.enter("failed", "its launcher died before it could write that it was done")
    job.put_back()
    log = Tail(job.folder / LOG)
    log.new_lines()
    outcome = local.run(job)
    assert outcome.status == "done", outcome.cause
    return [error for line in log.new_lines() if (error := json.loads(line)["error"])]


@pytest.mark.slow
def test_saving_is_in_no_step_but_in_the_record(undisturbed):
    saves = [json.loads(line) for line in (undisturbed.folder / LOG).read_text().splitlines()]
    blocked = {save["step"]: save["blocked_seconds"] for save in saves}
    records, summary = read_records(undisturbed.folder), read_summary(undisturbed.folder)
    during = {r.step: r.saving_seconds for r in records if r.saving_seconds}
    assert list(blocked) == [4, 8, 12, 13] and during == {n: blocked[n] for n in (4, 8, 12)}
    assert summary is not None and summary.saving_seconds == sum(during.values())
    measured = [r for r in records if not r.warmup]
    seconds = sum(r.step_seconds for r in measured) + summary.saving_seconds
    assert summary.tokens_per_second == pytest.approx(sum(r.num_tokens for r in measured) / seconds)


@pytest.mark.slow
def test_run_again_behind_its_end_it_is_done(local, undisturbed, copied):
    assert run_again(local, copied) == []
    for read in (read_summary, read_records):
        assert read(copied.folder) == read(undisturbed.folder)


# -- damaged since ----------------------------------------------------------------------------------


def flip_a_bit(checkpoint: Path) -> None:
    piece = next(iter(read_manifest(checkpoint).tensors()))[1].pieces[0]
    content = bytearray((checkpoint / piece.file).read_bytes())
    content[piece.offset] ^= 1
    (checkpoint / piece.file).write_bytes(content)


def started_at(job: Job) -> list[str]:
    return [line.split(", ")[1] for line in log_of(job, 0).splitlines() if "loaded in" in line]


def test_a_run_goes_on_from_its_newest_whole_one_and_says_so_once(local, undisturbed, copied):
    _, newer, newest = folders.complete_checkpoints(copied.folder)
    flip_a_bit(newer)
    (newest / MANIFEST).write_text("{")
    events = run_again(local, copied)
    for event, file in zip(events, (newest / MANIFEST, newer / "rank0.bin"), strict=True):
        assert event.startswith(f"{file}: ") and f"; now damaged-{file.parent.name}, " in event
    assert [line for line in log_of(copied, 0).splitlines() if line in events] == events
    assert "\n".join(events) not in log_of(copied, 1)
    assert started_at(copied) == ["8 steps done"]
    assert numbers(copied) == numbers(undisturbed), "none missing, none twice, bit for bit"
    assert steps_of(copied) == [8, 12, 13], "saved again"

    for checkpoint in folders.complete_checkpoints(copied.folder):
        flip_a_bit(checkpoint)
    events = run_again(local, copied)
    older = ["from before it"] * 2
    assert [line.rpartition(", the run goes on ")[2] for line in events] == [
        *(*older, "from its beginning, since no other is left")
    ]
    assert started_at(copied) == [], "from its beginning"
    assert numbers(copied) == numbers(undisturbed)
    saves = (copied.folder / LOG).read_text().splitlines()
    assert sum(json.loads(line)["error"] is not None for line in saves) == 5


def test_a_run_does_not_go_on_with_another_text(local, tmp_path):
    """It would train again on samples that it has seen, and leave out others."""
    text = tmp_path / "text.txt"
    text.write_text("a text of so many words " * 40)
    job = make_job(
        tmp_path / "run",
        **{"data__kind": "text", "data__path": str(text), "data__task": "causal"},
        **{"model__task": "causal", "model__family": "gpt2", "model__hf_config": GPT2},
        checkpoint__every=3,
    )
    assert local.run(job).status == "done"
    with text.open("a") as file:
        file.write("and some more")
    job.enter("failed", "its launcher died before it could write that it was done")
    outcome = local.run(job)
    assert outcome.status == "failed"
    assert f"data.path={text} held another text" in outcome.cause["message"]


# -- resumed by others ------------------------------------------------------------------------------


@pytest.mark.slow
def test_another_engine_goes_on_from_its_checkpoint(local, undisturbed, tmp_path, monkeypatch):
    """The next samples are the same, so that losses differ by the order of summation alone."""
    compose_once(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LocalPoints, "_cluster", lambda self, config: local)
    saved = folders.complete_checkpoints(undisturbed.folder)[0]
    words = ["model=mlp_tiny", "model.mlp.width=256", "model.mlp.depth=4", "data=vectors"]
    words += ["data.seq_len=8", "data.global_batch_size=6", "tracking=files", "world_size=3"]
    words += ["strategy=zero1", "strategy.implementation=torch", f"resume={saved}"]
    words += [
        "train.warmup_steps=1",
        f"train.steps={STEPS}",
        "cluster.device=cpu",
        "cluster.rehearse_s=0",
    ]
    monkeypatch.setattr(sys, "argv", ["zeroexp", *words])
    assert zeroexp.main() == 0
    (job,) = [Job(path.parent) for path in tmp_path.glob("outputs/*/*/state.json")]
    pins = saved.parent.glob(".pin.*")
    assert {Path(pin.read_text()) for pin in pins} == {job.folder}
    rest = numbers(undisturbed)[8:]
    for ours, theirs in zip(numbers(job), rest, strict=True):
        assert ours[:3] == theirs[:3], "step, position and learning rate exactly"
        assert ours[3:] == pytest.approx(theirs[3:], rel=2e-5)


# -- kill -9 ----------------------------------------------------------------------------------------


class Killer:
    """Kills one rank or all behind the second step of an attempt: at once, or when a checkpoint is being written."""

    def __init__(self, job: Job, chance: random.Random, *, writing: bool) -> None:
        self._job, self._chance, self._writing = job, chance, writing
        self._records, self._num_records = Tail(job.folder / RECORDS), 0
        self._records.new_lines()

    def __call__(self) -> None:
        before = self._num_records
        self._num_records += len(self._records.new_lines())
        if before < 2 <= self._num_records:
            threading.Thread(target=self._kill).start()

    def _kill(self) -> None:
        ranks = self._chance.choice([(0,), (1,), (0, 1)])
        pids = [int(re.findall(r"process (\d+)", log_of(self._job, rank))[-1]) for rank in ranks]
        alive = Path(f"/proc/{pids[0]}")
        while self._writing and not unfinished(self._job) and alive.exists():
            time.sleep(1e-4)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def unfinished(job: Job) -> list[Path]:
    return list((job.folder / "checkpoint").glob(".step-*"))


def kill_again_and_again(local: LocalCluster, reference: Job, job: Job, num_kills: int) -> None:
    """Every attempt goes on from the last whole checkpoint; together they are one run, bit for bit."""
    chance, num_unfinished = random.Random(num_kills), 0
    for number in range(num_kills):
        outcome = local.run(job, Killer(job, chance, writing=number % 2 == 0))
        assert outcome.status == "failed" and outcome.cause is not None
        assert outcome.cause["exception"] == "SIGKILL", outcome.cause["message"]
        num_unfinished += len(unfinished(job))
        steps_of(job)
    assert num_unfinished, "no kill came while a checkpoint was being written"
    assert local.run(job).status == "done"
    assert numbers(job) == numbers(reference)
    num_steps = len(numbers(reference))
    assert (job.folder / "records.jsonl").read_text().count("\n") == num_steps, "none twice"
    assert steps_of(job) == [num_steps - 1, num_steps] and unfinished(job) == []
    cold = {0}  # a process begins with one step of warm-up, and writes anew what follows
    for start in (int(line.split()[0]) for line in started_at(job)):
        cold = {step for step in cold if step < start} | {start}
    assert {r.step for r in read_records(job.folder) if r.warmup} == cold - {num_steps - 1}
    summary = read_summary(job.folder)
    assert summary.num_steps == num_steps - summary.num_warmup_steps
    assert summary.num_warmup_steps == len(cold - {num_steps - 1})
    # On a busy machine both of two kills may come before anything is saved.
    assert len(cold) > 1 or num_kills == 2, "no attempt went on from a checkpoint"


@pytest.mark.slow
def test_killed_twice(local, undisturbed, tmp_path):
    """While it writes, and at once."""
    kill_again_and_again(local, undisturbed, job_at(tmp_path / "killed"), 2)


@pytest.mark.slow
def test_killed_ten_times(local, tmp_path):
    steps = 15 * 10  # an attempt comes to some few
    reference = job_at(tmp_path / "reference", steps, checkpoint__every=None)
    assert local.run(reference).status == "done"
    kill_again_and_again(local, reference, job_at(tmp_path / "killed", steps), 10)


# -- disks ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_full_disk_costs_no_training_and_no_older_checkpoint(local, undisturbed, tmp_path):
    """Room for one checkpoint and a half: every save but the first fails, and training goes on."""
    job = job_at(tmp_path / "run", 4)
    newest = folders.complete_checkpoints(undisturbed.folder)[-1]
    size = sum(read_manifest(newest).file_bytes().values()) * 3 // 2
    with mounted(job.folder / "checkpoint", f"size={size}"):
        outcome = local.run(job)
        assert outcome.status == "failed" and outcome.cause is not None
        line = outcome.cause["message"]
        assert re.match(r"checkpoint of step 5 failed: rank \d: OSError: .*No space left", line)
        (only,) = folders.complete_checkpoints(job.folder)
        assert line.endswith(f"the newest whole one is {only}") and steps_of(job) == [1]
        assert sorted(os.listdir(job.folder / "checkpoint")) == ["step-000001"]
    assert [r.step for r in read_records(job.folder)] == [0, 1, 2, 3, 4]
    assert log_of(job, 0).count("\ncheckpoint of step") == 4, "one line for each"


def test_a_folder_that_can_not_be_written_is_told_before_the_first_step(local, tmp_path):
    job = job_at(tmp_path / "run", 4)
    with mounted(job.folder / "checkpoint", "size=1m,ro"):
        outcome = local.run(job)
    assert outcome.status == "failed" and outcome.cause is not None
    assert outcome.cause["exception"] == "CheckpointError"
    assert outcome.cause["message"].startswith(
        f"{job.folder / 'checkpoint'}: Read-only file system; "
    )
    assert read_records(job.folder) == []
