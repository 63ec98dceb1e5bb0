"""Read documents or reviews, tokenize them, pack or pad, and write a cache folder; only this file imports datasets.

This runs once per text, tokenizer and length. Ranks find the folder of `packed.py` and do not import this file, since
datasets takes a second to import.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import datasets
import datasets.config
import huggingface_hub
import numpy as np
from tokenizers import Tokenizer

from zeroexp import hub
from zeroexp.config import ConfigError, DataConfig
from zeroexp.data.sources import Words

BETWEEN_DOCUMENTS = "\f"
SHIPPED = "shipped: Python's language reference (PSF licence)"
COPY_BATCH = 1000  # samples copied from datasets to numpy at once
LOADERS = {".csv": "csv", ".parquet": "parquet", ".json": "json", ".jsonl": "json"}


def write_packed(folder: Path, config: DataConfig, files: list[Path], words: Words) -> None:
    """Write causal samples: all documents in sequence, an end-of-text token after each, cut to seq_len + 1 tokens.

    Neighbouring samples share a token: the last label of one is the first input of the next. The tail that fills no
    sample is dropped, so that there is no padding at all.
    """
    tokenizer = Tokenizer.from_file(str(words.file))
    texts, source = _read(config, files)
    packer = _Packer(tokenizer, words.end_of_text, config.seq_len)
    packed = _map(texts, packer)
    if len(packed) == 0:
        raise ConfigError(
            f"data.seq_len={config.seq_len}: the text is shorter than one sample; choose a smaller one"
        )
    _save(folder / "tokens.npy", packed, "tokens", (config.seq_len + 1,), _dtype(tokenizer))
    _write_about(folder, config, tokenizer, source)


def write_reviews(
    folder: Path, config: DataConfig, files: list[Path], words: Words, num_labels: int
) -> None:
    """Write classification samples: each review cut or padded on the right to seq_len tokens, with its label."""
    tokenizer = Tokenizer.from_file(str(words.file))
    tokenizer.enable_truncation(config.seq_len)
    reviews, source = _read(config, files)
    _check_labels(reviews, config, num_labels)

    def pad(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        ids = [encoding.ids for encoding in tokenizer.encode_batch(batch["text"])]
        rows = [row + [words.padding] * (config.seq_len - len(row)) for row in ids]
        return {"tokens": rows, "lengths": [len(row) for row in ids], "labels": batch["label"]}

    padded = _map(reviews, pad)
    _save(folder / "tokens.npy", padded, "tokens", (config.seq_len,), _dtype(tokenizer))
    _save(folder / "labels.npy", padded, "labels", (), np.dtype(np.int64))
    _save(folder / "lengths.npy", padded, "lengths", (), np.dtype(np.int64))
    _write_about(folder, config, tokenizer, source)


class _Packer:
    """Packs batches of documents; it keeps the rest of one batch for the next."""

    def __init__(self, tokenizer: Tokenizer, end_of_text: int, seq_len: int) -> None:
        self.tokenizer, self.end_of_text, self.seq_len = tokenizer, end_of_text, seq_len
        self.rest: list[int] = []

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        stream = self.rest
        for encoding in self.tokenizer.encode_batch(batch["text"]):
            stream += [*encoding.ids, self.end_of_text]
        starts = range(0, len(stream) - self.seq_len, self.seq_len)
        self.rest = stream[len(starts) * self.seq_len :]
        return {"tokens": [stream[start : start + self.seq_len + 1] for start in starts]}


def _read(config: DataConfig, files: list[Path]) -> tuple[datasets.Dataset, str]:
    """Return at most data.limit documents (column text) or reviews (columns text, label), and their source."""
    datasets.disable_progress_bars()
    if config.kind == "text":
        texts = [_text_of(file) for file in files]
        documents = [document for text in texts for document in text.split(BETWEEN_DOCUMENTS)]
        return datasets.Dataset.from_dict({"text": documents}), _local(config) or SHIPPED
    reviews = _read_files(config, files) if files else _read_hub(config)
    missing = {"text", "label"} - set(reviews.column_names)
    if missing:
        raise ConfigError(
            f"data.path={config.path or config.source}: no column {' and '.join(sorted(missing))} "
            f"among {', '.join(reviews.column_names)[:80]}; rename the columns to text and label"
        )
    limit = len(reviews) if config.limit is None else min(config.limit, len(reviews))
    return reviews.select(range(limit)), _local(config) or _of_hub(config, reviews)


def _text_of(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        problem = f"no UTF-8 (byte {error.start} is 0x{error.object[error.start]:02x})"
        raise ConfigError(f"data.path: {file}: {problem}; convert it with iconv") from error


def _local(config: DataConfig) -> str:
    return f"local: {config.path}" if config.path else ""


def _of_hub(config: DataConfig, reviews: datasets.Dataset) -> str:
    place = "hub" if hub.online() else "hub's cache, offline"
    licence = f" ({reviews.info.license} licence)" if reviews.info.license else ""
    return f"{place}: {config.source}{licence}"


def _read_files(config: DataConfig, files: list[Path]) -> datasets.Dataset:
    """Read the training files, which must be of one kind: those named train*, or all if there are none."""
    if any(file.suffix == ".arrow" for file in files):  # a folder written by Dataset.save_to_disk
        saved = datasets.load_from_disk(str(Path(str(config.path)).expanduser()))
        return saved["train"] if isinstance(saved, datasets.DatasetDict) else saved
    chosen = [file for file in files if file.name.startswith("train")] or files
    if len({file.suffix for file in chosen}) > 1:
        raise ConfigError(f"data.path={config.path}: files of several kinds; name one of them")
    names = [str(file) for file in chosen]
    if chosen[0].suffix == ".csv" and not _has_header(chosen[0]):
        # Yelp's own archive has no header and counts stars from 1.
        rows = datasets.load_dataset(
            "csv", data_files=names, names=["label", "text"], split="train"
        )
        return rows.map(lambda row: {"label": row["label"] - 1})
    return datasets.load_dataset(LOADERS[chosen[0].suffix], data_files=names, split="train")


def _has_header(file: Path) -> bool:
    with file.open(encoding="utf-8", newline="") as lines:
        return not next(csv.reader(lines))[0].isdigit()


def _read_hub(config: DataConfig) -> datasets.Dataset:
    # Without this, the client tries for half a minute before it looks into its cache.
    if not hub.online():
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(str(config.source), split="train")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.source={config.source}: neither on the hub, as far as it can be reached, nor in the cache of "
            f"datasets; set data.path to a folder or file with columns text and label ({type(error).__name__})"
        ) from error


def _check_labels(reviews: datasets.Dataset, config: DataConfig, num_labels: int) -> None:
    labels = set(reviews.unique("label"))
    if not labels <= set(range(num_labels)):
        raise ConfigError(
            f"data.path={config.path or config.source}: labels {sorted(map(str, labels))[:8]} are not all "
            f"in 0..{num_labels - 1}; set model.num_labels, or number the labels from 0"
        )


def _map(source: datasets.Dataset, function: Any) -> datasets.Dataset:
    return source.map(
        function, batched=True, remove_columns=source.column_names, load_from_cache_file=False
    )


def _save(
    file: Path, samples: datasets.Dataset, column: str, shape: tuple[int, ...], dtype: np.dtype
) -> None:
    """Copy a column into a .npy file batch by batch, since it may not fit into memory."""
    array = np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=(len(samples), *shape))
    for start in range(0, len(samples), COPY_BATCH):
        array[start : start + COPY_BATCH] = samples[start : start + COPY_BATCH][column]
    array.flush()


def _dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.int32)


def _write_about(folder: Path, config: DataConfig, tokenizer: Tokenizer, source: str) -> None:
    about = {"vocab_size": tokenizer.get_vocab_size(), "source": source, "hub_id": config.source}
    (folder / "about.json").write_text(json.dumps(about))
