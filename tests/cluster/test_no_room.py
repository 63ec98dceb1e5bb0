"""No room for files or processes, or files that can not be written, for real: one line says why, no traceback."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.test_sweep import LIGHT as SHORT
from tests.cluster.test_sweep import ONE, statuses
from tests.cluster.test_sweep import zeroexp as zeroexp_in
from tests.composing import compose_once
from tests.small_disks import files_of_at_most, mounted
from tests.warm import Warm
from zeroexp import __main__ as zeroexp
from zeroexp.cluster.job import Job
from zeroexp.tracking.files import read_records

ROOT = Path(__file__).parents[2]
LIGHT = ["model=tiny", "tracking=files", "world_size=1", "cluster.device=cpu", "train.steps=1"]


def told_by(monkeypatch: pytest.MonkeyPatch, capsys, *words: str) -> tuple[int, str]:
    compose_once(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["zeroexp", *LIGHT, *words])
    code = zeroexp.main()
    (line,) = capsys.readouterr().err.splitlines()
    return code, line


def test_a_folder_that_has_been_removed(monkeypatch, capsys, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code, line = told_by(monkeypatch, capsys)
    assert code == zeroexp.REFUSED
    assert line == "zeroexp: the folder that you are in has been removed; change to one that exists"


def test_a_disk_of_64_kib(monkeypatch, capsys, tmp_path):
    with mounted(tmp_path / "disk", "size=64k") as disk:
        code, line = told_by(monkeypatch, capsys, f"outputs={disk}", "data=synthetic")
    assert code == zeroexp.FAILED
    assert "No space left on device; make room, or choose another folder" in line


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "size=1m") as folder:
        yield folder


def run(folder: Path, *words: str, redirected: str = "") -> subprocess.CompletedProcess[str]:
    """A command of ours in a process of its own, with its output where the shell's words say."""
    shell = ["bash", "-o", "pipefail", "-c", f'"$@" {redirected}', "bash"]
    return subprocess.run(
        [*shell, sys.executable, "-m", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )


TINY = [
    *("zeroexp", "model=tiny", "data=synthetic", "data.global_batch_size=4", "data.seq_len=32"),
    *("train.warmup_steps=1", "cluster.device=cpu"),
]


@pytest.mark.slow
def test_records_that_no_longer_fit(disk: Path) -> None:
    """Somebody else fills the disk; what the run has to say about its end was kept room for."""
    (disk / "of_somebody_else").write_bytes(bytes((1 << 20) - (250 << 10)))
    words = [f"outputs={disk}", "train.steps=100000", "tracking=files"]
    done = run(disk.parent, *TINY, *words)
    (config,) = disk.glob("*/*/config.yaml")
    job = Job(config.parent)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert job.state["status"] == "failed"
    assert "No space left on device" in job.state["reason"], job.state
    assert json.loads((job.folder / "failure.json").read_text())["rank"] == 0
    assert len(read_records(job.folder)) > 5


@pytest.mark.slow
def test_a_store_beside_the_runs_that_takes_the_last_byte(disk: Path) -> None:
    """No reason can be written down then, not even by who starts the ranks: one line says what is wrong."""
    (disk / "of_somebody_else").write_bytes(bytes((1 << 20) - (200 << 10)))
    done = run(disk.parent, *TINY, f"outputs={disk}", "train.steps=200", "tracking=mlflow")
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr, done.stderr
    assert "No space left on device" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_sweep_and_its_report_end_for_no_output(tmp_path):
    """A full disk, a closed descriptor, a reader that leaves: work and exit codes stay the same."""
    done = run(tmp_path, "zeroexp", *SHORT, "world_size=1", redirected=">/dev/full 2>&-")
    assert done.returncode == 0
    assert list(statuses(tmp_path).values()) == ["done"]
    (sweep,) = tmp_path.glob("outputs/*-*")
    many = [str(sweep)] * 200  # more than a pipe holds
    for words in (["zeroexp", "report", str(sweep)], ["zeroexp", "plan", "model=tiny", "--json"]):
        lost = run(tmp_path, *words, redirected=">/dev/full")
        assert lost.returncode == 1, "an answer that is lost is none"
        assert "standard output: No space left on device" in lost.stderr.splitlines()[-1]
    first = run(tmp_path, "zeroexp.report", *many, redirected="| head -1")
    assert (first.returncode, first.stdout, first.stderr) == (0, f"{sweep}\n", "")


def test_a_limit_of_the_size_of_files(monkeypatch, capsys, tmp_path):
    with files_of_at_most(4096):
        code, line = told_by(monkeypatch, capsys, f"outputs={tmp_path}", "data=synthetic")
    assert code in (zeroexp.FAILED, zeroexp.REFUSED)
    assert "File too large" in line and "choose" in line


@pytest.mark.slow
def test_a_cache_that_can_not_be_written(tmp_path):
    env = {**os.environ, "ZEROEXP_CACHE": "/dev/null/mine", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "zeroexp", *LIGHT, "train.warmup_steps=0"]
    done = Warm(command, env=env, cwd=tmp_path)
    out, errors = done.communicate(timeout=600)
    assert done.returncode == zeroexp.REFUSED and "Traceback" not in out + errors
    assert "ZEROEXP_CACHE=/dev/null/mine: no folder that can be written" in out + errors
    assert "set ZEROEXP_CACHE to a folder that is yours" in out + errors


# No machine of ours has such a kernel.
NO_MEMFDS = """
import errno, os

def refuse(name):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

os.memfd_create = refuse
"""


@pytest.mark.slow
def test_a_kernel_without_memfds(tmp_path):
    (tmp_path / "no_memfds.py").write_text(NO_MEMFDS)
    done = zeroexp_in(tmp_path, "plugins=no_memfds", *ONE)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "rank 0 of 1 can not be started: " in done.stderr
    assert "ranks need memfds and pidfds; use a newer kernel" in done.stderr


@pytest.mark.parametrize("words", [["plan"], LIGHT], ids=["plan", "run"])
def test_a_limit_of_one_process(tmp_path, words):
    command = [sys.executable, "-m", "zeroexp", *words]
    if os.getuid() == 0:  # the limit holds for others alone; root's files stay readable
        caps = "+dac_override,+dac_read_search"
        user = ["--reuid=4321", "--clear-groups", f"--inh-caps={caps}", f"--ambient-caps={caps}"]
        command = ["setpriv", *user, *command]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NPROC, (1, 1)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == zeroexp.REFUSED
    (line,) = done.stderr.splitlines()
    assert line.startswith("zeroexp: no thread can be started: ") and "(ulimit -u)" in line
