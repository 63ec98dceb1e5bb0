"""Turn the keys of a model's shape into its dataclass of whole numbers, or refuse them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from zeroexp.config.keys import ConfigError
from zeroexp.registry.did_you_mean import suggest_nearest

Shape = TypeVar("Shape")


def whole_numbers(shape: type[Shape], given: dict[str, Any], key: str) -> Shape:
    """Make the dataclass `shape` of the keys below `key`. Raises ConfigError."""
    names = [field.name for field in fields(shape)]  # pyright: ignore[reportArgumentType]
    for word in given:
        if word not in names:
            raise ConfigError(f"{key}.{word}: no such key; {suggest_nearest(word, names)}")
    for word in names:
        if word not in given:
            raise ConfigError(f"{key}.{word} is missing: set it, for example {key}.{word}=64")
        if type(given[word]) is not int or given[word] < 1:
            raise ConfigError(f"{key}.{word}={given[word]}: no whole number above 0; use one")
    return shape(**given)
