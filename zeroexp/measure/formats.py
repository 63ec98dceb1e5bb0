"""How files of a run are read back, and their version: `format` in summary.json, lines of records, timelines.

A name that is added does not change it, since readers leave out what they do not know. It grows when a name changes its
meaning or goes: then this version of zeroexp can not read the file, and says so. Older files have no format and are 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

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
    return _reader_of(schema)(content, name)


def _wrong(value: Any, name: str) -> TypeError:
    return TypeError(f"{name} is {value!r}")


@cache
def _reader_of(kind: Any) -> Callable[[Any, str], Any]:
    """Return what reads a value of this type, and takes its name for who has to look for it."""
    origin = get_origin(kind) or kind
    inner = [each for each in get_args(kind) if each is not NoneType]
    if origin in (Union, UnionType):
        reads = _reader_of(inner[0])
        return lambda value, name: None if value is None else reads(value, name)
    if is_dataclass(kind):
        return _reader_of_fields(kind)
    takes = (int, float) if origin in (int, float) else origin
    parts = _reader_of(inner[-1]) if inner else None

    def read(value: Any, name: str) -> Any:
        if not isinstance(value, takes):
            raise _wrong(value, name)
        if parts is None:
            return value
        if origin is dict:
            return {key: parts(each, f"{name}.{key}") for key, each in value.items()}
        return [parts(each, f"{name}.{at}") for at, each in enumerate(value)]

    return read


def _reader_of_fields(schema: Any) -> Callable[[Any, str], Any]:
    readers = {field: _reader_of(kind) for field, kind in get_type_hints(schema).items()}

    def read(content: Any, name: str) -> Any:
        if not isinstance(content, dict):
            raise _wrong(content, name)
        values = cast(dict[str, Any], content)
        known = {key: each for key, each in values.items() if key in readers}
        return schema(**{key: readers[key](each, f"{name}.{key}") for key, each in known.items()})

    return read
