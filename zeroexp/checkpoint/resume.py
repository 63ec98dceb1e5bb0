"""Find the checkpoint that `resume` means and check that it fits, in the submitter, before a rank starts.

A checkpoint fits any strategy, implementation, world size and precision, if it is of the same model and was trained on
the same samples in the same order, each weight by the same optimizer. Everything else is the new run's own choice.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from zeroexp.checkpoint import folders
from zeroexp.checkpoint.check_hashes import check_pieces
from zeroexp.checkpoint.manifest import (
    MANIFEST,
    REMEDY,
    CheckpointError,
    Damaged,
    Manifest,
    read_manifest,
)
from zeroexp.config.keys import Config, ConfigError, OptimizerConfig, UndefinedCombination

LATEST = "latest"
# Checkpoints that were checked, each with the modification times of its files, which change with every write.
_whole: set[tuple[Path | int, ...]] = set()
ANEW = "use resume=null to begin anew"
MOST_LOOKS = 20  # attempts to read runs that save and remove checkpoints faster than we read them
# These keys decide what weights and the next samples mean; of moments, optimizers_fit.py decides.
DECISIVE = ("model", "data", "train.seed")
PUBLISHED = "model.published."  # a config.json, of which some keys decide nothing
# Among them, these are exceptions: names, the source of the first weights, and how a batch is divided.
INDIFFERENT = (
    *("model.name", "model.weights", "model.path", "model.init", "model.blocks"),
    *("data.name", "data.micro_batch_size"),
)
RATES = ("lr", "schedule", "warmup_steps", "min_lr_ratio")  # of `optimizer`, the new run's own


def resolve_resume(config: Config) -> str | None:
    """Return the absolute folder of the checkpoint that `config.resume` means; None if nothing is resumed.

    If `resume` names a run or `latest`, a damaged checkpoint is passed over for an older one of the same run, and one
    line reports it. Raises CheckpointError if the checkpoint is missing, foreign, damaged or of a newer format, and
    UndefinedCombination if it is complete but does not fit this run.
    """
    if config.resume is None:
        return None
    if config.resume == LATEST:
        return str(_latest_of_all_runs(config))
    path = Path(config.resume).resolve()
    if not (path / MANIFEST).is_file():
        return str(_newest_of_run(config, path))
    try:
        _require_named(config, path)
    except UndefinedCombination as error:
        raise UndefinedCombination(f"resume={config.resume}: {error}") from error
    return str(path)


def _require_named(config: Config, checkpoint: Path) -> None:
    """Raise ConfigError if it cannot be used; of a damaged one the error names an older one of its run to use."""
    try:
        _require_usable(config, checkpoint)
    except Damaged as error:
        there = folders.complete_checkpoints(checkpoint.parent.parent)
        before = there[: there.index(checkpoint)] if checkpoint in there else []
        older, _ = _newest_usable(config, before)
        if older is None:
            raise
        damage = str(error).partition(";")[0]
        raise CheckpointError(f"{damage}; use resume={older}") from error


def _newest_of_run(config: Config, run: Path) -> Path:
    checkpoint, problems = _look_until_found(config, lambda: [run])
    if checkpoint:
        return checkpoint
    for problem in problems:
        raise type(problem)(f"resume={config.resume}: {problem}, or {ANEW}")
    remedy = "give the folder of a run, or one of its checkpoint/step-* folders"
    raise CheckpointError(f"resume={config.resume}: no whole checkpoint in there; {remedy}")


def _latest_of_all_runs(config: Config) -> Path:
    """Return the newest fitting checkpoint of any run under outputs."""
    outputs = Path(config.outputs).resolve()
    # A run lies in its sweep, what was imported beside sweeps; what is hidden is being written.
    places = ("[!.]*", "[!.]*/[!.]*")
    checkpoint, problems = _look_until_found(
        config,
        lambda: [
            path.parent for place in places for path in outputs.glob(f"{place}/{folders.FOLDER}")
        ],
    )
    if checkpoint:
        return checkpoint
    reason = f"{problems[0]}, or {ANEW}" if problems else f"there is none; {ANEW}"
    runs = f", of {len(problems)} runs" if len(problems) > 1 else ""
    reason = f"no checkpoint under {config.outputs} fits{runs}: {reason}"
    raise UndefinedCombination(f"resume={LATEST}: {reason}")


def _look_until_found(
    config: Config, find_runs: Callable[[], list[Path]]
) -> tuple[Path | None, list[ConfigError]]:
    """Return the newest usable checkpoint of the newest run that has one, else what is wrong with each run.

    Looks again if a run, which goes on, has saved or removed checkpoints meanwhile.
    """
    problems: list[ConfigError] = []
    for _ in range(MOST_LOOKS):
        runs = sorted(find_runs(), key=_saved_at, reverse=True)
        names = [_names(run) for run in runs]
        checkpoint, problems = _newest_of(config, runs)
        if checkpoint or names == [_names(run) for run in runs]:
            return checkpoint, problems
    return None, problems


def _saved_at(run: Path) -> float:
    """Return when the newest readable checkpoint was saved; file times are ignored, since copies have others."""
    with suppress(OSError):  # somebody else's, of which `_newest_of` tells
        for checkpoint in reversed(folders.complete_checkpoints(run)):
            with suppress(CheckpointError):
                return read_manifest(checkpoint).saved_at
    return 0.0


def _names(run: Path) -> set[str]:
    with suppress(OSError):
        return set(os.listdir(run / folders.FOLDER))
    return set()


def _newest_of(config: Config, runs: Sequence[Path]) -> tuple[Path | None, list[ConfigError]]:
    """Return the newest usable checkpoint of the first run that has one, and what is wrong with each run before it."""
    problems: list[ConfigError] = []
    for run in runs:
        try:
            checkpoint, damaged = _newest_usable(config, folders.complete_checkpoints(run))
        except UndefinedCombination as error:
            problems.append(error)
            continue
        except OSError as error:
            problem = f"{run}: {error.strerror}; have it made readable"
            problems.append(CheckpointError(problem))
            continue
        if checkpoint:
            for line in damaged:
                _say(f"resume={config.resume}: {line}; goes on from {checkpoint}")
            return checkpoint, problems
        if damaged:
            number = f"{run / folders.FOLDER}: none of {len(damaged)} checkpoints can be used"
            problem = f"{number} (the newest: {damaged[0]}); restore one"
            problems.append(CheckpointError(problem))
    return None, problems


def _newest_usable(config: Config, checkpoints: Sequence[Path]) -> tuple[Path | None, list[str]]:
    """Return the last of these checkpoints that is whole, and what is wrong with each after it.

    Raises UndefinedCombination if it does not fit: then the older ones do not help.
    """
    damaged: list[str] = []
    for checkpoint in reversed(checkpoints):
        try:
            _require_usable(config, checkpoint)
            return checkpoint, damaged
        except CheckpointError as error:
            if checkpoint.exists():  # otherwise its run has just removed it
                damaged.append(str(error).partition(";")[0])
    return None, damaged


def _require_usable(config: Config, checkpoint: Path) -> None:
    """Raise UndefinedCombination if it does not fit, Damaged if any byte is wrong, CheckpointError if it is too new."""
    manifest = read_manifest(checkpoint)
    _require_fit(config, manifest)
    try:
        times = ((checkpoint / file).stat().st_mtime_ns for file in manifest.file_bytes())
        files = (checkpoint, *times)
    except OSError as error:
        raise Damaged(f"{error.filename}: {error.strerror}; {REMEDY}") from error
    if files not in _whole:  # once for all points of a sweep, since it reads every byte
        check_pieces(checkpoint, manifest)
        _whole.add(files)


@cache
def _say(line: str) -> None:
    print(f"zeroexp: {line}", file=sys.stderr)


def _require_fit(config: Config, manifest: Manifest) -> None:
    """Raise UndefinedCombination with the first difference that keeps the checkpoint from fitting this run."""
    ours = dict(_decisive_settings(asdict(config)))
    theirs = dict(_decisive_settings(manifest.config))
    key = "data.labels"
    if config.data.labels is None:  # a run keeps the classes of its data, as this one will
        theirs[key] = None
    # A column of words may be asked for with numbers, and the other way round.
    for settings in (ours, theirs):
        settings[key] = settings.get(key) and [str(each) for each in settings[key]]
    for key in (*ours, *theirs):
        if ours.get(key) != theirs.get(key):
            difference = f"{key} is {theirs.get(key)} in it, {ours.get(key)} here"
            raise UndefinedCombination(f"{difference}; use the same, or another checkpoint")
    num_steps = config.train.warmup_steps + config.train.steps
    if manifest.step >= num_steps:
        done = f"{manifest.step} steps are done, of {num_steps} here"
        raise UndefinedCombination(f"{done}; raise train.steps")
    every = config.strategy.outer.every or 1  # counted from the first step of all
    if manifest.step % every:
        problem = f"step {manifest.step} is between outer steps of strategy.outer.every={every}"
        remedy = f"use an interval that divides {manifest.step}, or another checkpoint"
        raise UndefinedCombination(f"{problem}; {remedy}")
    if _of_optimizers(asdict(config)) != _of_optimizers(manifest.config):
        # It imports torch, which a line whose optimizers are the checkpoint's does without.
        from zeroexp.checkpoint.optimizers_fit import require_same_optimizers

        require_same_optimizers(config, manifest)


def _of_optimizers(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return, in their order, the settings by which optimizers and their moments may differ: all but the rates."""
    settings = {**asdict(OptimizerConfig()), **config["optimizer"]}
    settings = {key: value for key, value in settings.items() if key not in RATES}
    return [("model.blocks", config["model"].get("blocks")), *_flat(settings)]


def _decisive_settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    # A checkpoint from before a key was added means what the key's default does.
    settings = {**dict(_flat(asdict(Config()))), **dict(_flat(config))}
    if published := config["model"].get("published"):
        # It imports transformers, as what read that config.json has.
        from zeroexp.models.huggingface_keys import keys_trained_by

        settings = {key: settings[key] for key in settings if not key.startswith(PUBLISHED)}
        settings |= _flat(keys_trained_by(published), PUBLISHED)
    for key, value in settings.items():
        named = any(key == word or key.startswith(f"{word}.") for word in DECISIVE)
        if named and key not in INDIFFERENT:
            yield key, value


def _flat(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
