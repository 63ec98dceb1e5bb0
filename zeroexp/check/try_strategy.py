"""Try layouts, owners rules and optimizers of others before a rank starts, on the model's shapes alone."""

from __future__ import annotations

from zeroexp.config.keys import TORCH_DDP, Config, ConfigError, UndefinedCombination, resolve
from zeroexp.config.optimizer import OPTIMIZERS, layouts_of, optimizer_factory, rows_of
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.config.vocabulary import vocab_size_of_data
from zeroexp.cut.chunk import FROZEN
from zeroexp.cut.layout import LAYOUTS
from zeroexp.cut.owners import OWNERS
from zeroexp.engines.build import options_of
from zeroexp.interface.optimizer_trial import (
    refuse_states_of_matrices,
    refuse_unless_elementwise,
    try_out,
)
from zeroexp.models.module import BuiltModel, build_model
from zeroexp.zero.grouping import group_parameters, specs_of


def refused_strategy(config: Config) -> str | None:
    """Return why a sweep skips the point, or None. Raises ConfigError for code of others that is wrong by itself."""
    try:
        check_custom_layout_and_optimizer(config)
    except UndefinedCombination as error:
        return str(error)
    return None


def check_custom_layout_and_optimizer(config: Config) -> None:
    """Raise ConfigError for code of others that returns the wrong thing.

    Raises UndefinedCombination, which skips the point, for an optimizer that is wrong on what ranks would hold.
    """
    config = resolve(config)
    strategy = config.strategy
    cuts = strategy.implementation in LAYOUTS and (
        strategy.implementation not in LAYOUTS.own
        or (strategy.owners is not None and strategy.owners not in OWNERS.own)
        or strategy.offload_fraction is not None
    )
    chosen = OPTIMIZERS[config.optimizer.name]
    has_settings = config.optimizer.settings != dict(chosen.settings) or config.optimizer.kinds
    steps = has_settings or config.optimizer.name not in OPTIMIZERS.own
    if not (cuts or steps):
        return
    model = build_model(config.model, seed=0, device="meta", vocab_size=vocab_size_of_data(config))
    if cuts:
        _try_layout(config, model)
    if steps:
        _try_optimizer(config, model)


def _try_layout(config: Config, model: BuiltModel) -> None:
    groups = parameter_groups(model.module, config.optimizer, model.blocks)
    options = options_of(config.strategy).with_optimizer_over_of(groups)
    units = [
        specs_of(group)
        for group in group_parameters(model.module, model.blocks, options.unit, groups)
    ]
    try:
        layout = options.lay_out(units, config.world_size)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    moved = [chunk.on_host for chunks in layout for chunk in chunks if chunk.kind != FROZEN]
    if options.offload_fraction < 1 and all(moved):
        raise UndefinedCombination(
            f"strategy.offload_fraction={options.offload_fraction}: each of {len(moved)} chunks would be there, and "
            "none is cut; use strategy.unit=block or strategy.implementation=tensor, or leave it out"
        )


def _try_optimizer(config: Config, model: BuiltModel) -> None:
    strategy, name = config.strategy, config.strategy.implementation
    groups = parameter_groups(model.module, config.optimizer, model.blocks)
    factory = optimizer_factory(config.optimizer)
    key = f"optimizer.name={config.optimizer.name}"
    for own in rows_of(config.optimizer).values():
        num_moments = OPTIMIZERS[own.name].num_moments(own)
        if type(num_moments) is not int or num_moments < 0:
            problem, remedy = f"num_moments returns {num_moments!r:.40}", "return how many it keeps"
            raise ConfigError(f"optimizer.name={own.name}: {problem}; {remedy}")
    try:
        try_out(factory, groups, is_saved=config.checkpoint.every is not None)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    shards = strategy.optimizer.placement == "shard" and config.world_size > 1
    if not shards or not (name in LAYOUTS or name == "torch"):
        return
    cuts = name in LAYOUTS and not all(layout.has_owners for layout in layouts_of(config))
    try:
        if name == "torch" and strategy.name not in TORCH_DDP:
            refuse_states_of_matrices(factory, groups)
        else:
            refuse_unless_elementwise(factory, groups, layout=name, cut=cuts)
    except ValueError as error:
        raise UndefinedCombination(f"{key}: {error}") from error
