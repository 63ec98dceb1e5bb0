"""An engine ends with the last reference to it, whatever autograd still keeps: its weights and connections go too."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.process.world import World, fake_world
from zeroexp.zero.held import GatherState
from zeroexp.zero.options import Options


class Keeps(nn.Linear):
    """Keeps its output, and so the graph behind it, in an attribute."""

    def forward(self, input: Tensor) -> Tensor:
        self.kept = super().forward(input)
        return self.kept


def engine_of(world: World, stage: str, model: nn.Module | None = None) -> Sharded:
    model = model or nn.Sequential(nn.Linear(4, 4), Keeps(4, 4), nn.Linear(4, 4))
    return Sharded(
        model,
        blocks=["0", "1"],
        stage=STAGES[stage],
        param_groups=[{"params": list(model.parameters())}],
        optimizer_factory=torch.optim.SGD,
        world=world,
        options=Options(transport="native"),
    )


def forward(strategy: Sharded) -> Tensor:
    with strategy.microbatch(last=True):
        return strategy.model(torch.randn(2, 4)).sum()


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_a_kept_graph_keeps_no_engine(stage):
    with fake_world(0, 2) as world:
        strategy = engine_of(world, stage)
        with strategy.microbatch(last=True):
            strategy.backward(strategy.model(torch.randn(2, 4)).sum())
        alive = weakref.ref(strategy)
        del strategy
        gc.collect()
        assert alive() is None


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_a_graph_without_backward_ends_with_its_last_reference(stage):
    """A loss that is skipped, an output that no loss uses: autograd saves what some functions return."""
    with fake_world(0, 2) as world:
        strategy = engine_of(world, stage)
        for _ in range(2):  # the first microbatch finds the order of units
            with strategy.microbatch(last=True):
                output = strategy.model(torch.randn(2, 4)).sigmoid()
            alive = weakref.ref(output)
            del output
            assert alive() is None


class Passes(nn.Linear):
    def forward(self, input: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return super().forward(input[0]), input[1]


def test_a_leaf_that_a_block_returns_as_it_came_is_not_its_output():
    """It may be the same in each step, as a learned prompt is."""
    with fake_world(0, 2) as world:
        strategy = engine_of(world, "zero3", nn.Sequential(Passes(4, 4), Passes(4, 4)))
        leaf = torch.zeros(4, requires_grad=True)
        for _ in range(2):
            with strategy.microbatch(last=True):
                strategy.backward(sum(map(torch.sum, strategy.model((torch.ones(2, 4), leaf)))))
            strategy.step()
            strategy.zero_grad()
        assert not leaf._backward_hooks


def test_a_graph_whose_engine_has_ended_says_so():
    with fake_world(0, 2) as world:
        loss = forward(engine_of(world, "zero3"))
        gc.collect()
        with pytest.raises(RuntimeError, match="no longer exists: keep the strategy"):
            loss.backward()


def test_a_state_waits_for_no_gather_ahead(monkeypatch):
    """One rank may save at its end, when peers that would take part in the next gather have left."""
    with fake_world(0, 2) as world:
        strategy = engine_of(world, "zero3")
        for _ in range(2):  # the first step finds the order of units
            with strategy.microbatch(last=True):
                strategy.backward(strategy.model(torch.randn(2, 4)).sum())
            strategy.step()
            strategy.zero_grad()
        ahead = [unit for unit in strategy.units if unit.gather_state is GatherState.GATHERING]
        for unit in ahead:
            monkeypatch.setattr(unit, "wait", lambda: pytest.fail("it waits for the next step"))
        assert ahead and strategy.state_dict()


@pytest.mark.parametrize(
    ("dtype", "numel", "error"),
    [
        (torch.float64, 3, 1e-12),
        (torch.float32, 1 << 23, 1e-4),
        (torch.float32, (1 << 17) + 999, 1e-4),
    ],
)
def test_the_norm_of_gradients_has_their_digits(dtype, numel, error):
    """A sum of squares in float32 over many elements would be too small where CPUs add them one by one."""
    with fake_world(0, 1) as world:
        model = nn.Linear(numel, 1, bias=False, dtype=dtype)
        strategy = Sharded(
            model,
            blocks=[],
            stage=STAGES["zero2"],
            param_groups=[{"params": [model.weight]}],
            optimizer_factory=torch.optim.SGD,
            world=world,
        )
        with strategy.microbatch(last=True):
            strategy.backward(model(torch.full((1, numel), 0.1, dtype=dtype)).sum())
        exact = (numel * float(torch.tensor(0.1, dtype=dtype)) ** 2) ** 0.5
        assert strategy.step().item() == pytest.approx(exact, rel=error, abs=0)
