"""`strategy.bucket_mb=auto` from the command line: measured once, kept for the cluster, a number in the config."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.test_sweep import LIGHT, zeroexp
from tests.composing import composed
from zeroexp.cluster.job import Job
from zeroexp.comm.tuning import Link
from zeroexp.config import keys as configs
from zeroexp.config.keys import load
from zeroexp.tracking.labels import run_params
from zeroexp.tracking.run import read_run

AUTO = [*LIGHT, "strategy=zero2", "strategy.bucket_mb=auto"]


def buckets(folder: Path) -> dict[int, float | None]:
    configs = [load(path) for path in folder.glob("outputs/*/*/config.yaml")]
    return {config.world_size: config.strategy.bucket_mb for config in configs}


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    result = zeroexp(folder, *AUTO, "world_size=1,2")
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def kept(folder: Path) -> Path:
    (path,) = folder.glob("outputs/links/*.json")
    return path


def kept_link(folder: Path) -> Link:
    return Link(**json.loads(kept(folder).read_text()))


def test_a_run_has_the_number_that_was_measured(first):
    assert buckets(first) == {1: None, 2: kept_link(first).bucket_mb}


def run_again(local, folder: Path) -> None:
    """Another run of two ranks in the same outputs, on the same cluster."""
    job = Job(folder / "outputs" / "sweep" / f"run{len(buckets(folder))}")
    job.folder.mkdir(parents=True)
    config = configs.resolve(copy.deepcopy(composed(*AUTO, "world_size=2")))
    configs.save(config, job.folder / "config.yaml")
    outcome = local.run(job, on_record=lambda record: None, on_event=lambda line: None)
    assert outcome.status == "done", outcome.cause


def test_the_next_run_takes_what_was_kept_and_what_is_of_no_use_is_measured_again(
    first, local, tmp_path
):
    links = tmp_path / "outputs" / "links"
    links.mkdir(parents=True)
    path = links / kept(first).name
    path.write_text(json.dumps({"latency_seconds": 1e-3, "bytes_per_second": 1e9}))
    run_again(local, tmp_path)
    assert buckets(tmp_path) == {2: 16}
    path.write_text("{")
    run_again(local, tmp_path)
    assert kept_link(tmp_path).bytes_per_second != 1e9


def test_mlflow_gets_the_number_once_it_is_known(first):
    """A param can not be changed later."""
    runs = [read_run(path.parent) for path in first.glob("outputs/*/*/config.yaml")]
    for run in runs:
        assert run_params(run)["strategy.bucket_mb"] in ("null", f"{kept_link(first).bucket_mb}")
        before = replace(run, config={**run.config, "strategy.bucket_mb": "auto"})
        assert run_params(run).keys() - run_params(before).keys() == {"strategy.bucket_mb"}
