"""Tells whether values that a file was read into have the types that their dataclass declares. Pure.

Python takes whatever it is given, so that a torn or hand-written file would fail far from where it was read.
"""

from __future__ import annotations

import types
from dataclasses import is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

NUMBER = (int, float)


def refuse_wrong_types(content: Any, name: str) -> None:
    """Raise TypeError naming the first field of a dataclass, or of what it holds, that has not its declared type."""
    for field, declared in _hints(type(content)).items():
        _check(getattr(content, field), declared, f"{name}.{field}")


# A report of hundreds of runs checks a hundred thousand values, of a few types.
_hints = cache(get_type_hints)


@cache
def _parts(declared: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(declared), get_args(declared)


def _check(value: Any, declared: Any, name: str) -> None:
    origin, parts = _parts(declared)
    if origin in (Union, types.UnionType):
        if value is not None:
            _check(value, next(part for part in parts if part is not types.NoneType), name)
        elif types.NoneType not in parts:
            raise TypeError(f"{name} is {value!r}")
    elif origin in (list, dict):
        if not isinstance(value, origin):
            raise TypeError(f"{name} is {value!r}")
        held = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in held:
            _check(each, parts[-1], f"{name}.{key}")
    elif not isinstance(value, NUMBER if declared in NUMBER else declared):
        raise TypeError(f"{name} is {value!r}")
    elif is_dataclass(value):
        refuse_wrong_types(value, name)
