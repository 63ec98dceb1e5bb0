"""Build the strategy from the config: our engine with one of its layouts, or a native one of ENGINES."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from zeroexp.config.engines import ENGINES
from zeroexp.config.families import MODELS
from zeroexp.config.keys import TORCH_DDP, Config, ConfigError, StrategyConfig, resolve
from zeroexp.config.optimizer import optimizer_factory
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.cut.layout import LAYOUTS
from zeroexp.cut.stage import Stage
from zeroexp.engines.activation_offload import offload_blocks
from zeroexp.engines.sharded import Sharded
from zeroexp.engines.torch_ddp import TorchDDP
from zeroexp.interface.strategy import Strategy
from zeroexp.models.module import BuiltModel
from zeroexp.process.world import World
from zeroexp.zero.options import DTYPES, Dtypes, Options, OuterOptimizer

MEMBERS = (*Strategy.__annotations__, *(n for n in vars(Strategy) if not n.startswith("_")))


def build_strategy(config: Config, model: BuiltModel, world: World) -> Strategy:
    """Return the configured engine around `model`, whose parameters or values are the unrounded initial weights."""
    config = resolve(config)
    if config.train.offload_activations:
        offload_blocks(model.module, model.blocks)
    name, common = config.strategy.implementation, _common(config, model)
    if name in LAYOUTS:
        return _sharded(config, model, world, common)
    return with_members(name, ENGINES[name].build(config, model, world, common))


def with_members(name: str, made: Strategy) -> Strategy:
    """Return the engine. Raises ConfigError if an engine of others lacks what the training loop asks of it."""
    if missing := [member for member in MEMBERS if not hasattr(made, member)]:
        problem = f"its build returns a {type(made).__name__} without {', '.join(missing)}"
        remedy = "return an engine with the members of zeroexp/interface/strategy.py"
        raise ConfigError(f"strategy.implementation={name}: {problem}; {remedy}")
    return made


def build_torch_strategy(
    config: Config, model: BuiltModel, world: World, common: dict[str, Any]
) -> Strategy:
    """Build DistributedDataParallel, with ZeroRedundancyOptimizer for zero1, or FSDP2."""
    make = _ddp if config.strategy.name in TORCH_DDP else _fsdp2
    return make(config, model, world, common)


def _common(config: Config, model: BuiltModel) -> dict[str, Any]:
    return {
        "param_groups": parameter_groups(model.module, config.optimizer, model.blocks),
        "optimizer_factory": optimizer_factory(config.optimizer),
        "max_grad_norm": config.optimizer.max_grad_norm,
        "values": model.values,
    }


def _sharded(config: Config, model: BuiltModel, world: World, common: dict[str, Any]) -> Strategy:
    return Sharded(
        model.module,
        blocks=model.blocks,
        stage=stage_of(config.strategy),
        dtypes=dtypes_of(config),
        options=options_of(config.strategy),
        scales_loss=row_dtypes(config)[0] == "float16",
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
        may_skip_parameters=MODELS[config.model.family].skips_modules,
        world=world,
        **common,
    )


def _fsdp2(config: Config, model: BuiltModel, world: World, common: dict[str, Any]) -> Strategy:
    # torch imports its sharding for half a second.
    from zeroexp.engines.torch_fsdp2 import TorchFSDP2

    return TorchFSDP2(
        model.module,
        blocks=model.blocks,
        unit=config.strategy.unit or "block",
        reshard_after_forward=config.strategy.name == "zero3",
        dtypes=dtypes_of(config),
        world=world,
        replicas=config.grid.num_groups,
        scales_loss=config.precision.compute == "float16",
        **common,
    )


def stage_of(strategy: StrategyConfig) -> Stage:
    """Return the stage that the config's three rows form."""
    return Stage.of(*(row.placement for row in strategy.rows))


def row_dtypes(config: Config) -> tuple[str, ...]:
    """Return the dtypes of the config's three rows; what rests as masters is computed with in the precision's."""
    compute, *others = (row.dtype for row in config.strategy.rows)
    return config.precision.compute if config.strategy.masters_rest else compute, *others


def dtypes_of(config: Config) -> Dtypes:
    return Dtypes(*(DTYPES[dtype] for dtype in row_dtypes(config)))


def options_of(strategy: StrategyConfig) -> Options:
    """Make Options of the config's fields; a None (no effect in this stage) keeps the default."""
    words = {field.name: getattr(strategy, field.name, None) for field in fields(Options)}
    words["layout"], words["outer"] = strategy.implementation, None
    if strategy.outer.every is not None:
        words["outer"] = OuterOptimizer(
            strategy.outer.every, strategy.outer.lr, strategy.outer.momentum
        )
    if strategy.codes:
        words["gather_codec"] = strategy.codes
    return Options(**{word: value for word, value in words.items() if value is not None})
