"""Makes our engine as a library user would, with every option in reach."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tests.oracle import PRECISIONS, Recipe
from zeroexp.config.optimizer import optimizer_factory
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.cut.stage import STAGES
from zeroexp.engines.sharded import Sharded
from zeroexp.models.module import BuiltModel
from zeroexp.process.world import World
from zeroexp.zero.engine import Engine
from zeroexp.zero.options import DTYPES, Dtypes, Options


@dataclass(frozen=True)
class Ours:
    """Travels to the ranks, and makes the engine there."""

    stage: str
    options: Options
    kind: type[Engine] = Sharded
    of_modules: tuple[tuple[str, torch.dtype], ...] = ()  # of Dtypes

    def __call__(self, built: BuiltModel, recipe: Recipe, world: World) -> Engine:
        config, precision = recipe.optimizer_config(), PRECISIONS[recipe.precision]
        dtypes = (precision.compute, precision.reduce, precision.master)
        return self.kind(
            built.module,
            blocks=built.blocks,
            stage=STAGES[self.stage],
            param_groups=parameter_groups(built.module, config, built.blocks),
            optimizer_factory=optimizer_factory(config),
            world=world,
            dtypes=Dtypes(*(DTYPES[dtype] for dtype in dtypes), of_modules=dict(self.of_modules)),
            max_grad_norm=config.max_grad_norm,
            # As the oracle does, if nothing is said: it sums all microbatches before the ranks.
            options=replace(self.options, reduce_each=self.options.reduce_each or "step"),
        )
