"""Which columns of a table the task reads, and what they must hold. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from zeroexp.config.keys import ConfigError, DataConfig

MESSAGES, PROMPT, COMPLETION = "messages", "prompt", "completion"  # as in TRL (conversations.py)
TEXT, LABEL = "text", "label"  # names of the columns where the config names none
INTEGER = re.compile("[+-]?0|[+-]?[1-9][0-9]{0,17}")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")

Table = Any  # a Dataset of datasets, which table_rows.py alone imports


def columns_of(config: DataConfig, names: Sequence[str] = ()) -> dict[str, tuple[str, str]]:
    """Return, for each column that the task reads, the key that names it and its name.

    names: of the columns that there are. A language model reads conversations where there is no text.
    """
    if config.task == "causal" and config.text_column is None and TEXT not in names:
        for of_turns in ((MESSAGES,), (PROMPT, COMPLETION)):
            if set(of_turns) <= set(names):
                return {name: ("data.text_column", name) for name in of_turns}
    columns = {TEXT: ("data.text_column", config.text_column or TEXT)}
    if config.task == "classification":
        columns[LABEL] = ("data.label_column", config.label_column or LABEL)
    return columns


def read_columns(config: DataConfig, names: Sequence[str]) -> list[str]:
    return [*dict.fromkeys(name for _, name in columns_of(config, names).values())]


def holds_texts(table: Table, column: str) -> bool:
    return str(getattr(table.features[column], "dtype", "")) in ("string", "large_string")


def require_names(names: list[str], config: DataConfig) -> None:
    """Require one column of each name that the task reads. Raises ConfigError."""
    columns = ", ".join(names)[:200]
    for key, name in columns_of(config, names).values():
        if name not in names and len(names) == 1 and (separators := set(";\t|") & set(names[0])):
            problem = f"its columns are separated by {separators.pop()!r}, no comma"
            raise ConfigError(f"data.path={config.path}: {problem}; convert it")
        if name not in names:
            raise ConfigError(
                f"{key}={name}: no such column in {config.path}; use one of {columns}"
            )
        if names.count(name) > 1:
            problem = f"several columns of {config.path} have this name"
            raise ConfigError(f"{key}={name}: {problem}; rename all but one")


def require_values(table: Table, config: DataConfig, names: list[str]) -> None:
    """Require that the named columns exist, that text is text, and that no row lacks a value."""
    require_names(table.column_names, config)
    columns = columns_of(config, table.column_names)
    for key, name in columns.values():
        if num_empty := table.data.column(name).null_count:
            problem = f"{num_empty} of {len(table)} rows in {config.path} have no value there"
            raise ConfigError(f"{key}={name}: {problem}; remove these rows, or use another column")
    if LABEL in columns:
        key, name = columns[LABEL]
        kind = type(table.features[name]).__name__
        if kind not in ("Value", "ClassLabel"):
            raise ConfigError(f"{key}={name}: holds {kind}, no labels; use another column")
    if TEXT not in columns:
        return
    key, name = columns[TEXT]
    if not holds_texts(table, name) and not _holds_messages(table, name, config):
        kind = getattr(table.features[name], "dtype", type(table.features[name]).__name__)
        if kind.startswith("timestamp"):  # how JSON is read where each text is one
            kind = "dates alone"
        raise ConfigError(
            f"{key}={name}: holds {kind}, no text; {_other_texts(table, name, names)}"
        )


def require_words(table: Table, config: DataConfig, names: list[str]) -> None:
    """Refuse texts of a CSV file, which has no types, of which every one is a number: stars, and no review of them.

    A completion may be the number that answers its prompt.
    """
    key, name = columns_of(config, table.column_names).get(TEXT, ("", ""))
    if name and all(NUMBER.fullmatch(text.strip()) for text in table[name]):
        raise ConfigError(
            f"{key}={name}: holds numbers, no text; {_other_texts(table, name, names)}"
        )


def typed_labels(written: list[str]) -> list[Any]:
    """Return labels of a CSV file as numbers or truths where each one is written as one: 01 is a word."""
    labels = [label.strip() for label in written]
    if all(label.lower() in ("true", "false") for label in labels):
        return [label.lower() == "true" for label in labels]
    if all(map(INTEGER.fullmatch, labels)):
        return [int(label) for label in labels]
    if all(map(NUMBER.fullmatch, labels)) and any({*".eE"} & {*label} for label in labels):
        return [float(label) for label in labels]
    return written


def _other_texts(table: Table, column: str, names: list[str]) -> str:
    """Suggest other columns: of files, whose other columns are not read, all of them."""
    texts = [name for name in names if name != column and _may_hold_texts(table, name)]
    return f"use one of {', '.join(texts)[:200]}" if texts else "use other data"


def _may_hold_texts(table: Table, name: str) -> bool:
    return name not in table.column_names or holds_texts(table, name)


def _holds_messages(table: Table, name: str, config: DataConfig) -> bool:
    """Tell whether a column that data.text_column names holds lists of messages."""
    first = table[0][name] if len(table) and config.task == "causal" else None
    return isinstance(first, list) and bool(first) and isinstance(first[0], dict)
