"""slurm/minicluster starts a real Slurm, breaks it as told, and leaves nothing behind."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.minicluster import MINICLUSTER, Minicluster, why_not

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Minicluster]:
    with Minicluster(
        tmp_path_factory.mktemp("slurm") / "cluster", "--nodes=3", "--gpus=2"
    ) as started:
        yield started


def test_tasks_run_on_nodes_with_their_own_names(cluster: Minicluster) -> None:
    tasks = "echo $(hostname) $SLURM_PROCID $SLURM_LOCALID"
    lines = cluster.run("srun", "--nodes=3", "--ntasks-per-node=2", "bash", "-c", tasks)
    expected = {f"node{1 + rank // 2} {rank} {rank % 2}" for rank in range(6)}
    assert set(lines.splitlines()) == expected


def test_every_node_resolves_every_other(cluster: Minicluster) -> None:
    lines = cluster.run("srun", "--nodes=3", "getent", "ahostsv4", "node1", "node2", "node3")
    assert lines.count("127.0.0.1") >= 9
    assert "not found" not in lines


def test_a_drained_node_takes_no_job_until_resumed(cluster: Minicluster) -> None:
    cluster.command("drain", "node2")
    assert cluster.node_state("node2") == "drained"
    with pytest.raises(AssertionError, match="Unable to allocate resources"):
        cluster.run("srun", "--immediate=1", "--nodelist=node2", "hostname")
    cluster.command("resume", "node2")
    assert cluster.run("srun", "--nodelist=node2", "hostname") == "node2\n"


def test_a_crashed_node_ends_its_job_and_comes_back(cluster: Minicluster) -> None:
    job = cluster.run(
        "sbatch", "--parsable", "--no-requeue", "--nodelist=node3", "--wrap", "sleep 300"
    )
    cluster.wait_for(lambda: cluster.job_state(job.strip()) == "RUNNING", 10)
    cluster.command("crash-node", "node3")
    cluster.wait_for(lambda: cluster.job_state(job.strip()) == "NODE_FAIL", 60)
    cluster.command("start-node", "node3")
    cluster.wait_for(lambda: cluster.node_state("node3") == "idle", 30)


def test_wrong_words_are_one_line(cluster: Minicluster) -> None:
    wrong = subprocess.run(
        [MINICLUSTER, f"--folder={cluster.folder}", "drain", "node9"],
        capture_output=True,
        text=True,
    )
    assert wrong.returncode == 1
    assert wrong.stderr == "minicluster: no node node9: this cluster has node1, node2, node3\n"
    twice = subprocess.run(
        [MINICLUSTER, f"--folder={cluster.folder}", "up"], capture_output=True, text=True
    )
    assert (twice.returncode, twice.stdout) == (1, "")
    assert twice.stderr.startswith(f"minicluster: {cluster.folder} holds a cluster")


def test_down_leaves_no_trace(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    with Minicluster(folder, "--nodes=2") as cluster:
        job = cluster.run(
            "sbatch", "--parsable", "--nodes=2", "--output=/dev/null", "--wrap", "srun sleep 300"
        )
        cluster.wait_for(lambda: cluster.job_state(job.strip()) == "RUNNING", 10)
        assert mentions(folder), "the daemons of a running cluster name its folder"
    assert not folder.exists()
    assert str(folder) not in Path("/proc/self/mounts").read_text(encoding="utf-8")
    assert not mentions(folder)


def mentions(folder: Path) -> list[str]:
    """Command lines of living processes in whose environment this cluster is named."""
    found: list[str] = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"SLURM_CONF={folder}/".encode() in environ.read_bytes():
                found.append((environ.parent / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended, or is none of ours
    return found
