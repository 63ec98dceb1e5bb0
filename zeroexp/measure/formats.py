"""How files of a run are read back, and their version: `format` in summary.json, lines of records, timelines, hashes.

A name that is added does not change it, since readers leave out what they do not know. It grows when a name changes its
meaning or goes: then this version of zeroexp can not read the file, and says so. Older files have no format and are 1.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

FORMAT = 1
KEY = "format"


class NewerFormat(ValueError):
    """A file of a later zeroexp."""


def refuse_newer_format(content: dict[str, Any], what: str) -> None:
    """Raise NewerFormat, with the remedy, for what a later version wrote."""
    number = content.get(KEY, FORMAT)
    if isinstance(number, int) and number > FORMAT:
        raise NewerFormat(
            f"{what} has format {number}, and this zeroexp reads {FORMAT}; use the version that wrote it"
        )


def from_json(schema: Any, content: dict[str, Any]) -> Any:
    """Return the dataclass that `asdict` turned into JSON, without names that this version does not know."""
    kinds = _kinds_of(schema)
    return schema(
        **{name: _read(kinds[name], value) for name, value in content.items() if name in kinds}
    )


def _read(kind: Any, value: Any) -> Any:
    """Return the value as its kind; None: it holds no dataclass, and stays as JSON has it."""
    if kind is None or value is None:
        return value
    if is_dataclass(kind):
        return from_json(kind, value)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is dict:
        return {key: _read(inner[1], each) for key, each in value.items()}
    if origin is list:
        return [_read(inner[0], each) for each in value]
    return _read(inner[0], value)  # a dataclass, or None


@cache
def _kinds_of(schema: Any) -> dict[str, Any]:
    """Return the type of each field that holds dataclasses, and None for other fields."""
    hints = get_type_hints(schema)
    return {name: kind if _holds_dataclass(kind) else None for name, kind in hints.items()}


def _holds_dataclass(kind: Any) -> bool:
    return is_dataclass(kind) or any(map(_holds_dataclass, get_args(kind)))
