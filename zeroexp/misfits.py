"""What a registered dataclass may hold: its annotations say it, and a wrong field is one line when it is registered.

Without this a forgotten comma in `tasks=("causal")` or a function that takes one argument too few would be found by a
rank, or by the report of a run that is over. This file imports nothing of ours.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, cast

PLAIN = (type(None), bool, int, float, str)


def misfit(value: Any, arguments: Mapping[str, int]) -> str | None:
    """Return what is wrong with a field of a dataclass and how to write it, or None.

    arguments: how many each function is called with.
    """
    for field in fields(value):
        given, kind = getattr(value, field.name), str(field.type)
        if given is None and kind.endswith("| None"):
            continue
        problem = _wrong(given, kind, arguments.get(field.name))
        if problem is None and given == () != field.default:
            problem = "empty; name one or more"
        if problem:
            return f"{field.name}={_shown(given)}: {problem}"
    return None


def wrong_call(function: Callable[..., Any], num_arguments: int) -> str | None:
    """Return why a function can not be called with so many arguments; None if it can, or if it does not tell."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function in C may have none
        return None
    try:
        signature.bind(*[None] * num_arguments)
    except TypeError as error:
        return f"can not be called with {num_arguments} arguments ({error}); docs/extending.md says which"
    return None


def _wrong(given: Any, kind: str, num_arguments: int | None) -> str | None:
    if kind.startswith("Callable"):
        if not callable(given):
            return "no function; give one"
        return None if num_arguments is None else wrong_call(given, num_arguments)
    if kind.startswith("tuple[str"):
        is_words = isinstance(given, tuple | list) and all(isinstance(one, str) for one in given)
        return None if is_words else "no tuple of words; write ('one',), with a comma"
    if kind.startswith("Mapping[str, Any]"):
        return None if is_plain(given, dict) else "no dict of plain values; use what YAML can hold"
    for name, expected in (("bool", bool), ("int", int), ("str", str)):
        if kind.removesuffix(" | None") == name and not isinstance(given, expected):
            return f"no {name}; give one"
    return None


def is_plain(value: object, kind: type = object) -> bool:
    """Tell whether a value of this kind consists of what a run's config.yaml can hold and give back."""
    if not isinstance(value, kind):
        return False
    if isinstance(value, Mapping):
        held = cast(Mapping[Any, Any], value)
        return all(isinstance(key, str) and is_plain(each) for key, each in held.items())
    if isinstance(value, list | tuple):
        return all(is_plain(each) for each in cast(list[Any], value))
    return type(value) in PLAIN and not (isinstance(value, float) and math.isnan(value))


def _shown(value: object) -> str:
    named = getattr(value, "__name__", None)
    return f"{named}()" if named and callable(value) else repr(value)[:80]
