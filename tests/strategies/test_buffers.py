"""Buffers: rank 0's for every rank once per step, as DistributedDataParallel does; saved and taken up."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.checkpoint.saving import checkpoint
from tests.oracle import pieces_of
from tests.strategies.states_for_tests import build, save
from tests.zero.test_without_stops import nothing_is_read
from zeroexp.checkpoint.load import load
from zeroexp.interface.canonical import merge
from zeroexp.interface.module_buffers import Buffers
from zeroexp.interface.saved_state import SavedState
from zeroexp.process.world import gather_objects

ENGINES = ("ddp torch", "zero3 torch", "zero1 tensor", "zero3 buffer")


class Block(nn.Module):
    """Statistics, counters replaced and written in place, past the version too; views and ties of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.norm2d = nn.BatchNorm2d(6, momentum=None)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("last_two", self.seen[2:])
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("fixed", torch.arange(4.0), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.linear(x))
        x = self.norm2d(x[:, :, None, None])[:, :, 0, 0]
        if self.training:
            self.count = self.count + len(x) * int(1 + 10 * x.detach().abs().max())
            with torch.no_grad():
                self.seen.add_(x.detach().abs().sum())
                self.average.data.mul_(0.9).add_(x.detach().abs().max())
        return x * (1 + 1e-3 * self.seen.sum())


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.last = nn.Linear(6, 3)
        self.register_buffer("tied", self.first.seen, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def net() -> Normed:
    torch.manual_seed(3)
    return Normed()


def sgd(groups):
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def data(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def train(strategy, world, steps):
    for step in steps:
        for last in (False, True):
            with strategy.microbatch(last=last):
                out = strategy.model(data(2 * step + last, world.rank))
                strategy.backward(out.square().sum() / world.size)
        strategy.step(drain=step == steps[-1])
        strategy.zero_grad()


def buffers_of(module):
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def trained(world, engine, run=None):
    module = net()
    strategy = build(world, engine, sgd, net=module)
    train(strategy, world, range(3))
    if run is not None:
        save(strategy, world, run)
        train(strategy, world, range(3, 5))
    module.eval()
    return buffers_of(module), pieces_of(strategy)


def trained_by_torch(world):
    """Its buffers are sent: rank 0's before the first forward of every step."""
    module = net()
    ddp = DistributedDataParallel(module)  # its default
    optimizer = sgd(ddp.parameters())
    for step in range(3):
        for last in (False, True):
            ddp.require_backward_grad_sync = last
            (ddp(data(2 * step + last, world.rank)).square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return buffers_of(module), {n: p.detach().clone() for n, p in module.named_parameters()}


@pytest.mark.parametrize("engine", ENGINES)
def test_as_torchs_ddp_does(ranks, engine):
    expected, weights = ranks(trained_by_torch)[0]
    answers = ranks(trained, engine)
    for found, _ in answers:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found, answers[0][0], rtol=0, atol=0)
    state = merge([pieces for _, pieces in answers])
    saved = {name for name, entry in state.items() if "buffer" in entry}
    assert saved == {name for name in net().state_dict() if name not in weights}
    assert "first.fixed" not in state and "tied" not in state


def resumed(world, engine, run):
    module = net()
    strategy = build(world, engine, sgd, net=module)
    load(checkpoint(run, 2), strategy, world)
    train(strategy, world, range(3, 5))
    return buffers_of(module)


@pytest.mark.parametrize("engine", ENGINES)
def test_resumed_is_uninterrupted(ranks, tmp_path, engine):
    for (expected, _), found in zip(
        ranks(trained, engine, tmp_path), ranks(resumed, engine, tmp_path), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def refused_of_rank_1(world, engine):
    """Rank 1 is given something wrong."""
    strategy = build(world, engine, sgd, net=net())
    state = merge(gather_objects(pieces_of(strategy)))
    count, said = state["first.count"], []
    without = {name: entry for name, entry in state.items() if name != "first.count"}
    for wrong in (
        state | {"other.mean": count},
        without,
        without | {"first.count": {"buffer": replace(count["buffer"], pieces=[])}},
    ):
        try:
            strategy.load_state_dict(wrong if world.rank == 1 else state)
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("engine", ENGINES)
def test_states_of_other_models_are_refused_by_all_ranks(ranks, engine):
    others, own = ranks(refused_of_rank_1, engine)
    for message, told in zip(
        own,
        (
            "buffer other.mean of the state is not in the model",
            "buffer first.count is not in the state",
            "elements 0 to 0 of .* are in no piece",
        ),
        strict=True,
    ):
        assert re.match(f"strategy.load_state_dict: .*{told}", message), message
    assert len(others) == len(own)


def shared(world):
    module = net()
    buffers = Buffers(module, world)
    sent = [buffers.share()]
    module.first.count = module.first.count + 1
    if world.rank == 1:
        module.first.fixed = torch.zeros(9)  # grown here alone
    sent += [buffers.share(), buffers.share()]
    if world.rank == 1:
        module.first.count = module.first.count + 1  # rank 0's counts
    sent.append(buffers.share())
    assert module.first.count == 1
    assert module.first.fixed.numel() == (9 if world.rank else 4)
    if world.rank == 1:
        module.first.seen = torch.zeros(9)
    with pytest.raises(ValueError, match=r"^buffer first\.seen got another shape or dtype"):
        buffers.share()
    return sent


def shared_late(world):
    """As on a GPU: where nothing has changed the sum is not waited for, and a change goes out with the next step."""
    module = net()
    buffers = Buffers(module, world)
    buffers._reads_late = True
    sent = [buffers.share(), buffers.share()]
    with nothing_is_read():
        sent.append(buffers.share())
        module.first.count = module.first.count + 1 + world.rank
        sent.append(buffers.share())
    sent += [buffers.share(), buffers.share()]
    with nothing_is_read():
        sent.append(buffers.share())
    return sent, module.first.count.item()


def test_on_a_gpu_the_sum_is_waited_for_after_a_change_alone(ranks):
    assert ranks(shared_late) == [([0, 0, 0, 0, 8, 0, 0], 1)] * 2


class Grows(nn.Module):
    """The buffer of its state gets another shape in the fourth forward."""

    def __init__(self):
        super().__init__()
        self.first, self.left = nn.Linear(2, 2), 4
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        self.left -= 1
        self.seen = self.seen if self.left else torch.zeros(3)
        return self.first(x)


def grown_late(world, engine):
    """What a state, and a wait for all, say as on a GPU of a shape that changed in the step before."""
    strategy = build(world, engine, sgd, net=Grows())
    (saved,) = (each for each in vars(strategy).values() if isinstance(each, SavedState))
    saved.buffers._reads_late = True
    for _ in range(4):
        strategy.state_dict()
        with strategy.microbatch(last=True):
            strategy.backward(strategy.model(torch.ones(1, 2)).sum())
        strategy.step()
        strategy.zero_grad()
    waits = [] if engine.endswith("torch") else [strategy.drain]
    for call in (strategy.state_dict, *waits):
        with pytest.raises(ValueError, match=r"^buffer seen got another shape or dtype"):
            call()


@pytest.mark.parametrize("engine", ENGINES)
def test_no_state_holds_a_shape_that_a_gpu_tells_of_late(ranks, engine):
    ranks(grown_late, engine)


def test_only_what_changed_is_sent_and_another_shape_is_told_to_all(ranks):
    assert ranks(shared) == [[0, 8, 0, 8]] * 2  # one int64
