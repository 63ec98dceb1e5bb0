"""Find the data's errors before a rank starts: read, tokenize and pack them here, where the ranks find them.

Slurm's nodes pack for themselves, since what they see and where they keep it may differ. For them the tokenizer of a
local folder of weights is looked for, and files that are seen here, with the columns of tables.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from zeroexp.checkpoint.manifest import read_manifest, require_same_tokens
from zeroexp.config.data_kinds import DATA
from zeroexp.config.data_splits import data_files, is_hub_id
from zeroexp.config.keys import Config, ConfigError, DataConfig
from zeroexp.data.batches import build_data
from zeroexp.data.choose_tokenizer import choose_tokenizer
from zeroexp.data.source_files import require_own_files
from zeroexp.models.module import fitting_vocab_size


def check_data(config: Config) -> None:
    """Raise ConfigError for data that the ranks could not read, or not as the config says."""
    kind, data, is_here = DATA[config.data.kind], config.data, config.cluster.kind == "local"
    is_seen = is_here or Path(data.path or "").expanduser().exists()
    if data.path and is_seen and not is_hub_id(data):
        require_readable(data)
    if is_here:
        built = build_data(data, config.model, config.train.seed)
        fitting_vocab_size(config.model, built.vocab_size)
        if config.resume:
            checkpoint = Path(config.resume)
            require_same_tokens(checkpoint, read_manifest(checkpoint), built.tokens_hash)
        return
    if kind.tokenizes and Path(config.model.weights or "").expanduser().is_dir():
        choose_tokenizer(data, config.model)
    if kind.is_table and data.path and is_seen:
        # datasets takes a second to import, and most sweeps read no table.
        from zeroexp.data import table_rows

        splits = [data.split, data.validation_split] if data.validation_split else [data.split]
        for split in splits:
            each = replace(data, split=split)
            table_rows.require_columns(each, data_files(each))
        if data.validation_split:
            require_own_files(data)


def require_readable(data: DataConfig) -> None:
    """Raise ConfigError unless the files that data.path means can be opened."""
    try:
        with suppress(NotADirectoryError, FileNotFoundError):
            os.scandir(Path(str(data.path)).expanduser()).close()  # a glob finds nothing in silence
        for file in data_files(data):
            file.open("rb").close()
    except OSError as error:
        problem = f"can not be read ({error.strerror}: {error.filename})"
        remedy = "make it readable, or choose another"
        raise ConfigError(f"data.path={data.path}: {problem}; {remedy}") from error
