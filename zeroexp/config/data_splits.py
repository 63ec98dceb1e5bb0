"""Splits of local data: which files of data.path are trained on, and which are for validation; none is opened here."""

from __future__ import annotations

import re
from pathlib import Path

from zeroexp.config.data_kinds import DATA, TABLES
from zeroexp.config.keys import ConfigError, DataConfig

TRAIN = "train"
# Words for each split, those of `datasets`.
SPLITS = "train|training", "validation|valid|val|dev", "test|testing|eval|evaluation"
ABOUT = "dataset_info.json", "dataset_infos.json", "config.json", "state.json"
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def is_hub_id(config: DataConfig) -> bool:
    """Return whether data.path names a data set on the hub: nothing here has this name, and it looks like an id."""
    path = str(config.path)
    if not DATA[config.kind].is_table or Path(path).expanduser().exists():
        return False
    return bool(HUB_ID.fullmatch(path)) and Path(path).suffix not in TABLES


def data_files(config: DataConfig) -> list[Path]:
    """Return the files that data.path means, sorted; of a folder those of data.split. Raises ConfigError for none."""
    path = Path(str(config.path)).expanduser()
    if not path.exists():
        raise ConfigError(f"data.path={config.path}: no such file or folder; use one that exists")
    there = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    # What a system or an editor hides is no data, and of tables what `datasets` leaves out of a folder.
    is_table = DATA[config.kind].is_table
    hidden = (".", "__") if is_table else (".",)
    candidates = [
        p for p in there if not any(n.startswith(hidden) for n in p.relative_to(path).parts)
    ]
    if is_table and path.is_dir():
        candidates = [p for p in candidates if p.name not in ABOUT]
    suffixes = DATA[config.kind].suffixes
    files = [file for file in candidates if file.suffix.lower() in suffixes]
    tables = sorted({file.suffix.lower() for file in candidates} & set(TABLES))
    if not files and tables:
        problem = f"data.kind={config.kind} reads no {', '.join(tables)}"
        raise ConfigError(f"data.path={config.path}: {problem}; use data=hf for tables")
    if not files:
        kinds = ", ".join(suffixes)
        problem = f"no file in it ends in {kinds}; add one"
        if path.is_file():
            problem = f"ends in none of {kinds}; name a file that does"
        raise ConfigError(f"data.path={config.path}: {problem}")
    saved = any(file.suffix == ".arrow" for file in files)  # `datasets` itself wrote this folder
    if not is_table or saved:
        return files
    root = path.parent if path.is_file() else path
    return _of_split(root, files, split_name(config.split), config)


def split_name(split: str | None) -> str:
    """Return the name in `test` and in `test[:1000]`, as `datasets` writes a part of a split."""
    return (split or TRAIN).partition("[")[0]


def _of_split(root: Path, files: list[Path], split: str, config: DataConfig) -> list[Path]:
    """Return the files named after the split, or inside a folder named so; all that name no split are for training."""
    own = re.escape(split)
    words = next((each for each in SPLITS if split in each.split("|")), own)
    every = "|".join([*SPLITS, words])
    told = {file: _part_that_tells(every, file, root) for file in files}
    chosen = [file for file in files if _names(words, told[file])]
    if split != TRAIN:  # eval.csv beside test.csv is no part of it
        chosen = [file for file in chosen if _names(own, told[file])] or chosen
    if not chosen and split == TRAIN:
        chosen = files if len(files) == 1 else [f for f in files if not _names(every, told[f])]
    if not chosen and len(files) == 1:
        raise ConfigError(
            f"data.path={config.path}: has no split {split}, being one file; cut it in two with "
            "'data.split=\"train[:90%]\"' 'data.validation_split=\"train[90%:]\"', or use data.validation_samples"
        )
    if not chosen:
        names = ", ".join(str(file.relative_to(root)) for file in files[:5])
        raise ConfigError(
            f"data.path={config.path}: no file for the split {split} among {names}; "
            f"name one {split}{files[0].suffix}, or choose another split"
        )
    return chosen


def _part_that_tells(splits: str, file: Path, root: Path) -> str:
    """Return the part of a path that says which split a file is of: train/test_of_time.csv and dev-set/train.csv train.

    That is the outermost folder whose name is a split's, else the file's name, else a folder with a split in its name.
    """
    *folders, name = file.relative_to(root).parts
    named = [folder for folder in folders if re.fullmatch(splits, folder, re.IGNORECASE)]
    parts = [*named, name, *folders]
    return next((part for part in parts if _names(splits, part)), name)


def _names(splits: str, part: str) -> bool:
    """Tell whether a name has one of these words, parted as in `datasets`: also Test.csv, and train_test.csv both."""
    return bool(re.search(rf"(?<![^-._ 0-9])({splits})(?![^-._ 0-9])", part, re.IGNORECASE))
