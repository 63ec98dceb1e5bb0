"""zeroexp's own training step as a `Loop`: `zeroexp verify strategy=zero3 model=tiny` judges the engine of these words.

The batches are samples of the words' data, drawn anew for each rank and microbatch; the learning rate stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zeroexp.config.keys import Config, resolve
from zeroexp.config.optimizer import optimizer_factory
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.data.batches import build_data
from zeroexp.engines.build import build_strategy
from zeroexp.models.checkpointing import checkpoint_as_configured
from zeroexp.models.compiled_blocks import compile_as_configured
from zeroexp.models.loss import count_valid, loss_sum
from zeroexp.models.module import build_model
from zeroexp.process import world as worlds
from zeroexp.verify.loop_to_verify import Loop, Step
from zeroexp.zero.options import DTYPES

Batch = tuple[dict[str, Tensor], Tensor]  # the model's keyword arguments, and labels


def loop_of_config(config: Config) -> Loop:
    """Return the loop of a run with this config, whose ranks may be fewer or more."""
    config = resolve(config)
    seed, task, micro = config.train.seed, config.model.task, config.data.micro_batch_size
    data = build_data(replace(config.data, global_batch_size=micro), config.model, seed)
    built = build_model(config.model, seed=seed, vocab_size=data.vocab_size)
    masters = {
        parameter: group.get("master", config.precision.master)
        for group in parameter_groups(built.module, config.optimizer, built.blocks)
        for parameter in group["params"]
    }
    for parameter in built.module.parameters():
        # Plain PyTorch updates what is to be the master; engines keep frozen ones as they compute with them.
        kept = masters.get(parameter, config.precision.compute)
        parameter.data = parameter.data.to(DTYPES[kept])

    def draw(generator: torch.Generator) -> Batch:
        turn = int(torch.randint(data.num_samples, (), generator=generator))
        (microbatch,) = data.step_batch(turn * micro, rank=0, world_size=1).microbatches
        return microbatch.inputs, microbatch.labels

    def loss(model: Any, batch: Batch) -> tuple[Tensor, int]:
        inputs, labels = batch
        return loss_sum(model(**inputs), labels, task), count_valid(labels, task)

    def optimizer(model: nn.Module) -> Any:
        groups = parameter_groups(model, config.optimizer, built.blocks)
        return optimizer_factory(config.optimizer)(groups)

    def train(module: nn.Module) -> tuple[Any, Step]:
        world = worlds.current(module)
        checkpoint_as_configured(module, built.blocks, config.train)
        compile_as_configured(module, built.blocks, config.train)
        ours = replace(config, world_size=world.size)
        # An engine takes the model in float32, as a run's is built.
        strategy = build_strategy(ours, replace(built, module=module.float()), world)

        def step(batches: Sequence[Batch]) -> Tensor:
            count = torch.tensor(float(sum(count_valid(labels, task) for _, labels in batches)))
            worlds.sum_over_ranks(count)
            for batch in batches:
                with strategy.microbatch(last=batch is batches[-1]):
                    strategy.backward(loss(strategy.model, batch)[0] / count)
            norm = strategy.step(drain=True)
            strategy.zero_grad()
            return norm

        return strategy, step

    return Loop(
        model=built.module,
        loss=loss,
        batch=draw,
        optimizer=optimizer,
        train=train,
        microbatches=config.data.global_batch_size // (micro * config.world_size),
        max_grad_norm=config.optimizer.max_grad_norm,
        returns_norm=True,
        dtype=torch.bfloat16 if config.precision.autocast else DTYPES[config.precision.compute],
    )
