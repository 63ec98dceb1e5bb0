"""The closed form of a configured point: its model, on the device `meta`, is grouped and cut as engines do it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zeroexp.comm.traits import TRAITS
from zeroexp.config.engines import ENGINES
from zeroexp.config.job_shape import job_shape_of
from zeroexp.config.keys import Config, UndefinedCombination, resolve
from zeroexp.config.optimizer import OPTIMIZERS, master_of_kind, optimizers_of
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.config.vocabulary import vocab_size_of_data
from zeroexp.cut.layout import LAYOUTS
from zeroexp.cut.matrix_step import CutMatrix, cut_matrices
from zeroexp.cut.stage import Move, Placement
from zeroexp.engines.build import options_of, row_dtypes, stage_of
from zeroexp.models.module import BuiltModel, build_model
from zeroexp.plan.form_terms import ClosedForm, OptimizerForm, PrecisionForm
from zeroexp.plan.module_uses import Use, uses_in_forward
from zeroexp.plan.sent_bytes import EngineForm
from zeroexp.zero.grouping import Group, group_parameters, specs_of


def build_on_meta(config: Config, vocab_size: int | None = None) -> BuiltModel:
    """Return the point's model without memory; `vocab_size` is the data's, once it is read. Raises ConfigError."""
    words = vocab_size or vocab_size_of_data(config)
    return build_model(config.model, seed=0, device="meta", vocab_size=words)


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


def _sharded_form(config: Config, model: BuiltModel, transport: str, between: str) -> EngineForm:
    strategy, world_size = config.strategy, config.world_size
    of_optimizer = parameter_groups(model.module, config.optimizer, model.blocks)
    options = options_of(strategy).with_optimizer_over_of(of_optimizer)
    stage = options.stage_for(stage_of(strategy), world_size)
    sends = options.gather_codec or options.reduce_codec or options.secondary_partition
    sends = sends or options.masters_rest or options.pieces_on_host
    if sends and not TRAITS[transport].is_collective:
        transport = between = "gloo"
    if options.shares_updates and not TRAITS[between].is_collective:
        between = "gloo"
    groups = group_parameters(model.module, model.blocks, options.unit, of_optimizer)
    layout = options.lay_out([specs_of(group) for group in groups], world_size)
    form = EngineForm(
        *(layout, stage, options, transport, between),
        ranks_per_node=job_shape_of(config, "cpu").ranks_per_node,
        outer_share=_outer_share(config),
        **arguments_of_every_form(config),
    )
    gathers = _gathers(form, config, model, groups)
    return replace(form, matrices=_matrices(form, config, model), gathers=gathers)


def _matrices(form: EngineForm, config: Config, model: BuiltModel) -> list[list[CutMatrix]]:
    is_alone = form.group_size == 1 and not form.options.shares_updates
    if form.stage.optimizer is not Placement.SHARD or is_alone:
        return []
    by_kind, step = optimizers_of(config.optimizer), form.options.matrix_step
    whole = {kind for kind, own in by_kind.items() if OPTIMIZERS[own.name].whole_matrices}
    shapes = {name: tuple(p.shape) for name, p in model.module.named_parameters()}
    kinds = whole & {chunk.kind for unit in form.units for chunk in unit}
    return [b for kind in sorted(kinds) for b in cut_matrices(form.units, shapes, step, kind)]


def _gathers(
    form: EngineForm, config: Config, model: BuiltModel, groups: Sequence[Group]
) -> list[int] | None:
    """Return how often a microbatch gathers each unit: for forward, backward, and inside of blocks that recompute."""
    if form.stage.gather is not Move.ALL_GATHER:
        return None
    uses: dict[str, list[Use]] = {group.name: [] for group in groups}
    for use in uses_in_forward(config, model, groups):
        if use.name in uses:
            uses[use.name].append(use)
    kept = (form.is_kept(number) for number in range(len(uses)))
    return [num_gathers(each, kept=its) for each, its in zip(uses.values(), kept, strict=True)]


def num_gathers(uses: Sequence[Use], *, kept: bool) -> int:
    """Return how often a unit is gathered for these uses.

    kept: where autograd records a use it stays until the backward of its last; for that of an earlier one it is
    gathered anew, once.
    """
    num, is_there = 0, False
    for use in uses:
        num += not is_there
        is_there = kept and use.has_graph
    for times in filter(None, (use.in_backward for use in reversed(uses))):
        num += 0 if is_there else min(times, 1) if kept else times
        is_there = False
    return num


def arguments_of_every_form(config: Config) -> dict[str, Any]:
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
