"""Nodes of this machine behind links of their own speed: what crosses one, who may have one, and that none is left."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.test_local import wait_until
from tests.composing import composed
from tests.warm import Warm, start_servers_with
from zeroexp.check import check
from zeroexp.cluster.emulated_network import open_nodes
from zeroexp.cluster.job import Job
from zeroexp.cluster.local import LocalCluster
from zeroexp.config import keys as configs
from zeroexp.config.keys import ClusterConfig, Config, ConfigError
from zeroexp.measure.tcp_bytes import LINK
from zeroexp.tracking.files import read_summary

ROOT = Path(__file__).resolve().parents[2]
LINKED = ClusterConfig(link="1gbit")


def why_no_link() -> str | None:
    try:
        with open_nodes(LINKED):
            return None
    except ConfigError as error:
        return str(error)


needs_link = pytest.mark.skipif(why_no_link() is not None, reason=why_no_link() or "")


# Nodes of two ranks, words of the line, and the bytes that all ranks of a node send over its link in a step, in P. A
# rank hands each peer what that one owns, and what comes from the node itself crosses no link.
CROSSED = {
    # The published example: 8 ranks as 4 x 2. Over all ranks each sends P/8 to six of other nodes, twice.
    "optimizer over 8 ranks": (4, "strategy=zero1", 2 * 2 * 6 / 8),
    # Four groups of a node: P/2 is summed with the holders on three other nodes, 2 P/2 3/4 = 6P/8 a rank.
    "4 groups of 2": (4, "strategy=zero1 strategy.replicas=4", 2 * 6 / 8),
    "parameters over 4 ranks": (2, "strategy=zero3 strategy.keep=none", 2 * 3 * 2 / 4),
    # hpZ: of three moves over all ranks two are left. Each rank sends P/4 to two of the other node: 3P become 2P.
    "a copy in each node": (
        2,
        "strategy=zero3 strategy.keep=none strategy.secondary_partition=2",
        2 * 2 * 2 / 4,
    ),
    # ZeRO++: one gather of int8 and one reduction of int4, with a factor for 128 elements. Of P in 2 bytes an element
    # that is (132 + 68) / 256 = 0.78, for the paper's 0.75; here P has 4 bytes.
    "ZeRO++": (
        2,
        "strategy=zero3 strategy.keep=none strategy.secondary_partition=2 precision=bf16_master "
        "strategy.gather_codec=int8 strategy.reduce_codec=int4",
        2 * 2 / 4 * (132 + 68) / 512,
    ),
    "2 groups of 2": (2, "strategy=zero3 strategy.keep=none strategy.replicas=2", 2 * 2 / 4),
}
QUICK = ("ZeRO++",)  # which has all that the others have, but for groups


@needs_link
@pytest.mark.parametrize(
    "case",
    [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CROSSED],
)
def test_bytes_over_a_link_are_those_of_the_plan_and_of_arithmetic(local, tmp_path, case):
    """Read from the interface, less the headers of its packets. Handshakes, the loss and the norm are in it."""
    nodes, words, in_parameters = CROSSED[case]
    size = f"world_size={2 * nodes} data.global_batch_size={2 * nodes} cluster.nodes={nodes}"
    line = f"model=mlp_tiny model.mlp.width=512 data=vectors train.steps=2 train.warmup_steps=1 {size} {words}"
    config = composed("cluster.link=1gbit", *line.split())
    check(config)
    (tmp_path / "run").mkdir()
    configs.save(config, tmp_path / "run" / "config.yaml")
    assert local.run(Job(tmp_path / "run")).status == "done"
    summary = read_summary(tmp_path / "run")
    assert summary is not None and summary.link_bytes_per_step is not None
    assert summary.num_parameters is not None
    for sent in summary.link_bytes_per_step.per_rank:
        assert sent == pytest.approx(summary.plan["link"], rel=0.01)
        assert sent == pytest.approx(in_parameters * 4 * summary.num_parameters, rel=0.01)


def namespaces() -> set[str]:
    """The network namespaces that some process is in."""
    found: set[str] = set()
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            found.add(os.readlink(f"/proc/{process}/ns/net"))
    return found


@needs_link
@pytest.mark.parametrize("ending", ["end", "kill"])
def test_no_node_outlives_its_ranks(tmp_path, monkeypatch, ending):
    """Nothing has a name by which it could stay, also where the process that made the nodes is killed."""
    start_servers_with(monkeypatch, Warm)
    job = Job(tmp_path / f"{ending}_on_node")
    job.folder.mkdir()
    configs.save(Config(world_size=4, cluster=LINKED), job.folder / "config.yaml")
    with LocalCluster(LINKED, rank_main="tests.cluster.rank_mains:main") as local:
        assert local.run(job).status == ("done" if ending == "end" else "failed")
    nodes = [(job.folder / f"node{rank}").read_text() for rank in range(4)]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    wait_until(lambda: not namespaces() & {*nodes})
    devices, names = (
        subprocess.run(["ip", *words], capture_output=True, text=True).stdout
        for words in (["-brief", "link"], ["netns", "list"])
    )
    assert LINK not in devices and "switch" not in devices and "zeroexp" not in names


# What takes the right away, and what the answer says of it.
REFUSED = {
    "as nobody": ("os.setuid(65534)", "[Errno 1] Operation not permitted"),
    "without tools": ("os.environ['PATH'] = ''", "[Errno 2] No such file or directory: 'ip'"),
    "a container's root": ("drop_capability()", "[Errno 1] Operation not permitted"),
}
PROGRAM = """
import ctypes, os
from zeroexp.cluster.emulated_network import open_nodes
from zeroexp.config.keys import ClusterConfig

def drop_capability():
    head, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(head, data) == 0

{takes_away}
try:
    with open_nodes(ClusterConfig(link="1gbit")):
        print("made")
except ValueError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has rights to take away")
@pytest.mark.parametrize("case", REFUSED)
def test_a_machine_without_links_says_so_in_one_line(case):
    takes_away, why = REFUSED[case]
    program = PROGRAM.format(takes_away=takes_away)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    problem = f"this machine makes no network namespaces and links ({why})"
    remedy = "run as root, apt install iproute2, or leave it null"
    assert done.stdout == f"cluster.link=1gbit: {problem}; {remedy}\n", done.stderr
