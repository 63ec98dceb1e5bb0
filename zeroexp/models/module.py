"""Build a module from a ModelConfig, with the names of its blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import takewhile

import torch
from torch import nn

from zeroexp.config.families import MODELS, vocab_size_of_shape
from zeroexp.config.keys import ConfigError, ModelConfig
from zeroexp.interface.values import Values, fill_in
from zeroexp.models.blocks import chosen_blocks, find_blocks
from zeroexp.models.deferred import CannotDefer, defer
from zeroexp.models.lora import add_adapters

MANY_WORDS = 1 << 20  # more than any token's id, for a model on meta whose vocabulary nobody knows


@dataclass(frozen=True)
class BuiltModel:
    module: nn.Module
    blocks: list[str]  # dotted names of the repeated blocks, in forward order
    values: Values | None = None  # what the parameters are to hold, where they are on meta


def build_model(
    config: ModelConfig,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    vocab_size: int | None = None,
) -> BuiltModel:
    """Build the model with parameters of `dtype` on `device` ("meta": shapes only).

    Parameters are drawn on the CPU in float32 and then cast, so that they are the same on every rank, device and, up to
    rounding, dtype. `vocab_size` is the data's vocabulary, which must fit into the model's. Raises ConfigError.
    """
    device = torch.device(device)
    vocab_size = fitting_vocab_size(config, vocab_size)
    if device.type == "meta":
        with device:
            model = _build(config, vocab_size)
            add_adapters(model.module, config, seed)
    elif config.weights is not None:
        model = build_deferred(config, seed=seed, vocab_size=vocab_size)
        if model.values is not None:
            fill_in(model.module, model.values)
    else:
        model = _build_whole(config, seed, vocab_size)
        add_adapters(model.module, config, seed)
    freeze(model.module, config.freeze)
    for parameter in model.module.parameters():
        # Buffers keep their dtype: rotary frequencies in bfloat16 would shift every position.
        parameter.data = parameter.data.to(dtype)
    return BuiltModel(model.module.to(device), model.blocks)


def build_deferred(config: ModelConfig, *, seed: int, vocab_size: int | None = None) -> BuiltModel:
    """Build the model with parameters on meta, and the values that they are to hold; see deferred.py.

    The values are those of `build_model`, bit for bit. A model whose constructor reads values of its own parameters is
    built whole, and `values` is None. Raises ConfigError.
    """
    vocab_size = fitting_vocab_size(config, vocab_size)
    try:
        model, drawn = defer(lambda: _build(config, vocab_size), seed, lambda made: made.module)
    except CannotDefer as error:
        print(f"model.name={config.name} is built whole before it is cut: {error}")
        model, drawn = _build_whole(config, seed, vocab_size), None
    values: Values | None = drawn
    if config.weights is not None:
        from zeroexp.models import huggingface

        values = huggingface.stored(config, model.module, drawn)
        if drawn is None:
            fill_in(model.module, values)
            values = None
    values = add_adapters(model.module, config, seed, values)
    freeze(model.module, config.freeze)
    return BuiltModel(model.module, model.blocks, values)


def build_empty(config: ModelConfig, shapes: Mapping[str, Sequence[int]]) -> BuiltModel:
    """Build the model on meta; if the config sets no vocabulary size, the first tensor with a row a word does."""
    config = replace(config, weights=None)
    if vocab_size_of_shape(config) is not None:
        return build_model(config, seed=0, device="meta")
    built = build_model(config, seed=0, device="meta", vocab_size=MANY_WORDS)
    for name, parameter in built.module.named_parameters():
        if parameter.shape[:1] == (MANY_WORDS,) and name in shapes:
            return build_model(config, seed=0, device="meta", vocab_size=shapes[name][0])
    return built


def _build_whole(config: ModelConfig, seed: int, vocab_size: int | None) -> BuiltModel:
    """Build the model with its values, without disturbing the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _build(config, vocab_size)


def materialize(module: nn.Module, device: torch.device | str) -> None:
    """Replace every parameter and buffer of a module built on meta by an empty one on `device`; tied ones stay one.

    Under FakeTensorMode the new ones take no memory. (torch's to_empty would untie tied parameters.)
    """
    made: dict[torch.Tensor, torch.Tensor] = {}
    for each in module.modules():
        parameters = each.named_parameters(recurse=False, remove_duplicate=False)
        buffers = each.named_buffers(recurse=False, remove_duplicate=False)
        for key, old in [*parameters, *buffers]:
            if old not in made:
                new = torch.empty(old.shape, dtype=old.dtype, device=device)
                is_parameter = isinstance(old, nn.Parameter)
                made[old] = nn.Parameter(new, old.requires_grad) if is_parameter else new
            setattr(each, key, made[old])


def patched_for_fake_tensors(config: ModelConfig) -> AbstractContextManager[None]:
    """Let a model of this config run on fake tensors the operations that it runs on real ones."""
    if not MODELS[config.family].of_transformers:
        return nullcontext()
    from zeroexp.models import huggingface

    return huggingface.patched_for_fake_tensors()


def _build(config: ModelConfig, vocab_size: int | None) -> BuiltModel:
    family = MODELS[config.family]
    module, named = family.build(config, vocab_size), family.blocks
    chosen = config.blocks if named is None else [named]
    blocks = find_blocks(module) if chosen is None else chosen_blocks(module, chosen)
    return BuiltModel(module, blocks)


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze every parameter with a name that matches one of `model.freeze`, where * stands for any letters and dots.

    Raises ConfigError for a pattern that matches nothing, and if nothing is left to train.
    """
    named = dict(module.named_parameters(remove_duplicate=False))  # a tied parameter has two names
    for pattern in patterns:
        matched = [name for name in named if fnmatchcase(name, pattern)]
        if not matched:
            first = next(iter(named))
            remedy = f"use names as {first}, with * for any part"
            raise ConfigError(f"model.freeze={pattern}: no parameter has such a name; {remedy}")
        for name in matched:
            named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        remedy = "leave one parameter out"
        raise ConfigError(f"model.freeze={','.join(patterns)}: nothing is left to train; {remedy}")


def without_backward(module: nn.Module) -> set[str]:
    """Return the names that the model lists before its first trainable parameter: of modules that have no backward."""
    listed = module.named_parameters()
    return {name for name, _ in takewhile(lambda each: not each[1].requires_grad, listed)}


def longest_sequence(model: BuiltModel) -> int | None:
    """Return the most positions that the model's own config names; None where it names none, as Mamba's.

    RoBERTa and its relatives count them from the row of padding in their table, and leave the rows before it unused.
    """
    longest = getattr(getattr(model.module, "config", None), "max_position_embeddings", None)
    for name, module in model.module.named_modules():
        padding = getattr(module, "padding_idx", None)
        if longest and padding is not None and name.endswith("position_embeddings"):
            return longest - padding - 1
    return longest


def fitting_vocab_size(config: ModelConfig, data_words: int | None) -> int | None:
    """Return the model's vocabulary size. Raises ConfigError if the data's token ids exceed it."""
    words = vocab_size_of_shape(config)
    if words is None or data_words is None:
        return words or data_words
    if data_words > words:
        key = f"model.{MODELS[config.family].shape}.vocab_size"
        raise ConfigError(
            f"{key}={words}: the data have tokens up to {data_words - 1}; "
            f"set it to {data_words} or more, or choose other data"
        )
    return words
