"""Read rows of text, and of labels, from files or from the hub; only this file imports datasets.

Files are converted inside a folder of the caller and not into the library's own cache, since what is packed from them
is kept, and the library takes a changed file of the same size and time for the old one.
"""

from __future__ import annotations

import csv
import glob
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import datasets
import datasets.config
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.exceptions import DatasetsError

from zeroexp.config.data_splits import TRAIN, split_name
from zeroexp.config.keys import ConfigError, DataConfig
from zeroexp.data import csv_files
from zeroexp.data.csv_files import UTF8
from zeroexp.data.table_columns import (
    LABEL,
    TEXT,
    read_columns,
    require_names,
    require_values,
    require_words,
    typed_labels,
)
from zeroexp.models import find_weights

BETWEEN_DOCUMENTS = "\f"
SHIPPED = "shipped: Python's language reference (PSF licence)"
COPY_BATCH = 1000  # samples copied from datasets to numpy at once
LOADERS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".json": "json",
    ".jsonl": "json",
    ".txt": "text",  # every line is a row
}

Table = datasets.Dataset

# A sweep's screen and a rank's log show nothing of how the library reads.
datasets.disable_progress_bars()
datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what fails is raised, too


def read_documents(config: DataConfig, files: list[Path]) -> tuple[Table, str]:
    """Return documents, which form feeds separate in a text, as a table with the column `text`, and their source."""
    texts = [_text_of(file) for file in files]
    documents = [document for text in texts for document in text.split(BETWEEN_DOCUMENTS)]
    source = f"local: {config.path}" if config.path else SHIPPED
    return Table.from_dict({TEXT: documents}), source


def read_table(config: DataConfig, files: list[Path], scratch: Path) -> tuple[Table, str]:
    """Return the rows of data.split with the columns that the task reads, and their source.

    files: none for a data set of the hub. scratch: a folder for converted files, which the caller removes.
    Raises ConfigError for what cannot be read, and for columns that do not exist or hold no text.
    """
    names: list[str] = []
    loader = LOADERS.get(files[0].suffix.lower()) if files else None
    with _one_line_errors(config):
        if not files:
            table = _read_hub(config)
        elif _are_saved(files):
            table = _read_saved(config)
        else:
            table, names = _load(config, files, scratch)
        if loader == "json":
            _require_utf8(table, config)
    names = names or table.column_names
    require_values(table, config, names)
    if loader == "csv":
        require_words(table, config, names)
        table = _with_typed_labels(table, config)
    table = table.select_columns(read_columns(config, names))
    if files:
        return table, f"local: {config.path}"
    place = "hub" if find_weights.is_online() else "hub's cache, offline"
    licence = f" ({table.info.license} licence)" if table.info.license else ""
    return table, f"{place}: {config.path}{licence}"


def require_columns(config: DataConfig, files: list[Path]) -> None:
    """Require that the columns which the task reads have their names in the first row. Raises ConfigError."""
    with _one_line_errors(config):
        names = _read_saved(config).column_names if _are_saved(files) else _names_in(config, files)
    if names:
        require_names(names, config)


def first_rows(table: Table, limit: int | None) -> Table:
    return table.select(range(len(table) if limit is None else min(limit, len(table))))


def class_names(table: Table, column: str) -> list[str] | None:
    """Return the names that the table itself knows for its labels 0, 1, ...; None if it knows none."""
    feature = table.features[column]
    return feature.names if isinstance(feature, datasets.ClassLabel) else None


def map_batches(table: Table, function: Any, scratch: Path) -> Table:
    """Return what `function` makes of batches of rows, which lies in `scratch`.

    By itself the library puts it beside the file that it read: in a folder of the user's, where it would pass for data.
    """
    return table.map(
        function,
        batched=True,
        remove_columns=table.column_names,
        load_from_cache_file=False,
        cache_file_name=str(scratch / "mapped.arrow"),
    )


def save_column(
    file: Path, samples: Table, column: str, shape: tuple[int, ...], dtype: np.dtype
) -> None:
    """Copy a column into a .npy file batch by batch, since it may not fit into memory."""
    array = np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=(len(samples), *shape))
    for start in range(0, len(samples), COPY_BATCH):
        array[start : start + COPY_BATCH] = samples[start : start + COPY_BATCH][column]
    array.flush()


# ---- from files and from the hub


def _text_of(file: Path) -> str:
    try:
        return file.read_bytes().decode(UTF8)
    except UnicodeDecodeError as error:
        problem = f"no UTF-8 (byte {error.start} is 0x{error.object[error.start]:02x})"
        raise ConfigError(f"data.path: {file}: {problem}; convert it with iconv") from error


def _load(config: DataConfig, files: list[Path], scratch: Path) -> tuple[Table, list[str]]:
    """Return the columns that the task reads, since nobody repairs another one, and the names of all."""
    loader, names = LOADERS[_suffix(config, files)], _names_in(config, files)
    if names:
        require_names(names, config)
    read, options = read_columns(config, names), dict[str, Any]()
    if loader == "text":
        options["encoding"] = UTF8
    if loader == "csv":
        loader, files = "parquet", csv_files.write_parquet(files, names, read, scratch / "texts")
    if loader == "parquet":
        schema = pq.read_schema(files[0])
        chosen = pa.schema([schema.field(name) for name in read], metadata=schema.metadata)
        options = {"columns": read, "features": datasets.Features.from_arrow_schema(chosen)}
    table = _with_library(loader, files, config.split or TRAIN, cache_dir=str(scratch), **options)
    return cast(Table, table), names


def _with_library(loader: str, files: list[Path], split: str, **options: Any) -> Any:
    patterns = {split_name(split): [glob.escape(str(file)) for file in files]}
    return datasets.load_dataset(loader, data_files=patterns, split=split, **options)


def _are_saved(files: list[Path]) -> bool:
    """Tell whether the files are of a folder written by Dataset.save_to_disk."""
    return any(file.suffix == ".arrow" for file in files)


def _suffix(config: DataConfig, files: list[Path]) -> str:
    """Return the suffix that all files have. Raises ConfigError for several kinds, and for files without content."""
    suffixes = sorted({file.suffix.lower() for file in files})
    if len(suffixes) > 1:
        kinds = ", ".join(suffixes)
        raise ConfigError(
            f"data.path={config.path}: files of several kinds ({kinds}); name one of them"
        )
    if not any(file.stat().st_size for file in files):
        raise ConfigError(f"data.path={config.path}: is empty; name a file with rows")
    return suffixes[0]


def _names_in(config: DataConfig, files: list[Path]) -> list[str]:
    """Return the names of the first file's columns; of JSON those of the first row."""
    loader = LOADERS[_suffix(config, files)]
    if loader == "json":
        rows = _with_library("json", files, split_name(config.split), streaming=True)
        return [name for row in rows.take(1) for name in row]
    if loader == "parquet":
        return pq.read_schema(files[0]).names
    return csv_files.column_names(files) if loader == "csv" else [TEXT]


def _with_typed_labels(table: Table, config: DataConfig) -> Table:
    """Turn labels of a CSV file into numbers or truths, unless they are its texts, too."""
    name = config.label_column or LABEL
    if config.task != "classification" or read_columns(config, table.column_names) == [name]:
        return table
    return table.remove_columns(name).add_column(name, typed_labels(table[name][:]))


def _require_utf8(table: Table, config: DataConfig) -> None:
    """Look at the bytes of texts in JSON, which the library takes as they come. Raises ValueError."""
    for name in {*read_columns(config, table.column_names)} & {*table.column_names}:
        table.data.column(name).validate(full=True)


def _read_saved(config: DataConfig) -> Table:
    saved = datasets.load_from_disk(str(Path(str(config.path)).expanduser()))
    parts = dict(saved) if isinstance(saved, datasets.DatasetDict) else {TRAIN: saved}
    split = config.split or TRAIN
    if split not in parts:
        raise ConfigError(
            f"data.split={split}: no such split in it; use one of {', '.join(map(str, parts))}"
        )
    return parts[split]


def _read_hub(config: DataConfig) -> Table:
    # Without this, the client tries for half a minute before it looks into its cache.
    if not find_weights.is_online():
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    table = datasets.load_dataset(str(config.path), config.subset, split=config.split or TRAIN)
    return cast(Table, table)


@contextmanager
def _one_line_errors(config: DataConfig) -> Iterator[None]:
    """Turn what the library raises about files, splits and names into one line behind our key."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, csv.Error, DatasetsError) as error:
        raise ConfigError(f"data.path={config.path}: {_explain(error, config)}") from error


def _explain(error: BaseException, config: DataConfig) -> str:
    cause = error.__cause__ or error  # the library says only that a file failed, its parser why
    reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
    if any(word in reason for word in ("onfig name", "BuilderConfig", "onfigurations")):
        return f"{' '.join(str(cause).split())[:300]}; choose one with data.subset"
    if "corresponds to no data" in reason:
        return "has no rows; name a file with rows, or a slice that has some"
    if "same columns" in str(error) or "Schema at index" in reason:
        return "its files have different columns; name one, or give all the same"
    if "split" in reason.lower():
        return f"{reason}; choose one with data.split or data.validation_split"
    if Path(str(config.path)).expanduser().exists():
        return f"{reason}; repair or convert it"
    return (
        f"{reason}; name a file or folder that exists, or an id that is on the hub or in its cache"
    )
