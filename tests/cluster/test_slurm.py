"""Jobs on a real Slurm: started with the right tasks, ended as they truly ended, with the first cause named.

Every scenario is one job; all are submitted together and followed together, so that waiting (Slurm's shortest time
limit is a minute) is paid once.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

from tests.cluster.minicluster import Minicluster, why_not
from zeroexp.cluster import slurm_state
from zeroexp.cluster.follow import cancel, follow, slurm_id
from zeroexp.cluster.job import Job
from zeroexp.cluster.slurm import SlurmCluster
from zeroexp.config import ClusterConfig, Config, ConfigError, SlurmConfig, save
from zeroexp.report.progress import Progress
from zeroexp.tracking.files import read_json

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

HEALTHY, CRASHED, DEAF, EVICTED = "node[1-4]", "node[5-6]", "node[7-8]", "node[9-10]"


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


SCENARIOS = {
    "one": Scenario("slurm_ranks:meet", 1),
    "two": Scenario("slurm_ranks:meet", 2),
    "four": Scenario("slurm_ranks:meet", 4, ranks_per_node=2),
    "gpus": Scenario("light_ranks:note_gpus", 4, ranks_per_node=2, device="cuda"),
    "raises": Scenario("light_ranks:raise_on_rank_1", 2),
    "killed": Scenario("light_ranks:kill_rank_1", 2),
    "exits": Scenario("light_ranks:exit_silently", 2),
    "too_long": Scenario("light_ranks:hang", 1, timeout_s=60),
    "cancelled": Scenario("light_ranks:hang", 2),
    "node_crashes": Scenario("light_ranks:hang", 2, nodes=CRASHED),
    "slurmd_dies": Scenario("light_ranks:hang", 2, nodes=DEAF),
    "stops_beating": Scenario("light_ranks:hang", 3, heartbeat_s=5),
    "hub_is_killed": Scenario("light_ranks:hang", 3),
    "preempted": Scenario("light_ranks:hang", 2, nodes=EVICTED),
}

# A job that wants a node of the evicted for itself, and may have it.
RIVAL = (
    *("--partition=high", "--exclusive", "--nodelist=node10", "--output=/dev/null"),
    *("--wrap", "true"),
)


@dataclass
class Ended:
    job: Job
    seconds: float  # from what befell it to its end in Slurm

    @property
    def status(self) -> str:
        return self.job.state["status"]

    @property
    def reason(self) -> str:
        return str(self.job.state["reason"])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Minicluster]:
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    with (
        Minicluster(folder, "--nodes=10", "--cpus=8", "--gpus=4") as started,
        pytest.MonkeyPatch.context() as m,
    ):
        m.setenv("SLURM_CONF", started.environment["SLURM_CONF"])
        root = str(Path(__file__).parents[2])
        m.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))
        yield started


@pytest.fixture(scope="module")
def ended(cluster: Minicluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Every scenario, run to its end."""
    sweep = tmp_path_factory.mktemp("sweep")
    jobs = {name: submit(sweep / name, scenario) for name, scenario in SCENARIOS.items()}
    hit = {
        "cancelled": lambda job: cluster.run("scancel", slurm_id(job) or ""),
        "node_crashes": lambda job: cluster.command("crash-node", "node6"),
        "slurmd_dies": lambda job: cluster.command("crash-node", "node8", "--slurmd-only"),
        "preempted": lambda job: cluster.run("sbatch", *RIVAL),
        "stops_beating": lambda job: strike_task(job, 2, signal.SIGSTOP),
        "hub_is_killed": lambda job: strike_task(job, 0, signal.SIGKILL),
    }
    began: dict[str, float] = {}
    for name, strike in hit.items():
        ranks = [jobs[name].folder / f"pid{rank}" for rank in range(SCENARIOS[name].world_size)]
        cluster.wait_for(lambda ranks=ranks: all(rank.exists() for rank in ranks), 60)
        began[name] = time.time()
        strike(jobs[name])
    with Progress(len(jobs), io.StringIO()) as progress:
        follow(dict(enumerate(jobs.values(), start=1)), progress, on_step=ignore, on_end=ignore)
    return {
        name: Ended(job, slurm_ended(cluster, job) - began.get(name, last_pid(job)))
        for name, job in jobs.items()
    }


def ignore(job: Job) -> None:
    """What MLflow would be told."""


def last_pid(job: Job) -> float:
    """When the last rank that fails by itself did so, or a little before."""
    written = [path.stat().st_mtime for path in job.folder.glob("pid*")]
    return max(written, default=0.0)


def strike_task(job: Job, rank: int, number: signal.Signals) -> None:
    """The task of a rank goes without a word, as on a node whose power or network fails."""
    os.kill(int((job.folder / f"task{rank}").read_text()), number)


def submit(folder: Path, scenario: Scenario) -> Job:
    site = SlurmConfig(
        ranks_per_node=scenario.ranks_per_node, cpus_per_rank=1, sbatch={"nodelist": scenario.nodes}
    )
    if scenario.nodes == HEALTHY:
        site.sbatch = {"exclude": f"{CRASHED},{DEAF},{EVICTED}"}
    return submit_with(folder, scenario, site)


def submit_with(folder: Path, scenario: Scenario, site: SlurmConfig) -> Job:
    config = ClusterConfig(
        kind="slurm", device=scenario.device, timeout_s=scenario.timeout_s, slurm=site
    )
    config.heartbeat_s = scenario.heartbeat_s
    folder.mkdir()
    save(Config(cluster=config, world_size=scenario.world_size), folder / "config.yaml")
    job = Job(folder)
    job.enter("pending")
    main = f"tests.cluster.{scenario.rank_main}"
    SlurmCluster(config, rank_main=main).submit(job)
    return job


def slurm_ended(cluster: Minicluster, job: Job) -> float:
    """When Slurm counts it as ended, in Unix seconds."""
    shown = ("--noheader", "--states=all", f"--jobs={slurm_id(job)}", "--Format=EndTime:|")
    return datetime.fromisoformat(cluster.run("squeue", *shown).strip().rstrip("|")).timestamp()


# ---- started as asked


@pytest.mark.parametrize(
    ("name", "hosts"), [("one", [1]), ("two", [1, 1]), ("four", [2, 2])], ids=["one", "two", "four"]
)
def test_every_point_has_its_own_ranks_and_nodes(
    ended: dict[str, Ended], name: str, hosts: list[int]
) -> None:
    job = ended[name].job
    assert (ended[name].status, job.state["reason"]) == ("done", None)
    ranks = job.summary["ranks"] if job.summary else []
    assert [each["rank"] for each in ranks] == list(range(sum(hosts)))
    assert sorted(Counter(each["host"] for each in ranks).values()) == hosts
    assert len({each["pid"] for each in ranks}) == sum(hosts)


def test_every_rank_has_a_gpu_and_nobody_asks_for_more(ended: dict[str, Ended]) -> None:
    assert ended["gpus"].status == "done"
    given = [read_json(ended["gpus"].job.folder / f"gpus{rank}.json") for rank in range(4)]
    assert given == [{"device": "cuda", "gpus": "0,1"}] * 4


def test_a_snapshot_runs_not_the_tree(ended: dict[str, Ended]) -> None:
    job = ended["two"].job
    ranks = job.summary["ranks"] if job.summary else []
    code = job.folder.parent / ".code"
    assert ranks and all(Path(each["code"]).is_relative_to(code) for each in ranks)


# ---- ended as they ended


def test_a_raising_rank_is_the_cause(ended: dict[str, Ended]) -> None:
    end = ended["raises"]
    assert end.status == "failed"
    assert end.reason.startswith("rank 1 on node"), end.reason
    assert "ArithmeticError: the loss is not a number" in end.reason
    assert end.seconds < 15


def test_a_killed_rank_is_the_cause_not_what_its_peers_say(ended: dict[str, Ended]) -> None:
    end = ended["killed"]
    assert end.status == "failed"
    assert end.reason.startswith("rank 1 on node"), end.reason
    assert "SIGKILL" in end.reason
    assert end.seconds < 15


def test_a_rank_that_says_nothing_is_named(ended: dict[str, Ended]) -> None:
    end = ended["exits"]
    assert end.status == "failed"
    assert "exit code 7" in end.reason


def test_the_time_limit_is_told_apart(ended: dict[str, Ended]) -> None:
    assert ended["too_long"].status == "timed_out"
    assert "cluster.timeout_s" in ended["too_long"].reason


def test_scancel_is_told_apart(ended: dict[str, Ended]) -> None:
    assert ended["cancelled"].status == "cancelled"
    assert ended["cancelled"].job.failure is None
    assert ended["cancelled"].seconds < 15


@pytest.mark.parametrize("name", ["node_crashes", "slurmd_dies"])
def test_a_lost_node_is_told_apart(ended: dict[str, Ended], name: str) -> None:
    assert ended[name].status == "node_lost"
    assert ended[name].reason.startswith("node lost"), ended[name].reason


def test_silence_of_a_task_ends_the_job(ended: dict[str, Ended]) -> None:
    end = ended["stops_beating"]
    assert end.status == "failed"
    assert end.reason.startswith("TaskLost: rank 2 on node"), end.reason
    assert "no sign of it for 5 s" in end.reason
    assert end.seconds < 30


def test_a_task_that_is_gone_ends_the_job(ended: dict[str, Ended]) -> None:
    end = ended["hub_is_killed"]
    assert end.status == "failed"
    # By its peers; or, where it fell before they had met it, by srun.
    assert end.reason.startswith(("TaskLost: rank 0 on node", "rank 0 on node")), end.reason
    assert end.seconds < 15


def test_preemption_is_told_apart(ended: dict[str, Ended]) -> None:
    assert ended["preempted"].status == "failed"
    assert ended["preempted"].reason.startswith("preempted"), ended["preempted"].reason


def test_a_job_nobody_knows_is_none(cluster: Minicluster) -> None:
    """Without accounting; sacct itself says so, and is not taken for an answer."""
    assert slurm_state.look(["987654"]) == {}


@pytest.mark.skipif(
    shutil.which("slurmdbd", path="/usr/sbin:/usr/bin") is None, reason="needs slurmdbd, MariaDB"
)
def test_accounting_knows_what_squeue_forgot(tmp_path: Path) -> None:
    with (
        Minicluster(tmp_path / "cluster", "--nodes=1", "--accounting") as cluster,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        fails, hangs = (
            cluster.run("sbatch", "--parsable", "--output=/dev/null", "--wrap", command).strip()
            for command in ("exit 3", "sleep 300")
        )
        cluster.run("scancel", hangs)
        ended = {fails: "FAILED", hangs: "CANCELLED"}
        cluster.wait_for(lambda: words_of_sacct(ended) == ended, 30)


def words_of_sacct(job_ids: Iterable[str]) -> dict[str, str]:
    return {job_id: seen.word for job_id, seen in slurm_state.ask_sacct(set(job_ids)).items()}


# ---- what a user does


def test_what_sbatch_refuses_is_one_line(cluster: Minicluster, tmp_path: Path) -> None:
    site = SlurmConfig(partition="nowhere")
    with pytest.raises(ConfigError, match="Invalid partition name specified"):
        submit_with(tmp_path / "run", Scenario("slurm_ranks:meet", 1), site)


def test_cancel_ends_what_runs_and_what_waits(cluster: Minicluster, tmp_path: Path) -> None:
    site = SlurmConfig(cpus_per_rank=1, max_running=1)
    scenario = Scenario("light_ranks:hang", 1)
    jobs = [submit_with(tmp_path / name, scenario, site) for name in ("first", "second")]
    cluster.wait_for((jobs[0].folder / "pid0").exists, 30)
    assert [cluster.job_state(str(slurm_id(job))) for job in jobs] == ["RUNNING", "PENDING"]
    assert cancel(jobs, "enough") == jobs
    assert [job.state["status"] for job in jobs] == ["cancelled", "cancelled"]
    cluster.wait_for(lambda: cluster.job_state(str(slurm_id(jobs[0]))) == "CANCELLED", 30)
