"""Every parameter group of an engine gets the step's learning rate, or its own fraction of it."""

from __future__ import annotations

import pytest
import torch

from tests.plain_strategy import PlainStrategy
from tests.test_train import Linear, Numbers, make_config
from zeroexp.process import world as worlds
from zeroexp.training.loop import train


class Grouped(PlainStrategy):
    """A group for each parameter, and what each one's learning rate was when it was asked to step."""

    def __init__(self) -> None:
        model = Linear()
        model.shift = torch.nn.Parameter(torch.zeros(1))
        super().__init__(model)
        self.optimizer = torch.optim.SGD(
            [
                {"params": [parameter], "lr": 5.0, **scale}
                for parameter, scale in zip(
                    model.parameters(), ({}, {"lr_scale": 0.5}), strict=True
                )
            ]
        )
        self.stepped_with: list[list[float]] = []

    def step(self, *, drain: bool = False) -> torch.Tensor:
        self.stepped_with.append([group["lr"] for group in self.optimizer.param_groups])
        return super().step(drain=drain)


def test_every_group_has_the_rate_of_the_step():
    config = make_config(warmup=0, steps=3)
    strategy = Grouped()
    with worlds.joined_process_group() as world:
        records = list(train(strategy, Numbers(config), config=config, world=world))
    assert strategy.stepped_with == [[record.lr, record.lr / 2] for record in records]
    assert [record.lr for record in records] == pytest.approx([0.1, 0.075, 0.05])
