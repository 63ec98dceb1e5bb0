"""`zeroexp watch --once` where nothing is Slurm's any more; on a real Slurm: cluster/test_slurm_sweep.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.run_folders import write_run
from tests.somebody_else import not_root, open_to_all, read_only
from zeroexp import watch
from zeroexp.cluster.follow import refresh
from zeroexp.cluster.job import Job
from zeroexp.config.keys import load, save
from zeroexp.process.json_output import REFUSED
from zeroexp.sync import jobs_of
from zeroexp.tracking import sweep_owner
from zeroexp.tracking.files import write_json


def run_of(sweep: Path, strategy: str, status: str, reason: str | None = None) -> None:
    folder = write_run(sweep / f"{strategy}-buffer-n2", strategy, status=status, reason=reason)
    config = load(folder / "config.yaml")
    config.tracking.mlflow = False
    save(config, folder / "config.yaml")


def watched(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["watch", *words])
    return watch.main()


def test_a_sweep_that_is_over(tmp_path, monkeypatch, capsys):
    run_of(tmp_path, "zero2", "done")
    assert watched(monkeypatch, str(tmp_path), "--once") == watch.EVERYTHING_FINE
    run_of(tmp_path, "zero3", "failed", "rank 1 on node2: ValueError: no")
    assert watched(monkeypatch, str(tmp_path), "--once") == watch.SOMETHING_FAILED
    assert watched(monkeypatch, str(tmp_path)) == watch.SOMETHING_FAILED, "nothing to follow"
    assert "rank 1 on node2: ValueError: no" in capsys.readouterr().out


def test_a_sweep_is_shown_where_slurm_does_not_answer(tmp_path, monkeypatch, capsys):
    """As it was at the last look; but whether a job was cancelled is then unknown."""
    run_of(tmp_path, "zero2", "running")
    write_json(tmp_path / "zero2-buffer-n2" / "slurm.json", {"job_id": "17"})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert watched(monkeypatch, str(tmp_path), "--once") == watch.EVERYTHING_FINE
    told = capsys.readouterr()
    assert told.err.startswith("zeroexp: states are those of the last look: squeue is not here")
    assert "running" in told.out
    assert watched(monkeypatch, str(tmp_path), "--cancel") == REFUSED
    assert watched(monkeypatch, str(tmp_path)) == REFUSED, "it would follow for ever"
    assert "zeroexp: squeue: not on this machine; watch on" in capsys.readouterr().err


@pytest.mark.parametrize("died", [None, "its process, which ran it, has died"])
def test_a_look_leaves_an_end_that_is_written_meanwhile(tmp_path, monkeypatch, died):
    """Also where whoever wrote it has died since."""
    run_of(tmp_path, "zero2", "running")
    (job,) = jobs_of(tmp_path)
    ends = lambda _: job.enter("failed", "rank 0: no") or died  # noqa: E731
    monkeypatch.setattr(sweep_owner, "death_of_owner", ends)
    refresh([job])
    assert job.status == "failed"


def test_a_sweep_of_which_no_run_can_be_read_is_one_line(tmp_path, monkeypatch, capsys):
    run_of(tmp_path, "zero2", "done")
    (tmp_path / "zero2-buffer-n2/summary.json").write_text("{}")
    assert watched(monkeypatch, str(tmp_path), "--once") == watch.SOMETHING_FAILED
    told = capsys.readouterr()
    assert "its files cannot be read" in told.err and len(told.err.splitlines()) == 1
    assert told.out == ""


def test_a_folder_that_is_no_sweep_is_one_line(tmp_path, monkeypatch, capsys):
    assert watched(monkeypatch, str(tmp_path), "--once") == REFUSED
    assert capsys.readouterr().err.startswith(f"zeroexp: {tmp_path}: no run in there; give")


def test_a_sweep_is_also_the_folder_that_one_is_in(tmp_path, monkeypatch):
    """MLflow's store lies in the folder above."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["watch", "."])
    assert watch.parse_arguments().sweep == tmp_path


def test_a_sweep_of_somebody_else_is_one_line(monkeypatch, capsys):
    """What is new can not be written down there. Slurm, which would tell it, is asked in tests/cluster."""

    def find_ended(jobs: list[Job]) -> None:
        with read_only(jobs[0].folder), not_root():
            jobs[0].enter("failed")

    monkeypatch.setattr(watch, "refresh_if_slurm_answers", find_ended)
    with open_to_all() as sweep:
        run_of(sweep, "zero2", "running")
        assert watched(monkeypatch, str(sweep), "--once") == REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"zeroexp: {sweep}/zero2-buffer-n2/")
    assert line.endswith(": Permission denied; watch as the user who submitted the sweep")


# As the console script does, whose imports Ctrl-C should end in silence.
INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
from zeroexp import watch

def follow(arguments):
    os.kill(os.getpid(), signal.SIGINT)
    raise AssertionError("not interrupted")

watch.watch = follow
sys.exit(watch.main())
"""


def test_ctrl_c_leaves_the_jobs_alone_and_says_so(tmp_path: Path) -> None:
    run_of(tmp_path, "zero2", "running")
    words = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (watch.EVERYTHING_FINE, "left; the jobs go on\n")
