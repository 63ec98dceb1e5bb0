"""A full disk, for real: a small one of its own holds the outputs. The run ends, says so, and keeps what it had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zeroexp.cluster.job import Job
from zeroexp.tracking.files import read_records

ROOT = Path(__file__).parents[2]
LIGHT = [
    *("model=tiny", "data=synthetic", "data.global_batch_size=4", "data.seq_len=32"),
    *("train.warmup_steps=1", "cluster.device=cpu", "tracking=files"),
]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def run(disk: Path, *settings: str) -> tuple[subprocess.CompletedProcess[str], Job]:
    done = subprocess.run(
        [sys.executable, "-m", "zeroexp", f"outputs={disk}", *LIGHT, *settings],
        cwd=disk.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    (config,) = disk.glob("*/*/config.yaml")
    return done, Job(config.parent)


@pytest.mark.slow
def test_records_that_no_longer_fit(disk: Path) -> None:
    """Somebody else fills the disk; what the run has to say about its end was kept room for."""
    (disk / "of_somebody_else").write_bytes(bytes((1 << 20) - (250 << 10)))
    done, job = run(disk, "train.steps=100000")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert job.state["status"] == "failed"
    assert "No space left on device" in job.state["reason"], job.state
    assert json.loads((job.folder / "failure.json").read_text())["rank"] == 0
    assert len(read_records(job.folder)) > 5


@pytest.mark.slow
def test_a_store_beside_the_runs_that_takes_the_last_byte(disk: Path) -> None:
    """No reason can be written down then, not even by who starts the ranks: one line says what is wrong."""
    (disk / "of_somebody_else").write_bytes(bytes((1 << 20) - (200 << 10)))
    done, _ = run(disk, "train.steps=200", "tracking=mlflow")
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr, done.stderr
    assert "No space left on device" in done.stderr.splitlines()[-1]
