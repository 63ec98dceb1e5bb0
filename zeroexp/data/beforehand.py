"""Find the data's errors before a rank starts: read, tokenize and pack them here, where the ranks find them.

Slurm's nodes pack for themselves, since what they see and where they keep it may differ. For them only the tokenizer of
a local folder of weights is looked for.
"""

from __future__ import annotations

from pathlib import Path

from zeroexp.config import Config
from zeroexp.data import sources
from zeroexp.data.build import build_data


def check_data(config: Config) -> None:
    """Raise ConfigError for data that the ranks could not read, or not as the config says."""
    if config.cluster.kind == "local":
        build_data(config.data, config.model, config.train.seed)
    elif config.data.kind != "synthetic" and Path(config.model.weights or "").expanduser().is_dir():
        sources.choose_words(config.data, config.model)
