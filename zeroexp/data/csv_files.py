"""Read .csv and .tsv files, which have no types, as texts; Python's reader alone says what is a row and what a field.

pandas, by which datasets reads them, finds types in each block of rows by itself, where 007 may become 7.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from zeroexp.config.keys import ConfigError
from zeroexp.data.table_columns import LABEL, TEXT

UTF8 = "utf-8-sig"  # a byte-order mark at the beginning is no text
YELP = [LABEL, TEXT]  # columns of its own archive, which has no names
COMMAS: dict[str, Any] = {"delimiter": ",", "strict": True}
BATCH = 1000  # rows that are written at once

csv.field_size_limit(sys.maxsize)


class MisplacedQuote(ConfigError):
    """A quote inside of a quoted field that is not written twice, by which the field would end there."""


def column_names(files: list[Path]) -> list[str]:
    """Return the names of the first file's columns."""
    dialect = _dialect(files)
    first = next(_rows(files[0], dialect), [])
    return YELP if dialect == COMMAS and _is_review(first) else first


def write_parquet(
    files: list[Path], names: list[str], columns: list[str], folder: Path
) -> list[Path]:
    """Write these columns of each file as texts into a file in `folder`, and return those. Raises ConfigError.

    names: of all columns of the first file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dialect, schema = _dialect(files), pa.schema(dict.fromkeys(columns, pa.string()))
    written = [folder / f"{number}.parquet" for number in range(len(files))]
    for file, copy in zip(files, written, strict=True):
        rows = _rows(file, dialect)
        own = next(rows, [])
        if names == YELP and _is_review(own):
            own, rows = YELP, chain([own], rows)
        if wrong := [name for name in columns if own.count(name) != 1]:
            number = "several columns" if wrong[0] in own else "no column"
            problem = f"has {number} {wrong[0]}, where other files have one"
            raise ConfigError(f"data.path: {file}: {problem}; name one file, or give all the same")
        fields = (_by_name(row, own, file) for row in rows)
        with pq.ParquetWriter(copy, schema) as out:
            while batch := [*islice(fields, BATCH)]:
                out.write_table(pa.Table.from_pylist(batch, schema))
    return written


def _by_name(row: list[str], names: list[str], file: Path) -> dict[str, str | None]:
    if any(row[len(names) :]):  # empty ones are of a comma behind every row
        problem = f"a row has more fields than the first row has names (it begins {row[0]!r:.40})"
        remedy = "quote fields with commas or tabs, or name all columns"
        raise ConfigError(f"data.path: {file}: {problem}; {remedy}")
    return {name: field or None for name, field in zip(names, row, strict=False)}


def _is_review(row: list[str]) -> bool:
    return len(row) == 2 and row[0].isdigit()


def _is_blank(row: list[str]) -> bool:
    return not row or (len(row) == 1 and row[0].isspace())


def _rows(file: Path, dialect: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the rows of fields, without blank lines. Raises ConfigError for a quote that nothing closes.

    Or for one that closes a field early: programs that write a backslash and a quote inside of a field mean a quote.
    """
    with file.open(encoding=UTF8, newline="") as opened:
        lines = chain(opened, [""])  # the last line is read with others only where a quote is open
        try:
            yield from (row for row in csv.reader(lines, **dialect) if not _is_blank(row))
        except csv.Error as error:
            if next(lines, None) is None:
                problem = "a quote that opens a field is not closed; close it, or write it twice"
                raise ConfigError(f"data.path: {file}: {problem}") from error
            problem = 'a quote inside of a quoted field is not written twice, as in "a ""b"" c"'
            remedy = "write it so, or convert the file to .jsonl or .parquet"
            raise MisplacedQuote(f"data.path: {file}: {problem}; {remedy}") from error


def _dialect(files: list[Path]) -> dict[str, Any]:
    """Return the separator, and whether quotes are letters: in .tsv files such as GLUE's. Raises ConfigError.

    They are where one that opens a field does not close it before a tab. A quoted field with tabs and lines in it is
    one, unless these lines would be rows.
    """
    if files[0].suffix.lower() == ".csv":
        return COMMAS
    quotes: dict[str, Any] = {"delimiter": "\t", "strict": True}
    letters = quotes | {"quoting": csv.QUOTE_NONE}
    try:
        joined = [file for file in files if _joins_lines(file, quotes)]
    except MisplacedQuote:
        return letters
    for file in joined:
        if len({len(row) for row in _rows(file, letters)}) == 1:
            problem = "quotes may be letters of it, or join its lines"
            raise ConfigError(f"data.path: {file}: {problem}; convert it to .jsonl or .parquet")
    return quotes


def _joins_lines(file: Path, dialect: dict[str, Any]) -> bool:
    return sum(any("\t" in c and "\n" in c for c in row) for row in _rows(file, dialect)) > 0
