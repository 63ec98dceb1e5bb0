"""Read rows of text, and of labels, from files or from the hub; only this file imports datasets.

Files are converted inside a folder of the caller and not into the library's own cache, since what is packed from them
is kept, and the library takes a changed file of the same size and time for the old one.
"""

from __future__ import annotations

import csv
import glob
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, cast

import datasets
import datasets.config
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.exceptions import DatasetsError

from zeroexp.config.keys import ConfigError, DataConfig
from zeroexp.config.paths import TRAIN, split_name
from zeroexp.models import find_weights

BETWEEN_DOCUMENTS = "\f"
UTF8 = "utf-8-sig"  # a byte-order mark at the beginning is no text
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
MESSAGES, PROMPT, COMPLETION = "messages", "prompt", "completion"  # as in TRL (conversations.py)
DIFFERENT = "its files have different columns; name one, or give all the same"
MORE_FIELDS = "Length of header or names does not match length of data"  # a warning of pandas
WORDS = datasets.Value("string")
TEXT, LABEL = "text", "label"  # names of the columns where the config names none

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
    with _one_line_errors(config):
        if not files:
            table = _read_hub(config)
        elif _are_saved(files):
            table = _read_saved(config)
        else:
            table, names = _load(config, files, scratch)
        if files and LOADERS.get(files[0].suffix.lower()) == "json":
            _require_utf8(table, config)
    names = names or table.column_names
    _require_columns(table, config, names)
    if files and LOADERS.get(files[0].suffix.lower()) == "csv":
        _require_words(table, config, names)
        table = _with_typed_labels(table, config)
    table = table.select_columns(_read_columns(config, names))
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
        _require_names(names, config)


def first_rows(table: Table, limit: int | None) -> Table:
    return table.select(range(len(table) if limit is None else min(limit, len(table))))


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


def class_names(table: Table, column: str) -> list[str] | None:
    """Return the names that the table itself knows for its labels 0, 1, ...; None if it knows none."""
    feature = table.features[column]
    return feature.names if isinstance(feature, datasets.ClassLabel) else None


def holds_texts(table: Table, column: str) -> bool:
    return str(getattr(table.features[column], "dtype", "")) in ("string", "large_string")


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
        _require_names(names, config)
    read, options = _read_columns(config, names), dict[str, Any]()
    if loader == "text":
        options["encoding"] = UTF8
    elif loader == "csv":
        options = _options_of_csv(config, files, names)
    elif loader == "parquet":
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


def _read_columns(config: DataConfig, names: Sequence[str]) -> list[str]:
    return [*dict.fromkeys(name for _, name in columns_of(config, names).values())]


def _names_in(config: DataConfig, files: list[Path]) -> list[str]:
    """Return the names of the first file's columns; of JSON those of the first row."""
    file, suffix = files[0], _suffix(config, files)
    if LOADERS[suffix] == "json":
        rows = _with_library("json", files, split_name(config.split), streaming=True)
        return [name for row in rows.take(1) for name in row]
    if LOADERS[suffix] == "parquet":
        return pq.read_schema(file).names
    if LOADERS[suffix] == "text":
        return [TEXT]
    names = _header(file, suffix, _quoting(files) if suffix == ".tsv" else csv.QUOTE_MINIMAL)
    return [LABEL, TEXT] if suffix == ".csv" and _has_no_header(names) else names


def _has_no_header(first: list[str]) -> bool:
    return len(first) == 2 and first[0].isdigit()  # Yelp's own archive


def _options_of_csv(config: DataConfig, files: list[Path], names: list[str]) -> dict[str, Any]:
    suffix, read = files[0].suffix.lower(), _read_columns(config, names)
    for key, name in columns_of(config, names).values():
        if names.count(name) > 1:  # pandas would name the second one anew
            problem = f"several columns of {config.path} have this name"
            raise ConfigError(f"{key}={name}: {problem}; rename all but one")
    # pandas types each block of rows by itself, so that 007 would become 7 in a block of numbers alone.
    options: dict[str, Any] = {"features": datasets.Features(dict.fromkeys(read, WORDS))}
    options["converters"] = dict.fromkeys(set(names) - set(read), str)
    options |= {"keep_default_na": False, "na_values": [""]}  # NA or null is a word, and no gap
    # Where rows have a field more than the header, pandas would take the first for names of rows: by this it warns.
    options["index_col"] = False
    if suffix == ".tsv":
        options |= {"sep": "\t", "quoting": _quoting(files)}
    elif _has_no_header(_header(files[0], suffix)):
        options["names"] = names
    quoting = options.get("quoting", csv.QUOTE_MINIMAL)
    headers = [{*_header(file, suffix, quoting)} for file in files]
    if "names" not in options and not all(set(read) <= header for header in headers):
        raise ConfigError(f"data.path={config.path}: {DIFFERENT}")
    return options


def _quoting(files: list[Path]) -> int:
    """Tell pandas whether quotes in .tsv files are letters, as where GLUE's own are written.

    They are where one that opens a field does not close it before a tab, or where they would join rows.
    """
    most = csv.field_size_limit(sys.maxsize)
    try:
        are_letters = any(_joins_rows(cell) for file in files for cell in _cells(file))
    except csv.Error:
        are_letters = True
    finally:
        csv.field_size_limit(most)
    return csv.QUOTE_NONE if are_letters else csv.QUOTE_MINIMAL


def _cells(file: Path) -> Iterator[str]:
    with file.open(encoding=UTF8, newline="") as lines:
        yield from chain.from_iterable(csv.reader(lines, delimiter="\t", strict=True))


def _joins_rows(cell: str) -> bool:
    return "\t" in cell and "\n" in cell


def _header(file: Path, suffix: str, quoting: Any = csv.QUOTE_MINIMAL) -> list[str]:
    with file.open(encoding=UTF8, newline="") as lines:
        sep = "\t" if suffix == ".tsv" else ","
        return next(csv.reader(lines, delimiter=sep, quoting=quoting), [])


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
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=MORE_FIELDS)
            yield
    except ConfigError:
        raise
    except (OSError, ValueError, UserWarning, csv.Error, DatasetsError) as error:
        raise ConfigError(f"data.path={config.path}: {_explain(error, config)}") from error


def _explain(error: BaseException, config: DataConfig) -> str:
    cause = error.__cause__ or error  # the library says only that a file failed, its parser why
    reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
    if any(word in reason for word in ("onfig name", "BuilderConfig", "onfigurations")):
        return f"{' '.join(str(cause).split())[:300]}; choose one with data.subset"
    if reason.startswith(MORE_FIELDS):
        return "a row has more fields than the first row has names; quote fields with commas, or name all columns"
    if "corresponds to no data" in reason:
        return "has no rows; name a file with rows, or a slice that has some"
    if "same columns" in str(error) or "Schema at index" in reason:
        return DIFFERENT
    if "split" in reason.lower():
        return f"{reason}; choose one with data.split or data.validation_split"
    if Path(str(config.path)).expanduser().exists():
        return f"{reason}; repair or convert it"
    return (
        f"{reason}; name a file or folder that exists, or an id that is on the hub or in its cache"
    )


def _require_columns(table: Table, config: DataConfig, names: list[str]) -> None:
    """Require that the named columns exist, that text is text, and that no row lacks a value."""
    _require_names(table.column_names, config)
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


def _require_words(table: Table, config: DataConfig, names: list[str]) -> None:
    """Refuse texts of a CSV file, which has no types, of which every one is a number: stars, and no review of them.

    A completion may be the number that answers its prompt.
    """
    key, name = columns_of(config, table.column_names).get(TEXT, ("", ""))
    chunks = table.data.column(name).chunks if name else []
    if name and all(_is_number(text) for chunk in chunks for text in chunk):
        raise ConfigError(
            f"{key}={name}: holds numbers, no text; {_other_texts(table, name, names)}"
        )


def _with_typed_labels(table: Table, config: DataConfig) -> Table:
    """Turn labels of a CSV file into numbers or truths where each one is written as one: 01 is a word."""
    if config.task != "classification":
        return table
    _, name = columns_of(config, table.column_names)[LABEL]
    labels = {str(label) for label in table.unique(name)}
    if all(label.lower() in ("true", "false") for label in labels):
        return table.cast_column(name, datasets.Value("bool"))
    if all(re.fullmatch("0|-?[1-9][0-9]{0,17}", label) for label in labels):
        return table.cast_column(name, datasets.Value("int64"))
    if all(map(_is_number, labels)) and not all(label.strip().isdecimal() for label in labels):
        return table.cast_column(name, datasets.Value("float64"))
    return table


def _require_utf8(table: Table, config: DataConfig) -> None:
    """Look at the bytes of texts in JSON, which the library takes as they come. Raises ValueError."""
    for name in {*_read_columns(config, table.column_names)} & {*table.column_names}:
        table.data.column(name).validate(full=True)


def _other_texts(table: Table, column: str, names: list[str]) -> str:
    """Suggest other columns: of files, whose other columns are not read, all of them."""
    texts = [name for name in names if name != column and _may_hold_texts(table, name)]
    return f"use one of {', '.join(texts)[:200]}" if texts else "use other data"


def _may_hold_texts(table: Table, name: str) -> bool:
    return name not in table.column_names or holds_texts(table, name)


def _is_number(text: object) -> bool:
    try:
        float(str(text))
    except ValueError:
        return False
    return True


def _require_names(names: list[str], config: DataConfig) -> None:
    columns = ", ".join(names)[:200]
    for key, name in columns_of(config, names).values():
        if name not in names and len(names) == 1 and (separators := set(";\t|") & set(names[0])):
            problem = f"its columns are separated by {separators.pop()!r}, no comma"
            raise ConfigError(f"data.path={config.path}: {problem}; convert it")
        if name not in names:
            raise ConfigError(
                f"{key}={name}: no such column in {config.path}; use one of {columns}"
            )


def _holds_messages(table: Table, name: str, config: DataConfig) -> bool:
    """Tell whether a column that data.text_column names holds lists of messages."""
    first = table[0][name] if len(table) and config.task == "causal" else None
    return isinstance(first, list) and bool(first) and isinstance(first[0], dict)
