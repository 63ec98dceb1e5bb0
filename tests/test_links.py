"""`strategy.bucket_mb=auto` from the command line: measured once, kept for the cluster, a number in the config."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.test_sweep import QUICK, zeroexp
from zeroexp.config import load
from zeroexp.sharding.tuning import Link
from zeroexp.tracking.entries import params
from zeroexp.tracking.run import read_run

AUTO = [*QUICK, "strategy=zero2", "world_size=1,2", "strategy.bucket_mb=auto"]


def buckets(folder: Path) -> dict[int, float | None]:
    configs = [load(path) for path in folder.glob("outputs/*/*/config.yaml")]
    return {config.world_size: config.strategy.bucket_mb for config in configs}


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    result = zeroexp(folder, *AUTO)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def kept(folder: Path) -> Path:
    (path,) = folder.glob("outputs/links/*.json")
    return path


def kept_link(folder: Path) -> Link:
    return Link(**json.loads(kept(folder).read_text()))


def test_a_run_has_the_number_that_was_measured(first):
    assert buckets(first) == {1: None, 2: kept_link(first).bucket_mb}


def test_the_next_run_takes_what_was_kept_and_what_is_of_no_use_is_measured_again(first, tmp_path):
    links = tmp_path / "outputs" / "links"
    links.mkdir(parents=True)
    path = links / kept(first).name
    path.write_text(json.dumps({"latency_seconds": 1e-3, "bytes_per_second": 1e9}))
    assert zeroexp(tmp_path, *AUTO).returncode == 0
    assert buckets(tmp_path) == {1: None, 2: 16}
    path.write_text("{")
    assert zeroexp(tmp_path, *AUTO, "world_size=2").returncode == 0
    assert kept_link(tmp_path).bytes_per_second != 1e9


def test_mlflow_gets_the_number_once_it_is_known(first):
    """A param can not be changed later."""
    runs = [read_run(path.parent) for path in first.glob("outputs/*/*/config.yaml")]
    for run in runs:
        assert params(run)["strategy.bucket_mb"] in ("null", f"{kept_link(first).bucket_mb}")
        before = replace(run, config={**run.config, "strategy.bucket_mb": "auto"})
        assert params(run).keys() - params(before).keys() == {"strategy.bucket_mb"}
