"""Ranks on several hosts: each node has a network of its own, so that everything between them crosses a link.

What befalls ranks of one machine is in test_slurm.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.minicluster import (
    Minicluster,
    entered,
    follow_to_the_end,
    why_no_networks,
    why_not,
)
from tests.cluster.test_slurm import HANG_SECONDS, TRAINS, Scenario, has_begun, submit
from tests.test_rank import process_of
from zeroexp.cluster.job import Job
from zeroexp.process.ports import read_published_port
from zeroexp.tracking.files import read_records
from zeroexp.tracking.json_files import read_json

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.skipif(why_no_networks() is not None, reason=str(why_no_networks())),
]

SCENARIOS = {
    "trains": Scenario(TRAINS, 2, "node[1-2]", heartbeat_s=9, hang_s=HANG_SECONDS),
    "loses_its_cable": Scenario("light_ranks:hang", 2, "node[3-4]", heartbeat_s=5),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Minicluster]:
    with entered(tmp_path_factory.mktemp("slurm"), "--nodes=4", "--namespaces") as started:
        yield started


@pytest.fixture(scope="module")
def ended(cluster: Minicluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    sweep = tmp_path_factory.mktemp("sweep")
    jobs = {name: submit(sweep / name, scenario) for name, scenario in SCENARIOS.items()}
    strikes = {
        "loses_its_cable": lambda job: cluster.command("cut-node", "node4"),
        "trains": lambda job: os.kill(process_of(job, 1), signal.SIGSTOP),
    }
    for name, strike in strikes.items():
        cluster.wait_for(lambda name=name: has_begun(jobs[name], SCENARIOS[name]), 120)
        if name == "loses_its_cable":  # once its tasks have met
            job = jobs[name]
            cluster.wait_for(lambda job=job: "ESTAB" in connections("node3", job, cluster), 60)
        strike(jobs[name])
    follow_to_the_end(jobs)
    return jobs


def connections(node: str, job: Job, cluster: Minicluster) -> str:
    """Of a node's own network, to the port of a job's heartbeat."""
    network = cluster.folder / "networks" / node
    port = read_published_port(job.folder / "slurm" / "heartbeat.1")
    if port is None:
        return ""
    return cluster.run(
        "nsenter", f"--net={network}", "ss", "--no-header", "-t", f"( sport = :{port} )"
    )


def test_what_ranks_of_two_hosts_tell_each_other_crosses_the_link(ended: dict[str, Job]) -> None:
    job = ended["trains"]
    assert (read_json(job.folder / "engine.json") or {})["transport"] == "gloo"
    records = read_records(job.folder)
    assert all(record.wire_bytes for record in records)
    assert all(abs(record.loss) < 1e3 for record in records)


def test_a_rank_that_hangs_on_another_host_is_named(ended: dict[str, Job]) -> None:
    state = ended["trains"].state
    assert state["status"] == "failed"
    assert state["reason"].startswith("rank 1 on node2: Hang: no progress for "), state["reason"]


def test_silence_behind_a_cable_is_a_loss(ended: dict[str, Job]) -> None:
    """No connection is closed: nothing arrives any more, at either end, and it is chance which one says so first."""
    cause = ended["loses_its_cable"].failure
    assert cause is not None
    words = "is gone: no sign of it for 5 s (cluster.heartbeat_s)"
    assert cause["message"] in {f"rank 0 on node3 {words}", f"rank 1 on node4 {words}"}


def test_a_cluster_leaves_no_link_behind(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    with Minicluster(folder, "--nodes=1", "--namespaces") as cluster:
        bridge = f"mini{(folder / 'bridge').read_text()}"
        assert bridge in cluster.run("ip", "-brief", "link")
    links = cluster.run("ip", "-brief", "link")
    assert f"{bridge} " not in links and f"{bridge}-1" not in links
