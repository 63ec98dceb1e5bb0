"""Activation checkpointing: a block keeps only its inputs and recomputes its activations in backward.

Selective, as torch has it: every k-th block alone recomputes (`train.recompute_every`), or recomputed blocks keep what
named operators returned, as of their products of matrices (`train.recompute_except=[aten.mm]`), or of every k-th
time that a block ran one, beginning with the first (`[aten.mm:2]`, as torchtitan does).
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._C import DispatchKey
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from zeroexp.config.keys import ConfigError, TrainConfig

# torch 2.14 asks whether what a checkpoint keeps passes the hooks on saved tensors around it; before, it did not.
BESIDE_HOOKS: dict[str, Any] = (
    {"respect_saved_tensors_hooks": False}
    if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
    else {}
)


def checkpoint_as_configured(module: nn.Module, blocks: Sequence[str], train: TrainConfig) -> None:
    """Make those of the blocks recompute that the config says. Raises ConfigError for an operator that torch lacks."""
    if train.activation_checkpointing:
        checkpoint_blocks(module, recomputed_blocks(blocks, train), kept=train.recompute_except)


def recomputed_blocks(blocks: Sequence[str], train: TrainConfig) -> Sequence[str]:
    every = train.recompute_every or 1
    return blocks[every - 1 :: every] if train.activation_checkpointing else ()


def checkpoint_blocks(module: nn.Module, blocks: Sequence[str], kept: Sequence[str] = ()) -> None:
    """Make each block, named as in `BuiltModel.blocks`, recompute its activations; this changes `module` in place.

    Only `forward` is wrapped, so hooks on the block run outside of the recomputation: a block is gathered once before
    backward, and not again by its own recomputation. kept: names of operators whose results are kept.
    """
    operators = operators_of(kept)
    for name in blocks:
        block = module.get_submodule(name)
        block.forward = _recomputed(block.forward, operators)


def operators_of(names: Sequence[str]) -> dict[Any, int]:
    """Return the operators that are named, as `aten.mm`, or one overload of it, as `aten.mm.default`, and which results
    of each are kept: every so-many-th.

    Raises ConfigError for what torch does not have, and for what it would keep nothing of, see `_can_be_kept`.
    """
    operators: dict[Any, int] = {}
    for word in names:
        key = f"train.recompute_except={word}"
        name, _, times = word.partition(":")
        if not (times or "1").isdecimal() or times == "0":
            raise ConfigError(
                f"{key}: every so-many-th result is kept; write a number, as aten.mm:2"
            )
        try:
            named: Any = functools.reduce(getattr, name.split("."), torch.ops)
        except (AttributeError, RuntimeError):
            named = None
        overloads = named.overloads() if hasattr(named, "overloads") else ()
        named = [getattr(named, each) for each in overloads] or [named]
        if not all(hasattr(each, "_schema") for each in named):
            raise ConfigError(f"{key}: torch has no such operator; name one as aten.mm")
        named = [each for each in named if _can_be_kept(each)]
        if not named:
            problem = "returns a view, writes in place or is made of others, so that nothing can be kept of it"
            raise ConfigError(f"{key}: {problem}; name one that computes, as aten.mm")
        operators |= dict.fromkeys(named, int(times or 1))
    return operators


def _can_be_kept(operator: Any) -> bool:
    """Tell whether the operator returns new tensors, and is seen where torch keeps them.

    A view may be of a weight, whose memory may be freed before backward. What is made of others (aten.linear) has been
    taken apart there.
    """
    schema = operator._schema
    if schema.is_mutable or any(result.alias_info for result in schema.returns):
        return False
    try:
        return not operator.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)
    except RuntimeError:  # TorchScript's own, of lists and numbers
        return False


def _recomputed(forward, operators: Mapping[Any, int]):
    options: dict[str, Any] = {}
    if operators:
        contexts = functools.partial(_selective_contexts, operators)
        options = {"context_fn": contexts, **BESIDE_HOOKS}
    run = functools.partial(checkpoint, use_reentrant=False, **options)

    @functools.wraps(forward)
    def recomputed(*args, **kwargs):
        return run(forward, *args, **kwargs)

    return recomputed


def _selective_contexts(operators: Mapping[Any, int]) -> Any:
    """Return torch's contexts of one forward and of its recomputation, which meet the same operators in one order."""
    met: Counter[tuple[bool, Any]] = Counter()

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        each = operators.get(operator)
        if each is None:
            return CheckpointPolicy.PREFER_RECOMPUTE
        before = met[context.is_recompute, operator]
        met[context.is_recompute, operator] += 1
        return CheckpointPolicy.PREFER_RECOMPUTE if before % each else CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)
