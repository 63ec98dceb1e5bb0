"""With replicas a plan counts what the engine sends and holds, inside of groups and between them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.composing import composed
from tests.plan.test_closed_forms import PRECISIONS, engine, form_of, run_step
from zeroexp.check import check
from zeroexp.config.keys import UndefinedCombination
from zeroexp.cut.stage import STAGES
from zeroexp.measure.record import MOMENTS
from zeroexp.plan.closed_forms import ScheduleForm
from zeroexp.plan.form_of_config import build_on_meta
from zeroexp.plan.form_of_config import form_of as form_of_config
from zeroexp.plan.machines import JobShape, Machines
from zeroexp.plan.outcome import plan_point
from zeroexp.process.world import World, barrier, fake_world
from zeroexp.zero.options import MIB, Options

STAGES_IN_GROUPS = [name for name in STAGES if name != "ddp"]
LAYOUTS = ("parameter", "tensor", "buffer")


def check_on_rank(world: World, stage: str, transport: str, replicas: int) -> None:
    for layout in LAYOUTS:
        words: dict[str, Any] = {"transport": transport, "prefetch": 1, "replicas": replicas}
        options = Options(layout=layout, reduce_each="step", **words)
        strategy = engine(world, stage, options, PRECISIONS[3], "adamw")
        bucket = 4 * MIB if transport == "direct" else None
        schedule = ScheduleForm(accumulation=2, bucket_bytes=bucket, transport=transport)
        words = {"precision": PRECISIONS[3], "replicas": replicas}
        form = form_of(strategy, stage, options, schedule, **words)
        run_step(strategy, 2)
        held: dict[str, dict[str, int]] = {}
        run_step(strategy, 2, held)
        where = f"{layout}, rank {world.rank}"
        assert held == {moment: form.held_bytes(moment, world.rank) for moment in MOMENTS}, where
        run_step(strategy, 2)
        assert run_step(strategy, 2) == form.traffic(world.rank), where
        if not world.is_fake:
            strategy.drain()
            barrier()


@pytest.mark.parametrize("transport", ["native", "gloo"])
@pytest.mark.parametrize("stage", STAGES_IN_GROUPS)
def test_every_rank_of_any_groups(stage, transport):
    for size, replicas in ((4, 2), (6, 2), (6, 3)):
        for rank in range(size):
            with fake_world(rank, size) as world:
                check_on_rank(world, stage, transport, replicas)


@pytest.mark.parametrize("stage", STAGES_IN_GROUPS)
def test_ranks_of_one_host(ranks, stage):
    ranks(check_on_rank, stage, "direct", 2, world_size=4)


def planned(*words: str) -> Any:
    every = ("model=mlp_tiny", "data=vectors", "world_size=8", "data.global_batch_size=8")
    config = composed(
        *every, "strategy=zero1", "cluster=slurm", "cluster.slurm.ranks_per_node=2", *words
    )
    return plan_point(config, None, "cuda").outcome


def test_the_published_example():
    """Eight ranks, two a node, in four groups of two: between nodes 2 P 7/8 · 1/2 of a ring become 2 P/2 · 3/4."""
    plain, grouped = planned(), planned("strategy.replicas=4")
    parameter_bytes = 4 * sum(plain.owned.per_rank)  # fp32
    assert plain.sent_between == pytest.approx(2 * parameter_bytes * 7 / 8 / 2, rel=0.01)
    assert grouped.sent_between == pytest.approx(2 * parameter_bytes / 2 * 3 / 4, rel=0.01)
    assert grouped.sent.mean == pytest.approx(plain.sent.mean, rel=0.01)


def test_each_group_holds_all_states():
    words = ("model=mlp_tiny", "data=vectors", "world_size=8", "data.global_batch_size=8")
    config = composed(*words, "strategy=zero3", "strategy.replicas=2")
    form = form_of_config(config, build_on_meta(config), "native")
    four = composed(*words[:2], "world_size=4", "data.global_batch_size=8", "strategy=zero3")
    smaller = form_of_config(four, build_on_meta(four), "native")
    for rank in range(8):
        assert form.held_elements(rank) == smaller.held_elements(rank % 4)


@pytest.mark.parametrize(
    ("num_ranks", "apart", "device", "share"),
    [
        (2, 1, "cuda", 1.0),  # a group is a node
        (4, 2, "cuda", 0.0),  # the holders of a piece, one on each node
        (4, 1, "cuda", 0.5),  # a group of two nodes
        (4, 1, "cpu", 1 / 3),
        (None, 1, "cpu", 1 / 7),
    ],
)
def test_what_of_a_group_lies_on_one_node(num_ranks, apart, device, share):
    assert Machines(device, JobShape(4, 2)).share_inside_node(num_ranks, apart) == share


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("strategy=ddp strategy.replicas=2", "strategy.replicas=2: every rank is a replica"),
        ("strategy.replicas=3", "4 ranks form no 3 equal groups; use 1, 2"),
        ("strategy.replicas=4", "this is ddp"),
        ("strategy=zero1 strategy.replicas=2 strategy.implementation=torch", "over all ranks"),
    ],
)
def test_groups_without_a_meaning_are_refused(words, line):
    config = composed("world_size=4", "strategy=zero3", *words.split())
    with pytest.raises(UndefinedCombination, match=line):
        check(config)
