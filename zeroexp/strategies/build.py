"""Build the strategy from the config: this is the only file that knows every engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from zeroexp.config import AUTO, Config, StrategyConfig, resolve
from zeroexp.models.build import BuiltModel
from zeroexp.optim import optimizer_factory, parameter_groups
from zeroexp.sharding.dtypes import DTYPES, Dtypes
from zeroexp.sharding.engine import Sharded
from zeroexp.sharding.options import Options
from zeroexp.sharding.placement import Stage
from zeroexp.strategies.base import Strategy
from zeroexp.strategies.torch_ddp import TorchDDP
from zeroexp.strategies.torch_fsdp2 import TorchFSDP2
from zeroexp.world import World


def build_strategy(config: Config, model: BuiltModel, world: World) -> Strategy:
    """Return the configured engine around `model`, whose parameters or values are the unrounded initial weights."""
    config = resolve(config)
    key = config.strategy.implementation
    key = f"torch {config.strategy.name}" if key == "torch" else key
    return ENGINES[key](config, model, world, _common(config, model))


def _common(config: Config, model: BuiltModel) -> dict[str, Any]:
    return {
        "param_groups": parameter_groups(model.module, config.optimizer),
        "optimizer_factory": optimizer_factory(config.optimizer),
        "max_grad_norm": config.optimizer.max_grad_norm,
        "values": model.values,
    }


def _sharded(config: Config, model: BuiltModel, world: World, common: dict[str, Any]) -> Strategy:
    return Sharded(
        model.module,
        blocks=model.blocks,
        stage=stage_of(config.strategy),
        dtypes=dtypes_of(config.strategy),
        options=options_of(config.strategy),
        world=world,
        **common,
    )


def _ddp(config: Config, model: BuiltModel, world: World, common: dict[str, Any]) -> Strategy:
    return TorchDDP(
        model.module,
        dtype=DTYPES[config.precision.compute],
        autocast=config.precision.autocast,
        shard_optimizer=config.strategy.name == "zero1",
        gradient_as_bucket_view=bool(config.strategy.gradient_as_bucket_view),
        may_skip_parameters=config.model.family == "moe",
        world=world,
        **common,
    )


def _fsdp2(config: Config, model: BuiltModel, world: World, common: dict[str, Any]) -> Strategy:
    return TorchFSDP2(
        model.module,
        blocks=model.blocks,
        reshard_after_forward=config.strategy.name == "zero3",
        dtypes=dtypes_of(config.strategy),
        world=world,
        **common,
    )


ENGINES: dict[str, Callable[[Config, BuiltModel, World, dict[str, Any]], Strategy]] = {
    "parameter": _sharded,
    "tensor": _sharded,
    "buffer": _sharded,
    "torch ddp": _ddp,
    "torch zero1": _ddp,
    "torch zero2": _fsdp2,
    "torch zero3": _fsdp2,
}


def stage_of(strategy: StrategyConfig) -> Stage:
    """Return the stage that the config's three rows form."""
    rows = (strategy.parameters, strategy.gradients, strategy.optimizer)
    return Stage.of(*(row.placement for row in rows))


def dtypes_of(strategy: StrategyConfig) -> Dtypes:
    """Return the dtypes of the config's three rows."""
    rows = (strategy.parameters, strategy.gradients, strategy.optimizer)
    return Dtypes(*(DTYPES[row.dtype] for row in rows))


def options_of(strategy: StrategyConfig) -> Options:
    """Make Options of the config's fields; a None (no effect in this stage) keeps the default."""
    if strategy.bucket_mb == AUTO:
        raise ValueError("strategy.bucket_mb=auto: measure it first, with zeroexp.links.settle")
    words = {field.name: getattr(strategy, field.name, None) for field in fields(Options)}
    words["family"] = strategy.implementation
    return Options(**{word: value for word, value in words.items() if value is not None})
