"""Find a model's errors before a rank starts: build it without memory and read the headers of its weights.

Ranks check weights too, because the weights of a Slurm run may be visible only on its nodes.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from zeroexp.config.families import MODELS
from zeroexp.config.keys import Config, ConfigError, ModelConfig
from zeroexp.config.vocabulary import vocab_size_of_data
from zeroexp.interface.overlapping_memory import refuse_overlaps
from zeroexp.models.blocks import module_list_names
from zeroexp.models.checkpointing import operators_of
from zeroexp.models.expert_kernels import check_experts
from zeroexp.models.loss import values_for_each
from zeroexp.models.module import BuiltModel, build_model, longest_sequence
from zeroexp.zero.options import DTYPES

# Libraries raise these when they cannot build a model from a number; the message goes behind our key.
RAISED = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError)
RAISED = (*RAISED, TypeError, ValueError)


class Limits(NamedTuple):
    """What a model allows the other keys of a config."""

    num_blocks: int
    num_positions: int | None  # of the longest sequence; None where its config names none


# Checked models are remembered, since a sweep has many points and few models.
_limits_of: dict[str, Limits] = {}


def check_model(config: Config) -> None:
    """Raise ConfigError if the model cannot be built, or if local weights do not belong to it.

    For ranks of this machine, weights on the hub are downloaded here, once.
    """
    operators_of(config.train.recompute_except)
    is_ours = config.model.family in MODELS.own
    length = None if is_ours or config.model.task != "causal" else config.data.seq_len
    checked = (config.model, vocab_size_of_data(config), config.precision.compute, length)
    if (key := repr(checked)) not in _limits_of:
        _limits_of[key] = _check(*checked, config.cluster.kind)
    num_blocks, num_positions = _limits_of[key]
    if (every := config.train.recompute_every or 1) > num_blocks:
        problem = f"none of its {num_blocks} blocks would be recomputed"
        raise ConfigError(f"train.recompute_every={every}: {problem}; use at most {num_blocks}")
    if num_positions is not None and config.data.seq_len > num_positions:
        problem = f"model={config.model.name} has {num_positions} positions"
        remedy = f"use at most {num_positions}, or give the model more in its config"
        raise ConfigError(f"data.seq_len={config.data.seq_len}: {problem}; {remedy}")


def _check(
    model: ModelConfig, vocabulary: int | None, dtype: str, length: int | None, cluster: str
) -> Limits:
    """Return what the model allows. length: of sequences that code of others is tried with. Raises ConfigError."""
    built = _build(model, vocabulary)
    check_experts(built.module, DTYPES[dtype])
    try:
        refuse_overlaps(built.module)
    except ValueError as error:
        raise ConfigError(f"model.name={model.name}: {error}") from None
    if length is not None:
        _try_output(built.module, length)
    _look_at_weights(model, cluster)
    return Limits(len(built.blocks), longest_sequence(built))


def _build(model: ModelConfig, vocabulary: int | None) -> BuiltModel:
    key = f"model.{MODELS[model.family].shape}"
    named = f"{key} of model.name={model.name}"
    try:
        built = build_model(model, seed=0, device="meta", vocab_size=vocabulary)
    except ConfigError:
        raise
    except RAISED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{named}: no model can be built of it ({reason}); change it") from error
    if not built.blocks:
        lists = module_list_names(built.module) if model.family == "hf" else []
        remedy = (
            f"name some: model.blocks=[{','.join(lists)}]" if lists else "use one layer or more"
        )
        raise ConfigError(f"{named}: the model has no block; {remedy}")
    return built


def _try_output(module: nn.Module, length: int) -> None:
    """Raise ConfigError for code of others whose output has no loss for each token, by a forward on meta.

    What else it raises there may come of tensors without values, so that ranks alone tell of it.
    """
    tokens = torch.zeros(1, length, dtype=torch.int64, device="meta")
    try:
        with torch.device("meta"), torch.no_grad():
            output = module(input_ids=tokens)
    except Exception:
        return
    values_for_each(tokens, output, "causal")


def _look_at_weights(model: ModelConfig, cluster: str) -> None:
    if model.weights is None:
        return
    # The libraries of the hub and of transformers take seconds to import, and most models read no weights.
    from zeroexp.models import find_weights, huggingface

    folder = Path(model.weights).expanduser()
    if not folder.is_dir():
        if cluster != "local":
            return
        folder = find_weights.model_folder(model.weights)
    huggingface.require_fitting_weights(model, folder)
