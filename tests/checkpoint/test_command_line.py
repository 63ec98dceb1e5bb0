"""From the command line: killed, run again, resumed by a sweep of other strategies; and refused in one line."""

from __future__ import annotations

import copy
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.test_sweep import LIGHT, jobs, start, statuses, zeroexp
from tests.composing import composed
from zeroexp.cluster.job import Job
from zeroexp.config import keys as configs
from zeroexp.tracking.files import read_records

STEPS = 100  # of which a kill after some twenty-five comes before the end
LONG = [*LIGHT, "data.global_batch_size=6", "world_size=2", f"train.steps={STEPS}"]


def numbers(job: Job) -> dict[int, tuple[float, ...]]:
    return {r.step: (r.loss, r.grad_norm, r.lr, r.samples_seen) for r in read_records(job.folder)}


def only_job(folder: Path) -> Job:
    (job,) = jobs(folder).values()
    return job


def kill_rank_1_after(folder: Path, steps: int) -> None:
    while True:
        found = list(folder.glob("outputs/*/*/records.jsonl"))
        if found and found[0].read_text().count("\n") >= steps:
            log = (found[0].parent / "logs" / "rank1.log").read_text()
            os.kill(int(re.findall(r"process (\d+)", log)[-1]), signal.SIGKILL)
            return
        time.sleep(0.01)


@pytest.fixture(scope="module")
def reference(local, tmp_path_factory) -> dict[int, tuple[float, ...]]:
    """Two steps longer, and without any interruption."""
    job = Job(tmp_path_factory.mktemp("reference"))
    config = configs.resolve(copy.deepcopy(composed(*LONG, f"train.steps={STEPS + 2}")))
    configs.save(config, job.folder / "config.yaml")
    outcome = local.run(job, on_record=lambda record: None, on_event=lambda line: None)
    assert outcome.status == "done", outcome.cause
    return numbers(job)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> Path:
    """Where a run was killed after some twenty-five steps, then run again to its end."""
    folder = tmp_path_factory.mktemp("interrupted")
    process = start(folder, *LONG, "checkpoint.every=10")
    kill_rank_1_after(folder, 25)
    process.communicate(timeout=600)
    assert process.returncode == 1 and list(statuses(folder).values()) == ["failed"]
    result = zeroexp(folder, "--rerun", str(only_job(folder).folder.parent))
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_run_again_it_goes_on_bit_for_bit(reference, interrupted):
    job = only_job(interrupted)
    assert "steps done, loaded in" in (job.folder / "logs" / "rank0.log").read_text()
    assert numbers(job) == {step: row for step, row in reference.items() if step <= STEPS}


def test_a_sweep_of_others_goes_on_from_one_checkpoint(reference, interrupted, tmp_path):
    """The next samples are the same, so that losses differ by the order of summation alone."""
    words = ["strategy=zero1", "strategy.implementation=parameter,torch", "world_size=3"]
    resume = [f"resume={only_job(interrupted).folder}", f"train.steps={STEPS + 2}"]
    result = zeroexp(tmp_path, "-m", *LONG, *words, *resume)
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(jobs(tmp_path)) == 2
    pins = list((only_job(interrupted).folder / "checkpoint").glob(".pin.*"))
    assert {Path(pin.read_text()) for pin in pins} == {
        job.folder for job in jobs(tmp_path).values()
    }
    for name, job in jobs(tmp_path).items():
        rows = numbers(job)
        assert list(rows) == [STEPS + 1, STEPS + 2], name
        for step, row in rows.items():
            assert row == pytest.approx(reference[step], rel=2e-5), (name, step)
            assert row[2:] == reference[step][2:], "learning rate and position exactly"


def test_a_wrong_folder_is_refused_before_anything_runs(tmp_path):
    result = zeroexp(tmp_path, *LIGHT, "resume=nowhere", "checkpoint.every=2")
    assert result.returncode == 2 and jobs(tmp_path) == {}
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("zeroexp: resume=nowhere: no whole checkpoint in there; give")
