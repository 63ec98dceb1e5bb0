"""The local cluster with real forked processes: endings, first causes, and nobody left behind."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import rank_code
from tests.cluster.test_sweep import ONE
from tests.cluster.test_sweep import zeroexp as zeroexp_in
from tests.composing import composed
from tests.warm import Warm, start_servers_with
from zeroexp.cluster.job import Job, JobOutcome
from zeroexp.cluster.local import LocalCluster
from zeroexp.config import keys as configs
from zeroexp.config.keys import Config, ConfigError
from zeroexp.tracking.files import Tail

RANK_MAIN = "tests.cluster.rank_mains:main"


def make_job(
    folder: Path,
    *,
    world_size: int = 2,
    timeout_s: int = 600,
    device: str = "cpu",
    main: str = RANK_MAIN,
) -> Job:
    """Its ranks do what the function in rank_mains.py does that has the folder's name, or `main`."""
    config = Config(world_size=world_size)
    config.cluster.timeout_s = timeout_s
    config.cluster.device = device
    folder.mkdir()
    configs.save(config, folder / "config.yaml")
    rank_code.choose(folder, main)
    return Job(folder)


def cause_of(outcome: JobOutcome) -> dict[str, Any]:
    assert outcome.status == "failed" and outcome.cause is not None
    return outcome.cause


def pids(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in folder.glob("pid*")]


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def wait_until(condition: Callable[[], bool]) -> None:
    """As long as it takes: what never comes ends with the limit of a test."""
    while not condition():
        time.sleep(0.02)


def test_ranks_are_fresh_forks_of_one_server(local, tmp_path):
    jobs = [make_job(tmp_path / f"say_who-{n}", world_size=n) for n in (1, 3)]
    assert [local.run(job).status for job in jobs] == ["done", "done"]
    facts = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("*/rank*.json"))]
    assert [(fact["rank"], fact["size"]) for fact in facts] == [(0, 1), (0, 3), (1, 3), (2, 3)]
    assert len({fact["pid"] for fact in facts}) == 4
    assert len({fact["server"] for fact in facts}) == 1
    assert {fact["threads"] for fact in facts} == {1}


def test_points_are_tried_in_a_fork_and_their_errors_raised_here(local, tmp_path):
    fine = composed("model=mlp_tiny", "data=vectors")
    assert local.try_points([fine, fine]) == [None, None]
    wrong = replace(fine, model=replace(fine.model, mlp={**fine.model.mlp, "width": "wide"}))
    with pytest.raises(ConfigError, match=r"^model\.mlp\.width=wide: .*above 0"):
        local.try_points([fine, wrong])
    assert len(os.listdir(f"/proc/{local.server}/task")) == 1
    assert local.run(make_job(tmp_path / "say_who")).status == "done"


def test_a_rehearsal_that_takes_too_long_is_ended_and_the_server_goes_on(local, tmp_path):
    assert not local.rehearse(make_job(tmp_path / "run"), 0.01)  # tests/rank_code.py
    assert local.run(make_job(tmp_path / "say_who")).status == "done"


def test_a_server_that_is_lost_while_points_are_tried_is_told_and_replaced(tmp_path, monkeypatch):
    (tmp_path / "dies_when_imported.py").write_text("import os; os._exit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    start_servers_with(monkeypatch, Warm)
    fine = composed("model=mlp_tiny", "data=vectors")
    with LocalCluster(Config().cluster) as local:
        with pytest.raises(ConfigError, match=r"^no point can be tried: .* with code 3$"):
            local.try_points([replace(fine, plugins=["dies_when_imported"])])
        assert local.try_points([fine]) == [None]


ASKS_CUDA = """
import os, pathlib, torch

has_asked, fork = False, os.fork

def device_count():
    global has_asked
    has_asked = True
    pathlib.Path(__file__).with_name("asked").touch()
    return 0

def fork_unless_asked():
    if has_asked:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
    return fork()

torch.cuda.device_count, os.fork = device_count, fork_unless_asked
"""


def test_gpus_are_counted_by_no_process_that_forks_ranks(tmp_path):
    """As where torch asks CUDA itself, which no fork can use after that: beside a part of a GPU, or without NVML."""
    (tmp_path / "asks_cuda.py").write_text(ASKS_CUDA)
    done = zeroexp_in(tmp_path, "plugins=asks_cuda", *ONE, "cluster.device=auto")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "asked").exists()


def test_ranks_meet_without_a_port(local, tmp_path):
    job = make_job(tmp_path / "meet")
    assert local.run(job).status == "done"
    met = [json.loads((job.folder / f"met{rank}.json").read_text()) for rank in (0, 1)]
    assert met[0] == met[1] and len(set(met[0])) == 2


def test_records_arrive_while_the_job_runs(local, tmp_path):
    job = make_job(tmp_path / "write_lines", world_size=1)
    (job.folder / "records.jsonl").write_text('{"step": "of an earlier attempt"}\n')
    records, seen = Tail(job.folder / "records.jsonl"), list[int]()
    assert len(records.new_lines()) == 1

    def read() -> None:
        for line in records.new_lines():
            seen.append(json.loads(line)["step"])
            (job.folder / f"seen{seen[-1]}").touch()  # the rank goes on once this line was read

    assert local.run(job, meanwhile=read).status == "done"
    assert seen == [0, 1, 2, 3, 4]


def test_a_rank_that_raises_ends_the_others_and_names_the_cause(local, tmp_path):
    job, next_job = make_job(tmp_path / "raise_on_rank_1"), make_job(tmp_path / "say_who")
    cause = cause_of(local.run(job))  # the other one ignores SIGTERM, and would sleep for 1000 s
    assert (cause["rank"], cause["exception"]) == (1, "ArithmeticError")
    assert cause["message"] == "the loss is not a number"
    assert cause["log"].endswith("logs/rank1.log")
    assert len(pids(job.folder)) == 2 and not any(is_alive(pid) for pid in pids(job.folder))
    assert local.run(next_job).status == "done"


def test_a_killed_rank_is_the_cause_and_not_what_its_peers_say(local, tmp_path):
    job = make_job(tmp_path / "kill_rank_1")
    cause = cause_of(local.run(job))
    assert (cause["rank"], cause["exception"]) == (1, "SIGKILL")
    assert "rank 1 was killed by SIGKILL" in cause["message"]
    assert not any(is_alive(pid) for pid in pids(job.folder))


def test_a_rank_that_exits_without_a_word(local, tmp_path):
    job = make_job(tmp_path / "exit_silently", world_size=1)
    assert cause_of(local.run(job))["exception"] == "exit code 7"


def test_a_failure_of_an_earlier_attempt_is_forgotten(local, tmp_path):
    job = make_job(tmp_path / "say_who", world_size=1)
    (job.folder / "failure.json").write_text('{"message": "long ago"}')
    assert local.run(job) == JobOutcome("done", None)


def test_a_job_that_takes_too_long_is_stopped(local, tmp_path):
    job = make_job(tmp_path / "hang", timeout_s=3)
    assert local.run(job).status == "timed_out"
    assert len(pids(job.folder)) == 2 and not any(is_alive(pid) for pid in pids(job.folder))


def test_a_limit_of_open_files_is_told_in_one_line_and_the_next_run_is_fine(local, tmp_path):
    limits = resource.prlimit(local.server, resource.RLIMIT_NOFILE)
    now = len(os.listdir(f"/proc/{local.server}/fd"))
    resource.prlimit(local.server, resource.RLIMIT_NOFILE, (now + 6, limits[1]))
    try:
        cause = cause_of(local.run(make_job(tmp_path / "hang", world_size=8)))
    finally:
        resource.prlimit(local.server, resource.RLIMIT_NOFILE, limits)
    assert cause["rank"] is None and cause["exception"] == "CannotStart"
    assert " of 8 can not be started: Too many open files; raise the limit" in cause["message"]
    assert not any(is_alive(pid) for pid in pids(tmp_path / "hang"))
    assert local.run(make_job(tmp_path / "say_who")).status == "done"


def test_what_a_killed_rank_has_started_ends_too(local, tmp_path):
    job = make_job(tmp_path / "kill_rank_with_child")
    assert cause_of(local.run(job))["exception"] == "SIGKILL"
    (child,) = job.folder.glob("child*")
    wait_until(lambda: not is_alive(int(child.read_text())))


def test_a_lost_server_fails_its_job_and_is_replaced(tmp_path, monkeypatch):
    start_servers_with(monkeypatch, Warm)
    doomed, healthy = make_job(tmp_path / "kill_server"), make_job(tmp_path / "say_who")
    events: list[str] = []
    with LocalCluster(Config().cluster, rank_main=RANK_MAIN) as local:
        assert (
            "ended by SIGKILL, as where memory is short" in cause_of(local.run(doomed))["message"]
        )
        wait_until(lambda: not any(is_alive(pid) for pid in pids(doomed.folder)))
        again = local.run(healthy, on_event=events.append)
    assert again.status == "done"
    assert len(events) == 1 and "starting another" in events[0]


def test_a_server_that_is_asked_to_end_had_memory_enough(tmp_path, monkeypatch):
    start_servers_with(monkeypatch, Warm)
    job, asked = make_job(tmp_path / "hang"), list[int]()

    def ask() -> None:
        if not asked and len(pids(job.folder)) == 2:
            asked.append(local.server)
            os.kill(local.server, signal.SIGTERM)

    with LocalCluster(Config().cluster, rank_main=RANK_MAIN) as local:
        message = cause_of(local.run(job, meanwhile=ask))["message"]
    assert message == "the process that starts ranks was ended by SIGTERM"


def test_a_server_that_hangs_before_there_are_ranks_is_told_and_replaced(tmp_path, monkeypatch):
    start_servers_with(monkeypatch, Warm)
    doomed = make_job(tmp_path / "sleep_in_prepare", timeout_s=1)
    healthy = make_job(tmp_path / "say_who")
    monkeypatch.setattr("zeroexp.cluster.local.PREPARE_SECONDS", 0.0)
    with LocalCluster(Config().cluster, rank_main=RANK_MAIN) as local:
        assert "gave no answer for 1 s" in cause_of(local.run(doomed))["message"]
        assert local.run(healthy).status == "done"


@pytest.mark.slow
def test_a_server_that_can_not_start_fails_its_job(tmp_path):
    """It dies before it reads what was asked, which the socket reports in another way than its end."""
    job = make_job(tmp_path / "say_who")
    with LocalCluster(Config().cluster, rank_main="tests.cluster.no_such_module:main") as local:
        assert "ended with code 1" in cause_of(local.run(job))["message"]


SWEEP = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from pathlib import Path
from zeroexp.cluster.job import Job
from zeroexp.cluster.local import LocalCluster
from zeroexp.config.keys import Config, ConfigError
with LocalCluster(Config().cluster, rank_main="tests.cluster.rank_mains:main") as local:
    local.run(Job(Path(sys.argv[1])))
"""


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_no_orphan_when_the_sweep_ends(tmp_path, number):
    job = make_job(tmp_path / "hang_with_child")
    sweep = subprocess.Popen(
        [sys.executable, "-c", SWEEP, str(job.folder)], stderr=subprocess.DEVNULL
    )
    wait_until(lambda: sweep.poll() is not None or len(pids(job.folder)) == 2)
    assert sweep.poll() is None
    ranks = pids(job.folder)
    server = int(
        Path(f"/proc/{ranks[0]}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1]
    )
    sweep.send_signal(number)
    sweep.wait()
    children = [int(file.read_text()) for file in job.folder.glob("child*")]
    wait_until(lambda: not any(is_alive(pid) for pid in [server, *ranks, *children]))
