"""What sites do to a job: CPUs that are bound, GPUs one by one, nodes without the folder, lines of theirs that fail.

A real Slurm whose nodes are as large as this machine, since tasks are bound to its CPUs. All jobs run at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cluster.minicluster import Minicluster, entered, follow_to_the_end, why_not
from zeroexp.cluster.follow import cancel, refresh
from zeroexp.cluster.job import Job
from zeroexp.cluster.slurm_state import look_up_jobs
from zeroexp.cluster.submit import slurm_id, submit_all, submit_job_or_array
from zeroexp.config.keys import ClusterConfig, Config, SlurmConfig, save
from zeroexp.tracking import attempt
from zeroexp.tracking.json_files import read_json

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="binding needs two CPUs"),
]

CPUS = sorted(os.sched_getaffinity(0))[:2]
NODES_THAT_SEE, BLIND = "node[1-2]", "node3"
# Of an interactive step with one CPU, in which the sweep is started.
OF_AN_INTERACTIVE_STEP = {
    "SLURM_CPU_BIND": "quiet,mask_cpu:0xF00",
    "SLURM_CPU_BIND_LIST": "0xF00",
    "SLURM_CPU_BIND_TYPE": "mask_cpu:",
    "SLURM_CPU_BIND_VERBOSE": "quiet",
    "SLURM_MEM_PER_CPU": "100",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "4711",
}
SBATCH = """#!/bin/sh
{real} "$@" || exit
{then}
"""
TIMES_OUT = 'echo "sbatch: error: Batch job submission failed: Socket timed out" >&2; exit 1'


@dataclass
class Fault:
    main: str = "note_place"
    world_size: int = 1
    ranks_per_node: int = 1
    device: str = "cpu"
    nodes: str = NODES_THAT_SEE
    cpus: int = 1
    site: dict[str, object] = field(default_factory=dict[str, object])
    sbatch: str | None = None  # what sbatch does after it has queued the job


FAULTS = {
    "bound": Fault(cpus=2, site={"srun": ["--cpu-bind=cores"]}),
    "one_gpu_each": Fault(
        world_size=2, ranks_per_node=2, device="cuda", site={"sbatch": {"gpus-per-task": 1}}
    ),
    "only_gres": Fault(
        world_size=2, ranks_per_node=2, device="cuda", site={"sbatch": {"gres": "gpu:2"}}
    ),
    "setup_fails": Fault(site={"setup": ["module() { return 3; }", "module load CUDA/99"]}),
    "blind_batch": Fault(nodes=BLIND),
    "rank_imports_in_vain": Fault("no_such_function"),
    "task_imports_in_vain": Fault(site={"python": f"{sys.executable} -I -S"}),
    "sbatch_times_out": Fault(sbatch=TIMES_OUT),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Minicluster]:
    flags = ("--nodes=3", "--cpus=2", "--gpus=2", "--bind")
    with entered(tmp_path_factory.mktemp("slurm"), *flags, **OF_AN_INTERACTIVE_STEP) as started:
        yield started


@pytest.fixture(scope="module")
def ended(cluster: Minicluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    sweep = tmp_path_factory.mktemp("sweep")
    pid = (cluster.folder / "pids" / BLIND).read_text().split()[0]
    hide = ["nsenter", "--target", pid, "--mount", "mount", "-t", "tmpfs", "none", str(sweep)]
    subprocess.run(hide, check=True)
    jobs = {name: submit(sweep / name, fault) for name, fault in FAULTS.items()}
    follow_to_the_end(jobs)
    return jobs


def make_job(folder: Path, fault: Fault, *, requeue: bool = False) -> Job:
    site = SlurmConfig(ranks_per_node=fault.ranks_per_node, cpus_per_rank=fault.cpus)
    for key, value in fault.site.items():
        setattr(site, key, value)
    site.sbatch = {"exclude": BLIND, **site.sbatch}
    if fault.nodes != NODES_THAT_SEE:
        site.sbatch = {"nodelist": fault.nodes, "overcommit": True}
    cluster = ClusterConfig(kind="slurm", device=fault.device, heartbeat_s=6, slurm=site)
    cluster.requeue = requeue
    folder.mkdir()
    save(Config(world_size=fault.world_size, cluster=cluster), folder / "config.yaml")
    return Job(folder)


def submit(folder: Path, fault: Fault) -> Job:
    job = make_job(folder, fault)
    job.enter("pending")
    with pytest.MonkeyPatch.context() as m:
        if fault.sbatch:
            m.setenv("PATH", f"{faulty_sbatch(folder, fault.sbatch)}:{os.environ['PATH']}")
        main = f"tests.cluster.light_ranks:{fault.main}"
        submit_job_or_array([job], rank_main=main)
    return job


def faulty_sbatch(folder: Path, then: str) -> Path:
    """A folder for the PATH; its sbatch hands the job to the real one, and then behaves as told."""
    real = subprocess.run(["which", "sbatch"], capture_output=True, text=True).stdout.strip()
    script = folder / "bin" / "sbatch"
    script.parent.mkdir()
    script.write_text(SBATCH.format(real=real, then=then))
    script.chmod(0o755)
    return script.parent


def place(job: Job, rank: int = 0) -> dict[str, object]:
    assert job.state["status"] == "done", job.state
    found = read_json(job.folder / f"place{rank}.json")
    assert found is not None
    return found


def test_a_bound_rank_has_all_the_cpus_it_asked_for(ended: dict[str, Job]) -> None:
    """srun alone would give it one, since it does not take their number from the job; and the step's mask one too."""
    assert place(ended["bound"])["cpus"] == CPUS


def test_nothing_of_an_interactive_step_reaches_the_job(ended: dict[str, Job]) -> None:
    inherited = place(ended["bound"])["variables"]
    assert isinstance(inherited, dict)
    assert inherited["SLURM_JOB_ID"] == slurm_id(ended["bound"])
    assert "SLURM_MEM_PER_CPU" not in inherited
    assert inherited["SLURM_STEP_NUM_TASKS"] == "1"
    assert inherited.get("SLURM_CPU_BIND_LIST") != "0xF00"


def test_gpus_may_be_given_task_by_task(ended: dict[str, Job]) -> None:
    gpus = [place(ended["one_gpu_each"], rank)["gpus"] for rank in (0, 1)]
    assert sorted(map(str, gpus)) == ["0", "1"]


def test_a_site_may_know_gres_alone(ended: dict[str, Job]) -> None:
    assert [place(ended["only_gres"], rank)["gpus"] for rank in (0, 1)] == ["0,1"] * 2


REASONS = {
    "setup_fails": "cluster.slurm.setup: exit code 3 of: module load CUDA/99 (",
    "blind_batch": f"{BLIND} could not open ",
    "rank_imports_in_vain": "has no attribute 'no_such_function'",
    "task_imports_in_vain": "No module named 'zeroexp'",
}


@pytest.mark.parametrize("name", REASONS)
def test_what_a_node_lacks_is_told(ended: dict[str, Job], name: str) -> None:
    state = ended[name].state
    assert state["status"] == "failed"
    assert REASONS[name] in state["reason"]


def test_a_job_is_found_when_sbatch_does_not_say_that_it_took_it(ended: dict[str, Job]) -> None:
    job = ended["sbatch_times_out"]
    assert job.state["status"] == "done" and slurm_id(job) is not None


def test_points_of_one_shape_may_be_one_job_array(cluster: Minicluster, tmp_path: Path) -> None:
    """Two points of one rank and one of two ranks are an array and a job."""
    faults = [Fault(world_size=size, site={"array": True}) for size in (1, 1, 2)]
    jobs = [make_job(tmp_path / f"run{number}", fault) for number, fault in enumerate(faults)]
    for job in jobs:
        job.enter("pending")
    submit_all(jobs, rank_main="tests.cluster.light_ranks:note_place")
    ids = [str(slurm_id(job)) for job in jobs]
    assert ids[0].partition("_")[0] == ids[1].partition("_")[0] != ids[2]
    assert [each.partition("_")[2] for each in ids] == ["0", "1", ""]
    follow_to_the_end(dict(zip(ids, jobs, strict=True)))
    for job in jobs:
        assert place(job)["cpus"]
        assert (job.folder / "slurm" / f"{slurm_id(job)}_batch.err").exists()
        assert (job.folder / "slurm" / f"{slurm_id(job)}_0_log.err").exists(), "where blame is read"


def test_of_a_job_array_the_element_at_its_time_limit_alone_starts_again(cluster, tmp_path):
    """The last, whose id is that of the array, by which Slurm would mean every element."""
    fault = Fault(site={"array": True, "max_requeues": 2})
    first, last = (make_job(tmp_path / name, fault, requeue=True) for name in ("first", "last"))
    for job in (first, last):
        job.enter("pending")
    submit_all([first, last], rank_main="tests.cluster.light_ranks:count_until_asked_once")
    deadline = time.time() + 120
    while not all((job.folder / "pid0").exists() for job in (first, last)):
        assert time.time() < deadline, "they have not begun"
        time.sleep(0.1)
    cluster.run("scancel", "--signal=USR2", str(slurm_id(last)))
    follow_to_the_end({"last": last})
    assert [each["number"] for each in attempt.read(last.folder)] == [1, 2]
    ((_, seen),) = look_up_jobs([str(slurm_id(first))]).items()
    assert (seen.word, seen.restarts) == ("RUNNING", 0)
    cancel([first], "enough")


def test_a_job_is_found_when_its_submitter_was_killed_before_it_noted_it(cluster, tmp_path):
    job = make_job(tmp_path / "run", Fault())
    job.enter("pending")
    path = f"{faulty_sbatch(tmp_path, 'kill -9 $PPID')}:{os.environ['PATH']}"
    program = "import sys; from pathlib import Path; from zeroexp.cluster.job import Job; "
    program += "from zeroexp.cluster.submit import submit_job_or_array; "
    program += "submit_job_or_array([Job(Path(sys.argv[1]))], rank_main=sys.argv[2])"
    words = [sys.executable, "-c", program, str(job.folder), "tests.cluster.light_ranks:note_place"]
    killed = subprocess.run(words, env={**os.environ, "PATH": path})
    assert (killed.returncode, slurm_id(job)) == (-signal.SIGKILL, None)
    refresh([job])
    assert slurm_id(job) is not None
    follow_to_the_end({"run": job})
    assert place(job)["cpus"]
