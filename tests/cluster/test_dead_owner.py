"""A sweep whose process is killed, or loses its terminal: it can be continued, and not twice at once."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.test_sweep import LIGHT, ROOT, jobs, start, statuses, zeroexp
from zeroexp.config.keys import save
from zeroexp.tracking.files import read_records

FOR_EVER = "train.steps=10000000"


def wait_for_steps(folder: Path, steps: int, process: subprocess.Popen[str]) -> None:
    while not any(len(read_records(job.folder)) > steps for job in jobs(folder).values()):
        assert process.poll() is None
        time.sleep(0.05)


def in_a_terminal(folder: Path, *words: str) -> tuple[subprocess.Popen[str], int]:
    """The process, which leads the session of a terminal, and the terminal's other end."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "zeroexp", *words]
    process = subprocess.Popen(
        ["sh", "-c", f'exec "$@" <>{os.ttyname(theirs)} >&0 2>&0', "sh", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
        text=True,
    )
    os.close(theirs)
    return process, ours


def output_of(run: Path) -> str:
    log = run / "logs" / "rank0.log"
    return log.read_text() if log.exists() else ""


def gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return True


def require_no_rank_left(folder: Path) -> None:
    """Its server ends the ranks of a process that died, and then itself."""
    logs = [log.read_text() for log in folder.glob("outputs/*/*/logs/rank*.log")]
    ranks = [int(pid) for log in logs for pid in re.findall(r"process (\d+)", log)]
    assert ranks
    while not all(map(gone, ranks)):
        time.sleep(0.05)


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> tuple[Path, str]:
    """Two points whose process was killed during the first, and what `--rerun` said while it stood still."""
    folder = tmp_path_factory.mktemp("killed")
    process = start(folder, "-m", "strategy=zero2,zero3", *LIGHT, FOR_EVER, "checkpoint.every=5")
    wait_for_steps(folder, 10, process)
    process.send_signal(signal.SIGSTOP)
    refused = zeroexp(folder, "--rerun", str(next(folder.glob("outputs/*-*"))))
    assert (refused.returncode, refused.stdout) == (2, "")
    process.kill()
    process.communicate()
    require_no_rank_left(folder)
    return folder, refused.stderr.replace(str(process.pid), "<pid>")


@pytest.mark.slow
def test_a_sweep_is_not_run_twice_at_once(killed):
    _, line = killed
    assert line.startswith("zeroexp: ") and line.count("\n") == 1
    assert "process <pid> on " in line and "; wait for it or end it" in line


@pytest.mark.slow  # test_sweep.py ends one by Ctrl-C, and checkpoint/test_runs.py runs one on
def test_a_killed_one_goes_on_and_a_closed_terminal_ends_it_in_order(killed):
    folder, _ = killed
    sweep = next(folder.glob("outputs/*-*"))
    assert statuses(folder) == {"zero2-buffer-n2": "running", "zero3-buffer-n2": "pending"}

    process, terminal = in_a_terminal(folder, "--rerun", str(sweep))
    first = jobs(folder)["zero2-buffer-n2"]
    while "loaded in" not in output_of(first.folder):
        assert process.poll() is None
        time.sleep(0.05)
    os.close(terminal)
    assert process.wait(600) == 130
    assert statuses(folder) == {"zero2-buffer-n2": "cancelled", "zero3-buffer-n2": "cancelled"}
    require_no_rank_left(folder)

    for job in jobs(folder).values():
        config = job.config
        steps = len(read_records(job.folder)) + 3
        save(replace(config, train=replace(config.train, steps=steps)), job.folder / "config.yaml")
    done = zeroexp(folder, "--rerun", str(sweep))
    assert done.returncode == 0, done.stderr
    assert set(statuses(folder).values()) == {"done"}
    for job in jobs(folder).values():
        steps = [record.step for record in read_records(job.folder)]
        assert steps == list(range(job.config.train.steps + 1))
    assert "loaded in" in output_of(first.folder)
    assert not (sweep / "owner.json").exists()
