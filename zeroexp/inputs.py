"""Paths of the local files that a run reads its text from, and of the cache; no file is opened here."""

from __future__ import annotations

import os
from pathlib import Path

from zeroexp.config import ConfigError, DataConfig

SHIPPED_WORDS = 2048  # vocabulary size of the tokenizer in data/corpus
SUFFIXES = {"text": (".txt",), "reviews": (".csv", ".parquet", ".json", ".jsonl", ".arrow")}


def data_files(config: DataConfig) -> list[Path]:
    """Return the files that data.path means, sorted. Raises ConfigError if there are none."""
    path = Path(str(config.path)).expanduser()
    if not path.exists():
        raise ConfigError(f"data.path={config.path}: no such file or folder; use one that exists")
    found = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    files = [file for file in found if file.suffix in SUFFIXES[config.kind]]
    if not files:
        kinds = ", ".join(SUFFIXES[config.kind])
        raise ConfigError(f"data.path={config.path}: no file in it ends in {kinds}; add one")
    return files


def cache_root() -> Path:
    """Return $ZEROEXP_CACHE, else zeroexp/ in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("ZEROEXP_CACHE") or Path(home) / "zeroexp")
