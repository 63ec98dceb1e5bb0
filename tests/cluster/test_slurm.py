"""Jobs on a real Slurm: started with the right tasks, ended as they truly ended, with the first cause named.

Every scenario is one job; all are submitted together and followed together, so that waiting (Slurm's shortest time
limit is a minute) is paid once.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.minicluster import (
    Minicluster,
    entered,
    follow_to_the_end,
    ignore,
    why_no_accounting,
    why_not,
)
from tests.test_rank import log_of, process_of
from tests.test_rank import make_config as training_config
from zeroexp.cluster import slurm_state
from zeroexp.cluster.follow import cancel, cancel_unfinished, follow, follow_waited, refresh
from zeroexp.cluster.job import Job
from zeroexp.cluster.submit import is_held_back, slurm_id, submit_all, submit_job_or_array
from zeroexp.cluster.task import ENDED, PREEMPTED, TIME_LIMIT
from zeroexp.config.keys import ClusterConfig, Config, SlurmConfig, save
from zeroexp.process.watchdog.lost import SECONDS_BETWEEN_CALLS
from zeroexp.report.sweep_progress import SweepProgress
from zeroexp.tracking import attempt, sweep_owner
from zeroexp.tracking.disk_full import reserve
from zeroexp.tracking.files import read_json, read_records
from zeroexp.tracking.mlflow import MlflowTracker
from zeroexp.watch import to_follow

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

HEALTHY, CRASHED, DEAF, EVICTED = "node[1-4]", "node[5-6]", "node[7-8]", "node[9-10]"
LATE = "node[24-25]"
# Of runs that go on: two nodes each, and as many to go on with where some are lost.
FORGOTTEN, SPARED, SLOW = "node[11-14]", "node[15-16]", "node[17-18]"
MAKING_ROOM, HALVED = "node[19-20]", "node[21-23]"
NUM_NODES = 25
ACCOUNTING = () if why_no_accounting() else ("--accounting",)


# ---- the scenarios


@dataclass
class Scenario:
    rank_main: str
    world_size: int
    nodes: str = HEALTHY
    ranks_per_node: int = 1
    timeout_s: int = 3600
    heartbeat_s: int = 60
    device: str = "cpu"
    requeues: int = 0  # how often at most
    hang_s: int | None = None
    # What starts Python: an image without Slurm's commands has a PATH where they are not.
    python: str | None = None
    stuck: bool = False  # tasks but that of rank 0 do not get as far as Python
    export: str = "ALL"  # what sbatch takes of the submitter's environment

    @property
    def sbatch(self) -> dict[str, str]:
        """All nodes of a list that is as long as the job, else those that it needs."""
        if self.nodes not in (HEALTHY, FORGOTTEN, HALVED):
            return {"nodelist": self.nodes, "export": self.export}
        others = {each.nodes for each in SCENARIOS.values()} - {self.nodes}
        return {"exclude": ",".join(sorted(others)), "export": self.export}


HANG_SECONDS = 15
CONTAINER = f"env PATH=/empty {sys.executable}"
TRAINS, NUM_STEPS, SAVE_EVERY = "zeroexp.run.rank:main", 150, 10
SCENARIOS = {
    "at_its_limit": Scenario(
        "light_ranks:count_until_asked", 2, SLOW, timeout_s=60, requeues=1, python=CONTAINER
    ),
    "too_long": Scenario("light_ranks:hang", 1, timeout_s=60),
    "outlived": Scenario("light_ranks:outlive_its_node", 2, FORGOTTEN, heartbeat_s=6, requeues=2),
    "makes_room": Scenario("light_ranks:count_until_asked_once", 2, SPARED, requeues=2),
    "trains_and_makes_room": Scenario(TRAINS, 2, MAKING_ROOM, requeues=2),
    "trains_and_is_halved": Scenario(TRAINS, 2, HALVED, requeues=2),
    "rank_is_stopped": Scenario(TRAINS, 2, heartbeat_s=9, hang_s=HANG_SECONDS),
    "disk_full": Scenario("light_ranks:fill_the_disk", 1),
    "one": Scenario("slurm_ranks:meet", 1),
    "two": Scenario("slurm_ranks:meet", 2, export="NONE"),
    "four": Scenario("slurm_ranks:meet", 4, ranks_per_node=2),
    "gpus": Scenario("light_ranks:note_gpus", 4, ranks_per_node=2, device="cuda"),
    "raises": Scenario("light_ranks:raise_on_rank_1", 2),
    "killed": Scenario("light_ranks:kill_rank_1", 2),
    "exits": Scenario("light_ranks:exit_silently", 2),
    "too_large": Scenario("light_ranks:ask_for_too_much", 1),
    "never_comes": Scenario("light_ranks:hang", 2, LATE, heartbeat_s=5, stuck=True),
    "cancelled": Scenario("light_ranks:hang", 2),
    "cancelled_for_good": Scenario("light_ranks:count_until_asked", 1, requeues=2),
    "node_crashes": Scenario("light_ranks:hang", 2, nodes=CRASHED),
    "slurmd_dies": Scenario("light_ranks:hang", 2, nodes=DEAF),
    "stops_beating": Scenario("light_ranks:hang", 3, heartbeat_s=5),
    "hub_is_killed": Scenario("light_ranks:hang", 3),
    "preempted": Scenario("light_ranks:hang", 2, nodes=EVICTED),
}


def rival(node: str) -> tuple[str, ...]:
    """A job that wants this node for itself, and may have it."""
    asks = ("--partition=high", "--exclusive", f"--nodelist={node}", "--output=/dev/null")
    return ("sbatch", *asks, "--wrap", "true")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One of its runs has a small disk to itself. Made before the nodes, which see no later mounts."""
    folder = tmp_path_factory.mktemp("sweep")
    small = folder / "disk_full"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", small], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", small], check=True)


@pytest.fixture(scope="module")
def cluster(sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Minicluster]:
    flags = (f"--nodes={NUM_NODES}", "--cpus=8", "--gpus=4", *ACCOUNTING)
    with entered(tmp_path_factory.mktemp("slurm"), *flags) as started:
        yield started


@pytest.fixture(scope="module")
def ended(cluster: Minicluster, sweep: Path) -> dict[str, Job]:
    """Every scenario, run to its end."""
    jobs = {name: submit(sweep / name, scenario) for name, scenario in SCENARIOS.items()}
    hit = {
        "cancelled": lambda job: cluster.run("scancel", slurm_id(job) or ""),
        "cancelled_for_good": lambda job: cluster.run("scancel", slurm_id(job) or ""),
        "node_crashes": lambda job: cluster.command("crash-node", "node6"),
        "slurmd_dies": lambda job: cluster.command("crash-node", "node8", "--slurmd-only"),
        "preempted": lambda job: cluster.run(*rival("node10")),
        "makes_room": lambda job: cluster.run(*rival("node16")),
        "outlived": lambda job: [
            cluster.command("crash-node", node, "--slurmd-only") for node in ("node11", "node12")
        ],
        "stops_beating": lambda job: strike_task(job, 2, signal.SIGSTOP),
        "rank_is_stopped": lambda job: os.kill(process_of(job, 1), signal.SIGSTOP),
        "hub_is_killed": lambda job: strike_task(job, 0, signal.SIGKILL),
        "trains_and_makes_room": lambda job: cluster.run(*rival("node20")),
        "trains_and_is_halved": lambda job: [
            tell_mlflow(job),
            cluster.command("crash-node", "node22"),
        ],
    }
    deadline = time.time() + 120
    for name, strike in hit.items():
        while not has_begun(jobs[name], SCENARIOS[name]):
            refresh(jobs.values())  # what befell the others meanwhile
            assert time.time() < deadline, f"{name} has not begun"
        strike(jobs[name])
    follow_to_the_end(jobs)
    return jobs


def has_begun(job: Job, scenario: Scenario) -> bool:
    """Far enough to be struck down."""
    if scenario.rank_main == TRAINS:
        return len(read_records(job.folder)) > SAVE_EVERY + 3
    return all((job.folder / f"pid{rank}").exists() for rank in range(scenario.world_size))


def strike_task(job: Job, rank: int, number: signal.Signals) -> None:
    """The task of a rank goes without a word, as on a node whose power or network fails; its peers know it by then."""
    time.sleep(2 * SECONDS_BETWEEN_CALLS + 1)
    os.kill(int((job.folder / f"task{rank}").read_text()), number)


def submit(folder: Path, scenario: Scenario) -> Job:
    site = SlurmConfig(
        ranks_per_node=scenario.ranks_per_node, cpus_per_rank=1, sbatch=scenario.sbatch, save_s=20
    )
    site.python = scenario.python
    if scenario.stuck:
        site.srun = [f"--task-prolog={stuck_at(folder)}"]
    return submit_with(folder, scenario, site)


def stuck_at(folder: Path) -> Path:
    """As on a node whose file system hangs."""
    script = folder.with_suffix(".sh")
    script.write_text("#!/bin/sh\ntest $SLURM_PROCID = 0 || exec sleep 1000\n")
    script.chmod(0o755)
    return script


def submit_with(folder: Path, scenario: Scenario, site: SlurmConfig) -> Job:
    config = ClusterConfig(
        kind="slurm", device=scenario.device, timeout_s=scenario.timeout_s, slurm=site
    )
    config.heartbeat_s, config.hang_s = scenario.heartbeat_s, scenario.hang_s
    if scenario.requeues:
        config.requeue, site.max_requeues = True, scenario.requeues
    folder.mkdir(exist_ok=True)
    job = Job(folder)
    reserve(folder)
    save(training(config, scenario.world_size, folder), folder / "config.yaml")
    job.enter("pending")
    main = scenario.rank_main
    if main != TRAINS:
        main = f"tests.cluster.{main}"
    submit_job_or_array([job], rank_main=main)
    return job


def training(cluster: ClusterConfig, world_size: int, folder: Path) -> Config:
    """Seconds of steps, which is long enough to be struck down in."""
    config = training_config(world_size)
    config.cluster, config.outputs = cluster, str(folder.parent)
    config.model.mlp = {"width": 128, "depth": 4}
    config.data.global_batch_size = 64
    config.train.warmup_steps, config.train.steps = 1, NUM_STEPS - 1
    config.checkpoint.every = SAVE_EVERY
    return config


def tell_mlflow(job: Job) -> str:
    """As somebody who looks now; returns the id of the run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what MLflow calls
        run_id = MlflowTracker(None, "zeroexp", job.folder.parent).log_run(job.folder)
    assert run_id is not None
    return run_id


# ---- started as asked


@pytest.mark.parametrize(("name", "hosts"), [("one", [1]), ("two", [1, 1]), ("four", [2, 2])])
def test_every_point_has_its_own_ranks_and_nodes_and_runs_a_snapshot(ended, name, hosts):
    job = ended[name]
    assert (job.status, job.state["reason"]) == ("done", None)
    ranks = job.summary["ranks"] if job.summary else []
    assert [each["rank"] for each in ranks] == list(range(sum(hosts)))
    assert sorted(Counter(each["host"] for each in ranks).values()) == hosts
    assert len({each["pid"] for each in ranks}) == sum(hosts)
    code = job.folder.parent / ".code"
    assert all(Path(each["code"]).is_relative_to(code) for each in ranks)


def test_every_rank_has_a_gpu_and_nobody_asks_for_more(ended: dict[str, Job]) -> None:
    assert ended["gpus"].status == "done"
    given = [read_json(ended["gpus"].folder / f"gpus{rank}.json") for rank in range(4)]
    assert given == [{"device": "cuda", "gpus": "0,1"}] * 4


# ---- ended as they ended

ENDS = {
    "raises": ("failed", r"rank 1 on node\d+: ArithmeticError: the loss is not a number "),
    "killed": ("failed", r"rank 1 on node\d+: SIGKILL: "),  # not what its peers say
    "exits": ("failed", r"rank [01] on node\d+: exit code 7: "),
    "too_long": ("timed_out", r"time limit of 60 s \(cluster\.timeout_s\)$"),
    "cancelled": ("cancelled", "cancelled in Slurm$"),
    "node_crashes": ("node_lost", r"node lost \(node6\)$"),  # the one of two that was
    "slurmd_dies": ("node_lost", r"node lost \(node8\)$"),
    "stops_beating": ("failed", r"TaskLost: rank 2 on node\d+ is gone: no sign of it for 5 s"),
    "hub_is_killed": ("failed", r"TaskLost: rank 0 on node\d+ is gone: "),
    "never_comes": (
        "failed",
        r"TaskLost: rank 1 on node25 is gone: it did not reach port \d+ of node24 "
        r"within 60 s \+ cluster\.heartbeat_s=5$",
    ),
    "rank_is_stopped": ("failed", r"rank 1 on node\d+: Hang: no progress for .* \(SIGSTOP\)"),
    "too_large": ("out_of_memory", r"rank 0 on node\d+: "),
    "preempted": ("failed", "preempted"),
    "disk_full": ("failed", r"rank 0 on node\d+: .*No space left on device"),
}


@pytest.mark.parametrize("name", ENDS)
def test_every_end_is_told_apart(ended: dict[str, Job], name: str) -> None:
    state, (status, reason) = ended[name].state, ENDS[name]
    assert state["status"] == status and re.match(reason, state["reason"]), state


def test_what_an_end_leaves(ended: dict[str, Job]) -> None:
    """A rank that hangs its stack, while its task goes on, and so do the beats; a full disk what it took before."""
    assert ended["cancelled"].failure is None
    for rank in (0, 1):
        log = log_of(ended["rank_is_stopped"], rank)
        _, asked, stack = log.partition(f" rank {rank}: no progress for ")
        assert asked and "loop.py" in stack and "most recent call first" in stack
    assert read_records(ended["disk_full"].folder)


# ---- what outlives its job


def reasons(job: Job) -> list[str | None]:
    return [each.get("reason") for each in attempt.read(job.folder)]


def counted(job: Job, number: int) -> list[dict[str, int] | None]:
    """By rank, what an attempt counted: from `first` to `last`."""
    return [read_json(job.folder / f"attempt{number}-{rank}.json") for rank in (0, 1)]


def test_at_its_time_limit_a_job_goes_on_as_often_as_it_may(ended: dict[str, Job]) -> None:
    """The batch file asks for the second start: its ranks live where there is no command of Slurm."""
    job = ended["at_its_limit"]
    first, second = reasons(job)
    assert first == TIME_LIMIT
    assert second == f"{TIME_LIMIT}; not requeued: it was 1 times (cluster.slurm.max_requeues=1)"
    assert (job.status, job.state["reason"]) == ("timed_out", second)
    assert job.failure is None
    before, after = counted(job, 1)[0], counted(job, 2)[0]
    assert before and after and 0 < before["last"] == after["first"] < after["last"]


def test_a_preempted_job_saves_and_goes_on(ended: dict[str, Job]) -> None:
    job = ended["makes_room"]
    assert (job.status, job.state["reason"]) == ("done", None)
    assert reasons(job) == [PREEMPTED, None]
    before, after = counted(job, 1)[0], counted(job, 2)[0]
    assert before and after and 0 < before["last"] == after["first"] < after["last"]


def test_what_could_be_requeued_can_be_cancelled(ended: dict[str, Job]) -> None:
    """It saves when it is asked to end, and does not start itself again."""
    job = ended["cancelled_for_good"]
    assert (job.status, reasons(job)) == ("cancelled", [ENDED])
    assert counted(job, 1)[0]


def test_ranks_that_outlive_their_node_write_no_more_and_end(ended: dict[str, Job]) -> None:
    """Both nodes lost only their slurmd, so that nothing reaches their ranks. The second attempt ended by itself
    because both processes of the first were gone: the one that wrote, and the one that only waited.
    """
    job = ended["outlived"]
    assert (job.status, job.state["reason"]) == ("done", None)
    assert reasons(job) == [attempt.WITHOUT_A_WORD, None]
    # The rank is refused at its next write, or ended before by its task, which is refused too.
    refused = read_json(job.folder / "refused1.json") or {"words": ""}
    told = [refused["words"], *(f.read_text() for f in job.folder.glob("slurm/*_log.err"))]
    assert any("attempt 2 of outlived has begun; this is 1" in each for each in told)
    records = read_records(job.folder)
    assert [record.step for record in records] == list(range(len(records)))
    attempts = [record.loss for record in records]
    assert attempts == sorted(attempts) and set(attempts) == {1.0, 2.0}
    assert job.failure is None


INTERRUPTED = ("trains_and_makes_room", "trains_and_is_halved")


@pytest.mark.parametrize("name", INTERRUPTED)
def test_training_goes_on_without_gap_or_repeat(ended: dict[str, Job], name: str) -> None:
    job = ended[name]
    assert (job.status, job.state["reason"]) == ("done", None), job.failure
    assert len(reasons(job)) == 2
    lines = (job.folder / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(NUM_STEPS))


def test_where_training_was_interrupted_makes_no_difference(ended: dict[str, Job]) -> None:
    """One saved in the step of the signal, the other fell back to its last checkpoint: the same loss, bit by bit."""
    one, other = ([r.loss for r in read_records(ended[name].folder)] for name in INTERRUPTED)
    assert one == other
    resumed = [log_of(ended[name], 0).rpartition(" steps done")[0] for name in INTERRUPTED]
    saved, periodic = (int(words.rpartition(" ")[2]) for words in resumed)
    assert saved > SAVE_EVERY and periodic % SAVE_EVERY == 0 < periodic


def test_mlflow_has_one_run_and_every_step_once(ended: dict[str, Job]) -> None:
    """It was told before the crash of steps that were then made again, and of all of them by another process."""
    job = ended["trains_and_is_halved"]
    run_id = tell_mlflow(job)
    with closing(sqlite3.connect(job.folder.parent / "mlflow.db")) as store:
        runs = store.execute("select run_uuid, status from runs").fetchall()
        steps = store.execute("select step from metrics where key = 'loss' order by step")
        assert [step for (step,) in steps] == list(range(NUM_STEPS))
        tag = store.execute("select value from tags where key = 'attempts'").fetchall()
    assert (runs, tag) == ([(run_id, "FINISHED")], [("2",)])


# ---- what a user does


def test_cancel_ends_what_runs_and_what_waits(cluster: Minicluster, tmp_path: Path) -> None:
    site = SlurmConfig(cpus_per_rank=1, max_running=1)
    scenario = Scenario("light_ranks:hang", 1)
    jobs = [submit_with(tmp_path / name, scenario, site) for name in ("first", "second")]
    cluster.wait_for((jobs[0].folder / "pid0").exists, 30)
    assert [cluster.job_state(str(slurm_id(job))) for job in jobs] == ["RUNNING", "PENDING"]
    assert cancel(jobs, "enough") == jobs
    assert [job.state["status"] for job in jobs] == ["cancelled", "cancelled"]
    cluster.wait_for(lambda: cluster.job_state(str(slurm_id(jobs[0]))) == "CANCELLED", 30)


# ---- what accounting knows


@pytest.fixture
def one_job_at_a_time(cluster: Minicluster, ended: dict[str, Job]) -> Iterator[None]:
    """Slurm takes one job of this user at a time, and refuses others until it has ended."""

    def limit(jobs: int) -> None:
        change = ("modify", "user", "root", "set", f"MaxSubmitJobs={jobs}")
        cluster.run("sacctmgr", "--immediate", *change)

    limit(1)
    yield
    limit(-1)


@pytest.mark.skipif(not ACCOUNTING, reason=str(why_no_accounting()))
@pytest.mark.parametrize("wait", [True, False], ids=["wait", "leave"])
def test_points_that_slurm_takes_later_are_held(
    cluster: Minicluster, one_job_at_a_time: None, tmp_path: Path, wait: bool, monkeypatch
) -> None:
    site = SlurmConfig(ranks_per_node=1, cpus_per_rank=1, sbatch={"exclude": CRASHED})
    config = ClusterConfig(kind="slurm", device="cpu", wait=wait, slurm=site)
    submits = partial(submit_all, rank_main="tests.cluster.light_ranks:note_place")
    monkeypatch.setattr("zeroexp.cluster.follow.submit_all", submits)
    jobs = {number: held_job(tmp_path / str(number), config) for number in (1, 2, 3)}
    submits(jobs.values())
    first, *others = jobs.values()
    assert slurm_id(first) and all(is_held_back(job) and not slurm_id(job) for job in others)
    assert "MaxSubmit" in others[0].state["reason"], others[0].state
    told = io.StringIO()
    with SweepProgress(len(jobs), told) as progress:
        follow_waited(jobs, progress, on_step=ignore, on_end=ignore)
    assert "2 points are held, since Slurm takes no more now: " in told.getvalue()
    if not wait:
        cancel_unfinished(jobs.values())
        assert [job.state["status"] for job in others] == ["pending", "pending"], "for watch"
        ours, problem = to_follow([*jobs.values()])
        assert ours[-2:] == others and not problem
        with SweepProgress(len(jobs), told) as progress:
            follow(jobs, progress, on_step=ignore, on_end=ignore)
        sweep_owner.release_ownership(tmp_path)
    assert [job.state["status"] for job in jobs.values()] == ["done"] * 3
    assert not any(is_held_back(job) for job in jobs.values())


def held_job(folder: Path, config: ClusterConfig) -> Job:
    folder.mkdir()
    save(Config(world_size=1, cluster=config), folder / "config.yaml")
    job = Job(folder)
    job.enter("pending")
    return job


WORDS = {
    "one": "COMPLETED",
    "raises": "FAILED",
    "too_large": "FAILED",
    "too_long": "TIMEOUT",
    "cancelled": "CANCELLED",
    "node_crashes": "NODE_FAIL",
}


@pytest.mark.skipif(not ACCOUNTING, reason=str(why_no_accounting()))
def test_accounting_says_the_same_after_squeue_forgot(cluster, ended):
    """Of every way in which a job can end; read by who comes when they have all left the queue."""
    jobs = {str(slurm_id(job)): job for job in ended.values()}
    cluster.wait_for(lambda: not slurm_state.ask_squeue(set(jobs)), 60)
    seen = slurm_state.look_up_jobs(jobs)
    assert {job_id: slurm_state.conclude_state(jobs[job_id], seen[job_id]) for job_id in seen} == {
        job_id: (job.status, job.state["reason"]) for job_id, job in jobs.items()
    }
    for name, word in WORDS.items():
        assert seen[str(slurm_id(ended[name]))].word == word, name
