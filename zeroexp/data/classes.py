"""Decide which value of the label column is which class. Pure.

data.labels=[bad,fine,good]     the values in the order of the classes
null, numbers                   0 .. n-1 as they are; 1 .. n, with an n and without a 0, from 1
null, words                     in order (`_sorted`), if there are as many as classes
null, names from the hub        in the order of the data set
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from zeroexp.config.keys import ConfigError

MOST_SHOWN = 12


def classes_of(
    values: Collection[Any],
    num_labels: int,
    *,
    column: str,
    asked: list[Any] | None = None,
    names: list[str] | None = None,
) -> list[Any]:
    """Return the `num_labels` values of the column in the order of the classes. Raises ConfigError if it is unclear.

    values: all that occur in the column. asked: data.labels. names: what the data set calls its values 0, 1, ...
    """
    where = f"data.label_column={column}"
    if names and (other := [value for value in values if value not in range(len(names))]):
        raise ConfigError(
            f"{where}: holds {_list_values(other)}, which is no class; remove these rows, "
            "or use another split"
        )
    if asked is not None:
        return _as_asked(values, asked, names)
    if names is not None:
        if len(names) != num_labels:
            has = f"{where}: has {len(names)} classes ({_list_values(names)})"
            raise ConfigError(
                f"{has}; set model.num_labels={len(names)}, or choose some of them with data.labels"
            )
        return list(range(num_labels))
    if all(isinstance(value, int) for value in values):  # true and false are 1 and 0
        return _numbers({int(value) for value in values}, num_labels, where)
    if all(isinstance(value, str) for value in values):
        return _words({str(value) for value in values}, num_labels, where)
    kinds = ", ".join(sorted({type(value).__name__ for value in values}))
    raise ConfigError(f"{where}: holds {kinds}, no labels; use a column of whole numbers or words")


def _as_asked(values: Collection[Any], asked: list[Any], names: list[str] | None) -> list[Any]:
    written = {str(value): value for value in values}
    classes = [written.get(str(name), name) for name in asked]  # '1' means 1 in a column of numbers
    if names:
        classes = [names.index(name) if name in names else name for name in asked]
    if twice := [name for name in asked if [str(one) for one in asked].count(str(name)) > 1]:
        raise ConfigError(
            f"data.labels=[{_list_values(asked)}]: names {twice[0]} twice; name each value once"
        )
    if missing := [value for value in values if value not in classes]:
        more = [names[value] for value in missing] if names else missing
        raise ConfigError(
            f"data.labels=[{_list_values(asked)}]: the column also holds {_list_values(_sorted(more))}; "
            "name every value"
        )
    return classes


def _numbers(values: set[int], num_labels: int, where: str) -> list[int]:
    for first in (0, 1):
        classes = list(range(first, first + num_labels))
        if values <= set(classes):
            return classes
    raise ConfigError(
        f"{where}: labels {_list_values(sorted(values))} are not all in 0..{num_labels - 1} or 1..{num_labels}; "
        f"set model.num_labels, or name them in order: data.labels=[{_list_values(sorted(values))}]"
    )


def _words(values: set[str], num_labels: int, where: str) -> list[str]:
    words = _sorted(values)
    if len(words) != num_labels:
        raise ConfigError(
            f"{where}: holds {len(words)} words ({_list_values(words)}) for model.num_labels={num_labels}; "
            f"set model.num_labels={len(words)}, or name all classes in order with data.labels"
        )
    return words


def _sorted(values: Collection[Any]) -> list[Any]:
    """Sort words, and numbers that are written as words by what they count: 2 stands before 10."""
    return sorted(
        values, key=lambda word: (0, int(word)) if str(word).isdecimal() else (1, str(word))
    )


def _list_values(values: Collection[Any]) -> str:
    shown = [str(value) for value in values][:MOST_SHOWN]
    return ",".join(shown) + (",..." if len(values) > MOST_SHOWN else "")
