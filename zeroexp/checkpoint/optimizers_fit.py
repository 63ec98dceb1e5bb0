"""Whether the optimizers of a run go on from a checkpoint's moments: decided for each weight, on the model's shapes."""

from __future__ import annotations

from dataclasses import replace

from zeroexp.checkpoint.manifest import Manifest
from zeroexp.config.keys import (
    Config,
    ConfigError,
    OptimizerConfig,
    UndefinedCombination,
    from_mapping,
)
from zeroexp.config.optimizer import OPTIMIZERS, optimizer_factory, optimizers_of, row_of_kind
from zeroexp.config.parameter_groups import parameter_groups
from zeroexp.config.vocabulary import vocab_size_of_data
from zeroexp.interface.check_state import Kept, unkept_moments
from zeroexp.interface.optimizer_trial import moments_kept
from zeroexp.interface.saved_state import names_in
from zeroexp.models.module import build_model

# Of each weight: the row of `optimizer.kinds` it belongs to, what steps it, and which moments that keeps.
Stepped = dict[str, tuple[str, OptimizerConfig, Kept]]


def require_same_optimizers(config: Config, manifest: Manifest) -> None:
    """Raise UndefinedCombination for a weight that had another optimizer, or moments that its own does not keep."""
    saved, here = manifest.config, _stepped(config)
    blocks = saved["model"].get("blocks")
    try:
        optimizer = from_mapping(OptimizerConfig, saved["optimizer"])
        model = replace(config.model, blocks=blocks)
        there = _stepped(replace(config, model=model, optimizer=optimizer))
    except ConfigError as error:
        raise UndefinedCombination(f"its optimizer is none of this run: {error}") from error
    for weight, (row, own, kept) in here.items():
        theirs = there[weight][1]
        is_same = own.name == theirs.name
        problem = unkept_moments(manifest.state.get(weight, {}), kept) if is_same else None
        if is_same and not problem:
            continue
        read = ("name", *OPTIMIZERS[own.name].keys, "settings")
        key = next((key for key in read if getattr(own, key) != getattr(theirs, key)), "name")
        where = f"optimizer.kinds.{row}.{key}" if row else f"optimizer.{key}"
        values = f"{getattr(theirs, key)} in it, {getattr(own, key)} here"
        why = f": the state {problem}" if problem else ""
        remedy = "use the same, or another checkpoint"
        raise UndefinedCombination(f"{where} of {weight} is {values}{why}; {remedy}")


def _stepped(config: Config) -> Stepped:
    vocabulary = vocab_size_of_data(config)
    built = build_model(config.model, seed=0, device="meta", vocab_size=vocabulary)
    groups = parameter_groups(built.module, config.optimizer, built.blocks)
    by_kind = optimizers_of(config.optimizer)
    kept = moments_kept(optimizer_factory(config.optimizer), groups)()
    kept = kept or [Kept(set(), set())] * len(groups)  # nothing is known of what can not step
    return {
        name: (row_of_kind(kind), by_kind[kind], keeps)
        for group, names, keeps in zip(groups, names_in(built.module, groups), kept, strict=True)
        for kind in [group.get("kind", "")]
        for name in names
    }
