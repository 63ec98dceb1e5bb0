"""Rewrite columns of JSON files as Arrow files: Arrow's own reader takes texts that look like dates for times."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa

ROWS = 1000  # of which the types are found at once


def rows_of(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file: one a line, or all in one list, in which a text is a row of one column `text`."""
    with file.open(encoding="utf-8-sig", newline="\n") as lines:
        is_list = lines.read(1) == "["
        lines.seek(0)
        parsed = json.load(lines) if is_list else (json.loads(one) for one in lines if one.strip())
        for number, row in enumerate(parsed, 1):
            if isinstance(row, dict):
                yield row
            elif isinstance(row, str) and is_list:
                yield {"text": row}
            else:
                raise ValueError(f"{file.name}: row {number} is no object with named values")


def as_arrow(
    files: Sequence[Path], names: Sequence[str], folder: Path
) -> tuple[list[Path], pa.Schema]:
    """Write these columns of all rows into Arrow files, one for each run of rows of the same types.

    Returns the files and the schema that fits all of them. Raises ValueError for values of several kinds in a column.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows, written = chain.from_iterable(map(rows_of, files)), list[Path]()
    schemas, writer = list[pa.Schema](), None
    try:
        while some := list(islice(rows, ROWS)):
            table = pa.table({name: [row.get(name) for row in some] for name in names})
            if writer is None or table.schema != schemas[-1]:
                if writer is not None:
                    writer.close()
                schemas.append(table.schema)
                written.append(folder / f"{len(written)}.arrow")
                writer = pa.ipc.new_stream(str(written[-1]), table.schema)
            writer.write_table(table)
        return written, pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowException, OverflowError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"a column holds values of several kinds ({reason})") from None
    finally:
        if writer is not None:
            writer.close()
