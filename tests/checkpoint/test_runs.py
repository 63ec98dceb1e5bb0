"""Whole runs that save: killed at any moment, on a full disk, on one that can not be written."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.test_rank import log_of, make_job, run
from zeroexp.checkpoint import folders
from zeroexp.checkpoint.folders import LOG
from zeroexp.checkpoint.manifest import read_manifest
from zeroexp.cluster.job import Job
from zeroexp.cluster.local import LocalCluster
from zeroexp.config.keys import ModelConfig
from zeroexp.measure.record import StepRecord
from zeroexp.models.module import build_model
from zeroexp.process.content_hash import hash_of
from zeroexp.tracking.files import read_records, read_summary

MODEL = {"width": 256, "depth": 4}  # a step takes a few milliseconds, writing its state some dozens


def state_bytes() -> int:
    """Weights and two moments."""
    built = build_model(
        ModelConfig(family="mlp", task="regression", mlp=MODEL), seed=0, device="meta"
    )
    return 3 * 4 * sum(parameter.numel() for parameter in built.module.parameters())


def job_at(folder: Path, steps: int, **changes: Any) -> Job:
    options = {"model__mlp": MODEL, "train__steps": steps, "checkpoint__every": 1, **changes}
    return make_job(folder, **options)


def numbers(records: list[StepRecord]) -> list[tuple[float, ...]]:
    return [(r.step, r.samples_seen, r.loss, r.grad_norm, r.lr) for r in records]


def require_undamaged(checkpoint: Path) -> None:
    for name, tensor in read_manifest(checkpoint).tensors():
        for piece in tensor.pieces:
            stop = piece.offset + tensor.num_bytes(piece)
            content = (checkpoint / piece.file).read_bytes()[piece.offset : stop]
            assert hash_of([content]) == piece.hash, f"{checkpoint}: {name}"


# -- kill -9 ----------------------------------------------------------------------------------------


class Killer:
    """Kills one rank or all behind the second step of an attempt: at once, or when a checkpoint is being written."""

    def __init__(self, job: Job, chance: random.Random, *, writing: bool) -> None:
        self._job, self._chance, self._writing = job, chance, writing
        self._num_records = 0

    def __call__(self, record: dict[str, Any]) -> None:
        self._num_records += 1
        if self._num_records == 2:
            threading.Thread(target=self._kill).start()

    def _kill(self) -> None:
        ranks = self._chance.choice([(0,), (1,), (0, 1)])
        pids = [int(re.findall(r"process (\d+)", log_of(self._job, rank))[-1]) for rank in ranks]
        while self._writing and not unfinished(self._job) and alive(pids[0]):
            time.sleep(1e-4)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def unfinished(job: Job) -> list[Path]:
    return list((job.folder / "checkpoint").glob(".step-*"))


def kill_again_and_again(local: LocalCluster, tmp_path: Path, num_kills: int) -> None:
    """Every attempt goes on from the last whole checkpoint; together they are one run, bit for bit."""
    steps = 15 * num_kills  # an attempt comes to some few
    reference = job_at(tmp_path / "reference", steps, checkpoint__every=None)
    assert run(local, reference).status == "done"
    job, chance = job_at(tmp_path / "killed", steps), random.Random(num_kills)
    num_unfinished = 0
    for number in range(num_kills):
        outcome = run(local, job, Killer(job, chance, writing=number % 2 == 0))
        assert outcome.status == "failed" and outcome.cause is not None
        assert outcome.cause["exception"] == "SIGKILL", outcome.cause["message"]
        num_unfinished += len(unfinished(job))
        for checkpoint in folders.complete_checkpoints(job.folder):
            require_undamaged(checkpoint)
    assert num_unfinished, "no kill came while a checkpoint was being written"
    assert run(local, job).status == "done"
    records = read_records(job.folder)
    assert numbers(records) == numbers(read_records(reference.folder))
    assert (job.folder / "records.jsonl").read_text().count("\n") == len(records), "none twice"
    assert [folders.step_of(path) for path in folders.complete_checkpoints(job.folder)] == [
        steps,
        steps + 1,
    ]
    assert unfinished(job) == []
    summary = read_summary(job.folder)
    assert summary is not None and (summary.num_steps, summary.num_warmup_steps) == (steps, 1)


def test_killed_twice(local, tmp_path):
    """While it writes, and at once."""
    kill_again_and_again(local, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_fifty_times(local, tmp_path):
    kill_again_and_again(local, tmp_path, 50)


def test_run_again_behind_its_end_it_is_done(local, tmp_path):
    job = job_at(tmp_path / "run", 3)
    assert run(local, job).status == "done"
    summary, records = read_summary(job.folder), read_records(job.folder)
    job.enter("failed", "its launcher died before it could write that it was done")
    job.set_aside()
    assert run(local, job).status == "done"
    assert (read_summary(job.folder), read_records(job.folder)) == (summary, records)


def test_saving_is_in_no_step_but_in_the_record(local, tmp_path):
    job = job_at(tmp_path / "run", 5, checkpoint__every=2)
    assert run(local, job).status == "done"
    saves = [json.loads(line) for line in (job.folder / LOG).read_text().splitlines()]
    assert [save["step"] for save in saves] == [2, 4, 6]
    blocked = {save["step"]: save["blocked_seconds"] for save in saves}
    records = read_records(job.folder)
    assert {r.step: r.saving_seconds for r in records if r.saving_seconds} == {
        step: blocked[step] for step in (2, 4)
    }
    summary = read_summary(job.folder)
    assert summary is not None and summary.saving_seconds == blocked[2] + blocked[4]
    measured = [r for r in records if not r.warmup]
    seconds = sum(r.step_seconds for r in measured) + summary.saving_seconds
    assert summary.tokens_per_second == pytest.approx(sum(r.num_tokens for r in measured) / seconds)


# -- disks ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A small file system of its own at <folder>/checkpoint."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("mounting a small file system needs root")
    target = folder / "checkpoint"
    target.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "zeroexp-test", str(target)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this system does not let root mount a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(target)], check=True)


def test_a_full_disk_costs_no_training_and_no_older_checkpoint(local, tmp_path):
    """Room for one checkpoint and a half: every save but the first fails, and training goes on."""
    job = job_at(tmp_path / "run", 4)
    with mounted(job.folder, f"size={state_bytes() * 3 // 2}"):
        outcome = run(local, job)
        assert outcome.status == "failed" and outcome.cause is not None
        line = outcome.cause["message"]
        assert re.match(r"checkpoint of step 5 failed: rank \d: OSError: .*No space left", line)
        (only,) = folders.complete_checkpoints(job.folder)
        assert line.endswith(f"the newest whole one is {only}") and only.name == "step-000001"
        require_undamaged(only)
        assert sorted(os.listdir(job.folder / "checkpoint")) == [".attempt", "step-000001"]
    assert [r.step for r in read_records(job.folder)] == [0, 1, 2, 3, 4]
    told = [line for line in log_of(job, 0).splitlines() if line.startswith("checkpoint of step")]
    assert len(told) == 4, "one line for each"


def test_a_folder_that_can_not_be_written_is_told_before_the_first_step(local, tmp_path):
    job = job_at(tmp_path / "run", 4)
    with mounted(job.folder, "size=1m,ro"):
        outcome = run(local, job)
    assert outcome.status == "failed" and outcome.cause is not None
    assert outcome.cause["exception"] == "CheckpointError"
    assert outcome.cause["message"].startswith(
        f"{job.folder / 'checkpoint'}: Read-only file system; "
    )
    assert read_records(job.folder) == []
