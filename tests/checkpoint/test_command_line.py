"""From the command line: a run resumed by a sweep of other strategies; and refused in one line."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from tests.cluster.test_sweep import LIGHT, jobs, zeroexp
from tests.composing import composed
from zeroexp.cluster.job import Job
from zeroexp.config import keys as configs
from zeroexp.tracking.files import read_records

STEPS = 4
LONG = [*LIGHT, "data.global_batch_size=6", "world_size=2", f"train.steps={STEPS}"]


def numbers(job: Job) -> dict[int, tuple[float, ...]]:
    return {r.step: (r.loss, r.grad_norm, r.lr, r.samples_seen) for r in read_records(job.folder)}


def run_here(local, folder: Path, *words: str) -> Job:
    job = Job(folder)
    config = configs.resolve(copy.deepcopy(composed(*LONG, *words)))
    configs.save(config, job.folder / "config.yaml")
    outcome = local.run(job, on_record=lambda record: None, on_event=lambda line: None)
    assert outcome.status == "done", outcome.cause
    return job


def test_a_sweep_of_others_goes_on_from_one_checkpoint(local, tmp_path_factory, tmp_path):
    """The next samples are the same, so that losses differ by the order of summation alone."""
    saved, longer = (tmp_path_factory.mktemp(name) for name in ("saved", "longer"))
    run = run_here(local, saved, "checkpoint.every=2").folder
    reference = numbers(run_here(local, longer, f"train.steps={STEPS + 2}"))
    words = ["strategy=zero1", "strategy.implementation=parameter,torch", "world_size=3"]
    resume = [f"resume={run}", f"train.steps={STEPS + 2}"]
    result = zeroexp(tmp_path, "-m", *LONG, *words, *resume)
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(jobs(tmp_path)) == 2
    pins = list((run / "checkpoint").glob(".pin.*"))
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
