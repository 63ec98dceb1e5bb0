"""Where the ranks of a point are, and what of their messages stays inside a node."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tests.composing import composed
from zeroexp.config.gpus import NETWORKS
from zeroexp.config.job_shape import JobShape
from zeroexp.cut.rank_grid import RankGrid
from zeroexp.plan.machines import Machines, device_of, machines_of
from zeroexp.plan.outcome import plan_point
from zeroexp.plan.speed import prior_speed, speed_of


@pytest.mark.parametrize(
    ("world_size", "most_per_node", "shape"),
    [(8, 8, (1, 8)), (16, 8, (2, 8)), (12, 8, (2, 6)), (15, 8, (3, 5)), (7, 4, (7, 1))],
)
def test_the_fewest_nodes_share_the_ranks_evenly(world_size, most_per_node, shape):
    assert JobShape.of(world_size, most_per_node) == JobShape(*shape)


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 8), (2, 4), (3, 5), (4, 1)])
def test_messages_of_cpus_go_to_every_peer_and_those_of_gpus_round_a_ring(nodes, per_node):
    size = nodes * per_node
    node_of = [rank // per_node for rank in range(size)]
    ring = [node_of[rank] == node_of[(rank + 1) % size] for rank in range(size)]
    pairs = [node_of[a] == node_of[b] for a in range(size) for b in range(size) if a != b]
    inside = {"cuda": ring, "cpu": pairs or [True]}
    for device, messages in inside.items():
        share = Machines(device, JobShape(nodes, per_node)).share_inside_node([range(size)])
        assert share == float(Fraction(sum(messages), len(messages))), device


@pytest.mark.parametrize(
    ("num_groups", "device", "in_groups", "between"),
    [
        (4, "cuda", 1.0, 0.0),  # a group is a node, the holders of a piece are one on each
        (2, "cuda", 0.5, 0.0),  # a group of two nodes
        (2, "cpu", 1 / 3, 0.0),
        (8, "cuda", 1.0, 0.5),  # a group is a rank
    ],
)
def test_what_of_a_group_lies_on_one_node(num_groups, device, in_groups, between):
    config = composed("world_size=8", "strategy=zero2", f"strategy.replicas={num_groups}")
    inside, shares = Machines(device, JobShape(4, 2)).shares_inside(config)
    assert (inside, shares["replicas"]) == (in_groups, between)


def test_groups_that_lie_across_nodes_are_counted_rank_by_rank():
    """Nodes of four ranks, groups of three: 0 1 2 | 3 4 5 | 6 7 8 | 9 10 11."""
    machines = Machines("cpu", JobShape(3, 4))
    config = composed("world_size=12", "strategy=zero2", "strategy.replicas=4")
    # Of each rank's two peers, node by node: 2 2 2 | 0 1 1 | 1 1 0 | 2 2 2.
    inside, shares = machines.shares_inside(config)
    assert inside == 16 / 24
    # 0 3 6 9 | 1 4 7 10 | 2 5 8 11 lie on nodes 0 0 1 2 | 0 1 1 2 | 0 1 2 2.
    assert shares["replicas"] == 6 / 36
    assert machines.transports(config.grid) == ("mixed", "mixed")


def test_gradients_that_gpus_send_as_codes_go_to_every_peer():
    """Two nodes of two: of three peers one is on the same node, round a ring every other message stays there."""
    words = ("model=mlp_tiny", "data=vectors", "strategy=zero1", "world_size=4")
    words = (*words, "data.global_batch_size=4", "cluster.slurm.ranks_per_node=2")
    planned = plan_point(composed(*words, "strategy.reduce_codec=int8"), None, "cuda").outcome
    sent = dict(planned.sent_by_kind)
    inside = sent.pop("reduce") / 3 + sum(sent.values()) / 2
    assert planned.sent_inside == pytest.approx(inside, rel=1e-3)  # ranks differ by a few bytes


def test_transports_and_words():
    one, two, apart = JobShape(1, 8), JobShape(2, 4), JobShape(8, 1)
    whole = RankGrid(8)
    transports = [Machines("cpu", shape).transports(whole)[0] for shape in (one, two, apart)]
    assert transports == ["direct", "mixed", "gloo"]
    of_groups = [Machines("cpu", two).transports(RankGrid(8, num)) for num in (2, 4, 8)]
    assert of_groups == [("direct", "gloo"), ("direct", "mixed"), ("direct", "mixed")]
    of_gpus = {Machines("cuda", shape).transports(whole) for shape in (one, two, apart)}
    assert of_gpus == {("native", "native")}
    told = [str(Machines(*each)) for each in (("cpu", one), ("cuda", two))]
    assert told == ["cpu, 1 node of 8", "cuda, 2 nodes of 4"]


def test_ranks_of_a_local_run_on_cpus_share_a_machine():
    words = ("world_size=16", "cluster.slurm.ranks_per_node=4")
    local, slurm = composed(*words), composed("cluster=slurm", *words)
    assert machines_of(local, "cpu").shape == JobShape(1, 16)
    assert machines_of(local, "cuda").shape == machines_of(slurm, "cpu").shape == JobShape(4, 4)


@pytest.mark.parametrize(
    ("sizes", "num_gpus", "device"),
    [
        ((1, 2), 0, "cpu"),
        ((2, 4), 0, "cuda"),
        ((1,), 8, "cuda"),
        ((2,), 1, "cpu"),
        ((4,), 1, "cuda"),
    ],
)
def test_a_plan_is_for_the_device_of_a_run_here_or_for_gpus(sizes, num_gpus, device):
    configs = [composed(f"world_size={size}") for size in sizes]
    assert device_of(configs, num_gpus, num_cpus=2) == device


def test_a_move_behind_a_link_takes_what_of_it_crosses(tmp_path, monkeypatch):
    """Two ranks share their node's 1448 of 1514 bytes in a gigabit a second; a group of one node crosses nothing."""
    monkeypatch.chdir(tmp_path)  # where nothing is calibrated
    words = ("world_size=4", "data.global_batch_size=4", "cluster.link=1gbit", "strategy=zero2")
    config, grouped = composed(*words), composed(*words, "strategy.replicas=2")
    assert device_of([config], num_gpus=8, num_cpus=2) == "cpu"
    machines = machines_of(config, "cpu")
    assert machines.shape == JobShape(2, 2)
    whole, parts = (speed_of(each, machines, "gloo") for each in (config, grouped))
    inside = prior_speed(machines, "gloo").link_bytes_per_second
    crossing = 1e9 / 8 * 1448 / 1514 / 2
    # Of three peers one is on the same node.
    assert 1 / whole.link_rate("reduce") == pytest.approx(2 / 3 / crossing + 1 / 3 / inside)
    assert parts.link_rate("reduce") == pytest.approx(inside)
    assert parts.link_rate("replicas") == pytest.approx(crossing)
    assert "1gbit" in parts.label


def test_groups_of_gpus_inside_a_node_move_at_its_rate_and_sums_share_its_network(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = ("world_size=16", "data.global_batch_size=16", "strategy=zero3")
    words = (*words, "cluster.network=nvlink-ethernet")
    machines = Machines("cuda", JobShape(2, 8))
    rates = [
        speed_of(composed(*words, f"strategy.replicas={num}"), machines, "native").link_rate
        for num in (1, 2)
    ]
    node = NETWORKS["nvlink-ethernet"].node_bytes_per_second
    inside = prior_speed(Machines("cuda", JobShape(1, 8)), "native").link_bytes_per_second
    assert (rates[0]("gather"), rates[1]("gather")) == (node, inside)
    assert rates[1]("replicas") == node / 8  # the eight ranks of a node sum at once
