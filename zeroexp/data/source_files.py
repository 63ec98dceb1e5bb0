"""Local files that a run reads its text from, those of training apart from those of validation, and their content."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zeroexp.config.data_splits import data_files, is_hub_id, split_name
from zeroexp.config.keys import ConfigError, DataConfig
from zeroexp.process.content_hash import hash_of_file

CORPUS = Path(__file__).parent / "corpus"  # the shipped text, and a tokenizer made of it


def text_files(config: DataConfig) -> list[Path]:
    """Return the local files to read, sorted; the list is empty if the source is the hub. Raises ConfigError."""
    if config.kind == "text" and config.path is None:
        return [CORPUS / "python_reference.txt"]
    return [] if is_hub_id(config) else data_files(config)


def require_own_files(config: DataConfig) -> None:
    """Raise ConfigError where validation reads files that are trained on; of one split parts may be cut apart."""
    own, other = split_name(config.split), split_name(config.validation_split)
    if is_hub_id(config) or own == other:
        return
    trained, validated = ({*data_files(replace(config, split=each))} for each in (own, other))
    is_saved = any(file.suffix == ".arrow" for file in trained)  # of each split by itself
    if not is_saved and (both := sorted(map(str, trained & validated))):
        problem = f"reads {both[0]}, which is trained on"
        remedy = "name files after their split (train.csv, validation.csv), or use data.validation_samples"
        raise ConfigError(f"data.validation_split={config.validation_split}: {problem}; {remedy}")


def source_identity(config: DataConfig, files: list[Path]) -> list[list[str | int]]:
    """Return what identifies the text: the hub id, or the name and content hash of each file.

    The shipped text is the same wherever a copy of this code lies, as in the folder of each sweep on Slurm.
    """
    if not files:
        return [[str(config.path), config.limit or 0]]
    names = ["" if file.parent == CORPUS else str(file.resolve()) for file in files]
    hashes = map(hash_of_file, files)
    return [[name, each, config.limit or 0] for name, each in zip(names, hashes, strict=True)]
