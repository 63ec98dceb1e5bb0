"""Ranks that do not do the same in a step: right as one process is, or an error that names rank and unit.

On one host a gather reads what was offered and needs no counterpart, so that all of it is right. By message, and in
the backend's collectives, every gather has one: where a rank does not come, the others end with an error.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from zeroexp.sharding.engine import Sharded
from zeroexp.sharding.options import Options
from zeroexp.sharding.placement import STAGES
from zeroexp.world import World, barrier

WIDTH = 6
NUM_STEPS = 3
WAYS = ["a block skipped", "no gradient", "no backward", "no forward", "another order"]


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, way: str) -> Tensor:
        """`way`: what the rank does that others do not; "" is the usual."""
        orders = {"another order": [3, 2, 1, 0], "two swapped": [1, 0, 2, 3]}
        for block in (self.blocks[i] for i in orders.get(way, range(4))):
            if way == "a block skipped" and block is self.blocks[1]:
                continue
            y = torch.tanh(block(x))
            x = x + (y.detach() if way == "no gradient" and block is self.blocks[2] else y)
        return x


def make_model() -> Chain:
    torch.manual_seed(3)
    return Chain()


def loss_of(model: nn.Module, rank: int, step: int, way: str) -> Tensor:
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x, way).square().mean()


def way_of(rank: int, way: str) -> str:
    return way if rank == 1 else ""


def oracle(way: str, num_ranks: int) -> list[Tensor]:
    """One process adds the ranks' gradients, one after the other; none counts as zeros."""
    model = make_model()
    for step in range(NUM_STEPS):
        sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for rank in range(num_ranks):
            one = copy.deepcopy(model)
            mine = way_of(rank, way)
            if mine not in ("no forward", "no backward"):
                loss_of(one, rank, step, mine).backward()
            for total, parameter in zip(sums, one.parameters(), strict=True):
                total += 0 if parameter.grad is None else parameter.grad
        with torch.no_grad():
            for parameter, total in zip(model.parameters(), sums, strict=True):
                parameter -= 0.1 * total
    return [parameter.detach() for parameter in model.parameters()]


def train(world: World, way: str, stage: str, options: Options) -> list[tuple[str, int, Tensor]]:
    """This rank's pieces: the name, where it begins, the values."""
    model = make_model()
    strategy = Sharded(
        model,
        blocks=[f"blocks.{i}" for i in range(4)],
        stage=STAGES[stage],
        param_groups=[{"params": list(model.parameters())}],
        optimizer_factory=lambda groups: torch.optim.SGD(groups, lr=0.1),
        world=world,
        options=options,
    )
    mine = way_of(world.rank, way)
    for step in range(NUM_STEPS):
        with strategy.microbatch(last=True):
            if mine != "no forward":
                loss = loss_of(strategy.model, world.rank, step, mine)
                if mine != "no backward":
                    strategy.backward(loss)
        strategy.step()
        strategy.zero_grad()
    strategy.drain()
    barrier()
    return [
        (name, piece.start, piece.tensor.clone())
        for name, tensors in strategy.state_dict().items()
        for piece in tensors["weight"].pieces
    ]


def is_right(pieces: list[tuple[str, int, Tensor]], way: str, num_ranks: int) -> None:
    names = [name for name, _ in make_model().named_parameters()]
    expected = dict(zip(names, oracle(way, num_ranks), strict=True))
    for name, start, values in pieces:
        part = expected[name].reshape(-1)[start : start + values.numel()]
        torch.testing.assert_close(values.reshape(-1), part, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
@pytest.mark.parametrize("way", WAYS)
def test_on_one_host_ranks_may_differ(ranks, way, stage, overlap):
    for world_size in (2, 3):
        options = Options(overlap=overlap, prefetch=1 if overlap else None)
        for pieces in ranks(train, way, stage, options, world_size=world_size):
            is_right(pieces, way, world_size)


def names_rank_and_unit(ranks, way: str) -> None:
    with pytest.raises(AssertionError) as caught:
        ranks(train, way, "zero3", Options(transport="gloo"))
    text = str(caught.value)
    assert "the ranks do not do the same" in text, text
    assert "rank 0 waits for rank 1: the" in text and "rank 1 waits for rank 0: the" in text
    assert "of unit blocks." in text or "of unit (root)" in text


def test_by_message_ranks_that_differ_end_with_an_error(ranks):
    names_rank_and_unit(ranks, "a block skipped")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS[1:])
def test_by_message_every_difference_is_right_or_an_error(ranks, way):
    try:
        for pieces in ranks(train, way, "zero3", Options(transport="gloo")):
            is_right(pieces, way, 2)
    except AssertionError as error:
        assert "the ranks do not do the same" in str(error), str(error)


def evaluate_in_another_order(world: World, swapped: bool) -> str:
    """Rank 1 uses the first two blocks in the other order once, then all ranks do one step alike."""
    model = make_model()
    strategy = Sharded(
        model,
        blocks=[f"blocks.{i}" for i in range(4)],
        stage=STAGES["zero3"],
        param_groups=[{"params": list(model.parameters())}],
        optimizer_factory=lambda groups: torch.optim.SGD(groups, lr=0.1),
        world=world,
        options=Options(transport="native", overlap=False),
    )
    with torch.no_grad():
        loss_of(strategy.model, world.rank, 0, "two swapped" if swapped and world.rank == 1 else "")
    with strategy.microbatch(last=True):
        strategy.backward(loss_of(strategy.model, world.rank, 0, ""))
    try:
        strategy.step()
        return "went on"
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_backend_mixes_blocks_up_and_every_rank_says_so(ranks, world_size):
    """Its gathers have no names: those of one size meet, whatever they gather."""
    same = ranks(evaluate_in_another_order, False, world_size=world_size)
    assert same == ["went on"] * world_size
    for text in ranks(evaluate_in_another_order, True, world_size=world_size):
        found_at_the_end = "used their blocks in different orders" in text
        assert found_at_the_end or "the ranks do not do the same, rank 0 is in the gather" in text


@pytest.mark.parametrize("way", ["no backward"])
def test_in_the_backend_ranks_that_differ_end_with_an_error(ranks, way):
    """Each waits in another collective; the second rank to give up finds its peer gone, or the same words."""
    with pytest.raises(AssertionError) as caught:
        ranks(train, way, "zero3", Options(transport="native"))
    text = str(caught.value)
    assert "the ranks do not do the same, rank 0 is in the" in text, text
    assert "; rank 1 is in the" in text


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
@pytest.mark.parametrize("way", WAYS)
def test_in_the_backend_every_difference_is_right_or_an_error(ranks, way, stage, world_size):
    try:
        for pieces in ranks(train, way, stage, Options(transport="native"), world_size=world_size):
            is_right(pieces, way, world_size)
    except AssertionError as error:
        text = str(error)
        assert "the ranks do not do the same" in text or "in different orders" in text, text
