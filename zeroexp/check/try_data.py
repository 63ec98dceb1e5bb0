"""Find the data's errors before a rank starts: read, tokenize and pack them here, where the ranks find them.

Slurm's nodes pack for themselves, since what they see and where they keep it may differ. For them the tokenizer of a
local folder of weights is looked for, and the columns of files that are seen here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zeroexp.config.data_sources import DATA
from zeroexp.config.keys import Config
from zeroexp.config.paths import data_files
from zeroexp.data import sources
from zeroexp.data.batches import build_data


def check_data(config: Config) -> None:
    """Raise ConfigError for data that the ranks could not read, or not as the config says."""
    if config.cluster.kind == "local":
        build_data(config.data, config.model, config.train.seed)
        return
    kind, data = DATA[config.data.kind], config.data
    if kind.tokenizes and Path(config.model.weights or "").expanduser().is_dir():
        sources.choose_tokenizer(data, config.model)
    if kind.is_table and Path(data.path or "").expanduser().exists():
        # datasets takes a second to import, and most sweeps read no table.
        from zeroexp.data import table_rows

        splits = [data.split, data.validation_split] if data.validation_split else [data.split]
        for split in splits:
            each = replace(data, split=split)
            table_rows.require_columns(each, data_files(each))
