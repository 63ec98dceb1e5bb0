"""How files of a run are read back, and their version: `format` in summary.json, lines of records, timelines.

A name that is added does not change it, since readers leave out what they do not know. It grows when a name changes its
meaning or goes: then this version of zeroexp can not read the file, and says so. Older files have no format and are 1.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

FORMAT = 1
KEY = "format"
Schema = TypeVar("Schema")


class NewerFormat(ValueError):
    """A file of a later zeroexp."""


def refuse_newer_format(content: dict[str, Any], what: str) -> None:
    """Raise NewerFormat, with the remedy, for what a later version wrote."""
    number = content.get(KEY, FORMAT)
    if isinstance(number, int) and number > FORMAT:
        raise NewerFormat(
            f"{what} has format {number}, and this zeroexp reads {FORMAT}; use the version that wrote it"
        )


def from_json(schema: type[Schema], content: Any, name: str) -> Schema:
    """Return the dataclass that `asdict` turned into JSON, without names that this version does not know.

    Raises TypeError naming the first value that is not of its field's type, which would fail far from where it was
    read. `name` is that of the whole.
    """
    return _read(schema, content, name)


def _read(kind: Any, value: Any, name: str) -> Any:
    origin, inner, fields = _structure(kind)
    if origin in (Union, UnionType):
        return None if value is None else _read(inner[0], value, name)
    takes = dict if fields else (int, float) if origin in (int, float) else origin
    if not isinstance(value, takes):
        raise TypeError(f"{name} is {value!r}")
    if fields:
        known = {key: each for key, each in value.items() if key in fields}
        return kind(**{k: _read(fields[k], each, f"{name}.{k}") for k, each in known.items()})
    if not inner:
        return value
    if origin is dict:
        return {key: _read(inner[-1], each, f"{name}.{key}") for key, each in value.items()}
    return [_read(inner[-1], each, f"{name}.{at}") for at, each in enumerate(value)]


@cache
def _structure(kind: Any) -> tuple[Any, list[Any], dict[str, Any]]:
    """Return a type without its parameters, these but for None, and the fields of a dataclass."""
    inner = [each for each in get_args(kind) if each is not NoneType]
    return get_origin(kind) or kind, inner, get_type_hints(kind) if is_dataclass(kind) else {}
