"""The registry of data sources: what `data.kind` may name, and what each reads of the config. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroexp.config.keys import DataConfig, ModelConfig
from zeroexp.registry import Later, Registry

TABLES = (".csv", ".tsv", ".parquet", ".json", ".jsonl", ".txt", ".arrow")


@dataclass(frozen=True)
class DataKind:
    """One source of samples.

    open: takes DataConfig, ModelConfig and the seed, and returns Samples (data/__init__.py). Every rank calls it.
    tasks: what its samples can train.
    settings: its own keys below `data.settings`, with their defaults.
    suffixes: of the files that `data.path` may name; empty: it reads no file.
    ships: without `data.path` it reads what is shipped.
    """

    open: Callable[[DataConfig, ModelConfig, int], Any]
    tasks: tuple[str, ...] = ("causal",)
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    suffixes: tuple[str, ...] = ()
    ships: bool = False
    tokenizes: bool = False  # it turns text into tokens once, and keeps them in the cache
    is_table: bool = False  # it has columns and splits, and may come from the hub


DATA = Registry(
    "data.kind",
    {
        "text": DataKind(
            Later("zeroexp.data.batches:tokenize_data"),
            suffixes=(".txt",),
            ships=True,
            tokenizes=True,
        ),
        "hf": DataKind(
            Later("zeroexp.data.batches:tokenize_data"),
            tasks=("causal", "classification"),
            suffixes=TABLES,
            tokenizes=True,
            is_table=True,
        ),
        "synthetic": DataKind(
            Later("zeroexp.data.synthetic:synthetic_samples"), tasks=("causal", "regression")
        ),
    },
    needs="a DataKind(open=function)",
    fits=lambda value: isinstance(value, DataKind),
    arguments=lambda kind: {"open": 3},
)
