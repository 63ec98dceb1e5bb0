"""No room for files or processes, or files that can not be written, for real: one line says why, no traceback."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.composing import compose_once
from tests.warm import Warm
from zeroexp import __main__ as zeroexp
from zeroexp.config.keys import ConfigError

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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of 64 KiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_a_disk_of_64_kib(monkeypatch, capsys, small_disk):
    code, line = told_by(monkeypatch, capsys, f"outputs={small_disk}", "data=synthetic")
    assert code == zeroexp.FAILED
    assert "No space left on device; make room, or choose another folder" in line


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may become larger than 4 KiB."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, usual[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_a_limit_of_the_size_of_files(monkeypatch, capsys, tmp_path, small_files):
    code, line = told_by(monkeypatch, capsys, f"outputs={tmp_path}", "data=synthetic")
    assert code in (zeroexp.FAILED, zeroexp.REFUSED)
    assert "File too large" in line and "choose" in line


def test_a_cache_that_can_not_be_written(tmp_path):
    env = {**os.environ, "ZEROEXP_CACHE": "/dev/null/mine", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "zeroexp", *LIGHT, "train.warmup_steps=0"]
    done = Warm(command, env=env, cwd=tmp_path)
    out, errors = done.communicate(timeout=600)
    assert done.returncode == zeroexp.REFUSED and "Traceback" not in out + errors
    assert "ZEROEXP_CACHE=/dev/null/mine: no folder that can be written" in out + errors
    assert "set ZEROEXP_CACHE to a folder that is yours" in out + errors


def test_a_kernel_without_memfds(local, monkeypatch):
    """No machine of ours has one."""

    def refuse(_name: str) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(ConfigError, match="ranks need memfds and pidfds; use a newer kernel"):
        local.try_points([])


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
