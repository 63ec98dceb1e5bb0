"""Tokenize documents or labelled texts, pack or pad them, and write a cache folder.

This runs once per text, tokenizer and length. Ranks find the folder of `packed_cache.py` and do not import this
file, since datasets takes a second to import.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from zeroexp.config.keys import ConfigError, DataConfig
from zeroexp.config.vocabulary import TokenizerChoice
from zeroexp.data.classes import classes_of
from zeroexp.data.table_columns import COMPLETION, MESSAGES, TEXT, columns_of, holds_texts
from zeroexp.data.table_rows import (
    Table,
    class_names,
    first_rows,
    map_batches,
    read_documents,
    read_table,
    save_column,
)

SLICE = 1 << 20  # letters of texts that are encoded at once
SCRATCH = "converted"  # inside the folder that is being written, so that both go together


def write_packed(
    folder: Path, config: DataConfig, files: list[Path], words: TokenizerChoice
) -> None:
    """Write causal samples: all documents in sequence, an end-of-text token after each, cut to seq_len + 1 tokens.

    Neighbouring samples share a token: the last label of one is the first input of the next. The tail that fills no
    sample is dropped, so that there is no padding at all. Of prompts with completions a sample without any token of a
    completion is dropped too.
    """
    tokenizer = _tokenizer_of(words)
    texts, source = _read_texts(config, files, folder / SCRATCH)
    packer = _Packer(tokenizer, words, config.seq_len, texts, config)
    packed = map_batches(first_rows(texts, config.limit), packer, folder / SCRATCH)
    if len(packed) == 0:
        raise ConfigError(
            f"data.seq_len={config.seq_len}: the text is shorter than one sample; choose a smaller one"
        )
    dtype = _dtype(tokenizer, words)
    save_column(folder / "tokens.npy", packed, "tokens", (config.seq_len + 1,), dtype)
    if packer.masks:
        save_column(folder / "counts.npy", packed, "counts", (config.seq_len,), np.dtype(np.bool_))
    _write_about(folder, tokenizer, source)


def write_labelled(
    folder: Path, config: DataConfig, files: list[Path], words: TokenizerChoice, num_labels: int
) -> None:
    """Write classification samples: each text cut or padded on the right to seq_len tokens, with its class."""
    tokenizer = _tokenizer_of(words)
    num_own = tokenizer.num_special_tokens_to_add(is_pair=False)
    if num_own >= config.seq_len:
        problem = f"the tokenizer adds {num_own} tokens of its own to each text"
        raise ConfigError(f"data.seq_len={config.seq_len}: {problem}; use {num_own + 1} or more")
    tokenizer.enable_truncation(config.seq_len)
    table, source = _read_texts(config, files, folder / SCRATCH)
    text, label = (name for _, name in columns_of(config).values())
    names = class_names(table, label)
    used = first_rows(table, config.limit)
    # Named classes are known without rows, of which those that are used must have one.
    values = (used if names else table).unique(label)
    classes = classes_of(values, num_labels, column=label, asked=config.labels, names=names)
    number = {value: place for place, value in enumerate(classes)}

    def pad(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        ids = [encoding.ids for encoding in tokenizer.encode_batch(batch[text])]
        rows = [row + [words.padding] * (config.seq_len - len(row)) for row in ids]
        labels = [number[value] for value in batch[label]]
        return {"tokens": rows, "lengths": [len(row) for row in ids], "labels": labels}

    padded = map_batches(used, pad, folder / SCRATCH)
    dtype = _dtype(tokenizer, words)
    save_column(folder / "tokens.npy", padded, "tokens", (config.seq_len,), dtype)
    save_column(folder / "labels.npy", padded, "labels", (), np.dtype(np.int64))
    save_column(folder / "lengths.npy", padded, "lengths", (), np.dtype(np.int64))
    values = [names[value] for value in classes] if names else classes
    _write_about(folder, tokenizer, source, classes, values)


def _tokenizer_of(words: TokenizerChoice) -> Tokenizer:
    """Return the file's tokenizer, which neither cuts nor pads unless it is told to, as transformers calls it."""
    tokenizer = Tokenizer.from_file(str(words.file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class _Packer:
    """Packs batches of documents; it keeps the rest of one batch for the next."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        words: TokenizerChoice,
        seq_len: int,
        table: Table,
        config: DataConfig,
    ) -> None:
        self.tokenizer, self.end_of_text, self.seq_len = tokenizer, words.end_of_text, seq_len
        columns = columns_of(config, table.column_names) if config.kind == "hf" else {}
        self.column = columns.get(TEXT, ("", TEXT))[1]
        self.masks = COMPLETION in columns
        self.conversations: Any = None
        if MESSAGES in columns or self.masks or not holds_texts(table, self.column):
            # transformers takes two seconds to import.
            from zeroexp.data.conversations import ConversationEncoder

            column = None if self.masks else MESSAGES if MESSAGES in columns else self.column
            self.conversations = ConversationEncoder(words, tokenizer, column)
        self.rest = np.empty(0, np.int32)
        self.rest_counts = np.empty(0, np.bool_)

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, np.ndarray]:
        parts, marks, size = [self.rest], [self.rest_counts], self.seq_len
        for tokens, num_prompt in self._documents(batch):
            parts.append(np.asarray(tokens, np.int32))
            if self.masks:
                marks.append(np.arange(len(tokens)) >= num_prompt)
        stream, counts = np.concatenate(parts), np.concatenate(marks)
        starts = range(0, len(stream) - size, size)
        self.rest = stream[len(starts) * size :].copy()
        self.rest_counts = counts[len(starts) * size :].copy()
        rows = np.add.outer(np.asarray(starts, np.int64), np.arange(size + 1))
        if not self.masks:
            return {"tokens": stream[rows]}
        counted = counts[rows[:, 1:]]
        kept = counted.any(axis=1)
        return {"tokens": stream[rows[kept]], "counts": counted[kept]}

    def _documents(self, batch: dict[str, list[Any]]) -> Iterator[tuple[Sequence[int], int]]:
        """Yield the tokens of each document, and how many of them belong to its prompt."""
        if self.conversations is not None:
            yield from self.conversations(batch)
            return
        for texts in _slices(batch[self.column]):
            for encoding in self.tokenizer.encode_batch(texts):
                yield [*encoding.ids, self.end_of_text], 0


def _slices(texts: list[str]) -> Iterator[list[str]]:
    """Yield the texts in slices, since an encoding takes up to a hundred bytes for each one of its text."""
    some, num_letters = list[str](), 0
    for text in texts:
        if some and num_letters + len(text) > SLICE:
            yield some
            some, num_letters = [], 0
        some.append(text)
        num_letters += len(text)
    yield some


def _read_texts(config: DataConfig, files: list[Path], scratch: Path) -> tuple[Table, str]:
    if config.kind == "text":
        return read_documents(config, files)
    return read_table(config, files, scratch)


def _num_ids(tokenizer: Tokenizer) -> int:
    return max(tokenizer.get_vocab().values()) + 1  # ids may have holes


def _dtype(tokenizer: Tokenizer, words: TokenizerChoice) -> np.dtype:
    num_ids = max(_num_ids(tokenizer), words.end_of_text + 1, words.padding + 1)
    return np.dtype(np.uint16 if num_ids <= 1 << 16 else np.int32)


def _write_about(
    folder: Path,
    tokenizer: Tokenizer,
    source: str,
    classes: list[Any] | None = None,
    names: list[Any] | None = None,
) -> None:
    shutil.rmtree(folder / SCRATCH, ignore_errors=True)
    tokens = np.load(folder / "tokens.npy", mmap_mode="r")
    num_used = max(int(tokens[at : at + 1000].max()) for at in range(0, len(tokens), 1000)) + 1
    about = {"vocab_size": _num_ids(tokenizer), "num_used": num_used, "source": source}
    about |= {"classes": classes, "names": names}
    (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")
