"""The closed form of a configured point: its model, on the device `meta`, is grouped and cut as engines do it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from zeroexp.comm.traits import ALL, TRAITS
from zeroexp.config.engines import ENGINES
from zeroexp.config.keys import Config, UndefinedCombination, resolve
from zeroexp.config.optimizer import OPTIMIZERS, master_of_kind, optimizers_of, parameter_groups
from zeroexp.config.vocabulary import vocabulary_of_data
from zeroexp.cut.chunk import Chunk
from zeroexp.cut.layout import LAYOUTS
from zeroexp.cut.matrix_step import CutMatrix, cut_matrices
from zeroexp.cut.stage import Move, Placement, Stage
from zeroexp.engines.build import options_of, row_dtypes, stage_of
from zeroexp.models.module import BuiltModel
from zeroexp.models.outline import outline_of
from zeroexp.plan.closed_forms import ClosedForm, ShardedForm
from zeroexp.plan.form_terms import OptimizerForm, PrecisionForm
from zeroexp.zero.grouping import group_parameters, specs_of, stage_for_world
from zeroexp.zero.options import Options


def build_on_meta(config: Config, vocab_size: int | None = None) -> BuiltModel:
    """Return the point's model without memory; `vocab_size` is the data's, once it is read. Raises ConfigError."""
    words = vocab_size or vocabulary_of_data(config)
    return outline_of(config.model, words)


def form_of(
    config: Config, model: BuiltModel, transport: str, between: str | None = None
) -> ClosedForm:
    """Return the form of a point over a transport of our engine; `model` may be on the device `meta`.

    between: the transport between replicas; None: the same. Raises UndefinedCombination for an engine that brings no
    form.
    """
    config = resolve(config)
    name = config.strategy.implementation
    if name in LAYOUTS:
        return _sharded_form(config, model, transport, between or transport)
    form = ENGINES[name].form
    if form is None:
        problem = "this engine brings no closed form, so that it can not be planned"
        raise UndefinedCombination(f"strategy.implementation={name}: {problem}; run it instead")
    return form(config, model)


def _sharded_form(config: Config, model: BuiltModel, transport: str, between: str) -> ShardedForm:
    strategy, world_size = config.strategy, config.world_size
    of_optimizer = parameter_groups(model.module, config.optimizer, model.blocks)
    options = options_of(strategy).with_ranks_of(of_optimizer)
    group_size = world_size // options.replicas
    stage = stage_for_world(stage_of(strategy), group_size, options.offload)
    sends = (
        options.gather_codec,
        options.reduce_codec,
        options.secondary_partition,
        options.masters_rest,
    )
    if (any(sends) or options.offload == ALL) and not TRAITS[transport].is_collective:
        transport = between = "gloo"
    if options.shares_updates and not TRAITS[between].is_collective:
        between = "gloo"
    groups = group_parameters(model.module, model.blocks, options.unit, of_optimizer)
    layout = options.lay_out([specs_of(group) for group in groups], world_size)
    by_kind = optimizers_of(config.optimizer)
    whole = {kind for kind, own in by_kind.items() if OPTIMIZERS[own.name].whole_matrices}
    form = ShardedForm(
        *(layout, stage, options, transport, between),
        matrices=_matrices(layout, model, options, stage, world_size, whole),
        outer_share=_outer_share(config),
        **of_any_engine(config),
    )
    if stage.gather is not Move.ALL_GATHER:
        return form
    recomputes = config.train.activation_checkpointing and options.unit == "module"
    return replace(form, gathers=_gathers(form, model, recomputes=recomputes))


def _matrices(
    layout: Sequence[Sequence[Chunk]],
    model: BuiltModel,
    options: Options,
    stage: Stage,
    world_size: int,
    whole: Collection[str],
) -> list[list[CutMatrix]]:
    is_alone = options.replicas == world_size and not options.shares_updates
    if stage.optimizer is not Placement.SHARD or is_alone:
        return []
    shapes = {name: tuple(p.shape) for name, p in model.module.named_parameters()}
    kinds = {chunk.kind for unit in layout for chunk in unit if chunk.kind in whole}
    return [b for k in sorted(kinds) for b in cut_matrices(layout, shapes, options.matrix_step, k)]


def _gathers(form: ShardedForm, model: BuiltModel, *, recomputes: bool) -> list[int]:
    """Return how often a microbatch gathers each unit: for forward, backward, and inside of blocks that recompute.

    What the model lists before its first trainable parameter has no backward, and is not recomputed.
    """
    named = dict(model.module.named_parameters())
    order = {name: place for place, name in enumerate(named)}
    first = next((order[name] for name, p in named.items() if p.requires_grad), len(order))
    gathers: list[int] = []
    for index, unit in enumerate(form.units):
        names = [member.name for chunk in unit for member in chunk.members]
        has_backward = index == 0 or any(order[name] >= first for name in names)
        in_block = any(name.startswith(f"{block}.") for name in names for block in model.blocks)
        again = 0 if form.is_kept(index) or not has_backward else 1 + (recomputes and in_block)
        gathers.append(1 + again)
    return gathers


def of_any_engine(config: Config) -> dict[str, Any]:
    """Return what the form of every engine is told of its ranks, precision and optimizer."""
    data = config.data
    return {
        "world_size": config.world_size,
        "accumulation": data.global_batch_size // (data.micro_batch_size * config.world_size),
        "precision": PrecisionForm(*row_dtypes(config)),
        "optimizer": _optimizer(config),
    }


def _outer_share(config: Config) -> tuple[int, int]:
    """Return how many of the measured steps end with an outer one, and their number."""
    every, warmup = config.strategy.outer.every or 1, config.train.warmup_steps
    return (warmup + config.train.steps) // every - warmup // every, config.train.steps


def _optimizer(config: Config) -> OptimizerForm:
    by_kind = {
        kind: OptimizerForm(
            OPTIMIZERS[own.name].num_moments(own),
            OPTIMIZERS[own.name].bytes_per_tensor,
            own.moments,
            master_of_kind(config.optimizer, kind),
        )
        for kind, own in optimizers_of(config.optimizer).items()
    }
    return replace(by_kind.pop(""), of_kinds=tuple(by_kind.items()))
