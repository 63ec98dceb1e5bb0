"""Freeze parameters by patterns of their names: `model.freeze=["model.embed_tokens.*"]`."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from zeroexp.config.keys import ConfigError


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze every parameter with a name that matches one of `patterns`, where * stands for any letters and dots.

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
