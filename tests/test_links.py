"""`strategy.bucket_mb=auto` from the command line: measured once, kept for the cluster, a number in the config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.test_sweep import QUICK, zeroexp
from zeroexp.config import load
from zeroexp.sharding.tuning import Link
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


def test_a_run_has_the_number_that_was_measured(first):
    assert buckets(first) == {1: None, 2: Link(**json.loads(kept(first).read_text())).bucket_mb}


def test_the_next_run_takes_what_was_kept_and_what_is_of_no_use_is_measured_again(first, tmp_path):
    links = tmp_path / "outputs" / "links"
    links.mkdir(parents=True)
    path = links / kept(first).name
    path.write_text(json.dumps({"latency_seconds": 1e-3, "bytes_per_second": 1e9}))
    assert zeroexp(tmp_path, *AUTO).returncode == 0
    assert buckets(tmp_path) == {1: None, 2: 16}
    path.write_text("{")
    assert zeroexp(tmp_path, *AUTO, "world_size=2").returncode == 0
    assert Link(**json.loads(path.read_text())).bytes_per_second != 1e9


def test_reports_and_mlflow_see_the_number(first):
    runs = [read_run(path.parent) for path in first.glob("outputs/*/*/config.yaml")]
    assert "auto" not in [run.config["strategy.bucket_mb"] for run in runs]
