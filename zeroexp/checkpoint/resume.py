"""Which checkpoint `resume` means, and whether it fits: asked by the submitter, before a rank starts. No torch.

Any strategy, implementation, world size and precision takes up any checkpoint of the same model that was trained on
the same samples in the same order by the same kind of optimizer. What else differs is the new run's own choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zeroexp.checkpoint import folders
from zeroexp.checkpoint.manifest import MANIFEST, CheckpointError, Manifest, read_manifest
from zeroexp.config import Config, UndefinedCombination

LATEST = "latest"
# What makes weights, moments or the next samples mean something else.
DECISIVE = ("model", "data", "train.seed", "optimizer.name")
# Of these what does not: names, where first weights came from, and how a batch is cut for ranks.
INDIFFERENT = ("model.name", "model.weights", "data.name", "data.micro_batch_size")


def resolve_resume(config: Config) -> str | None:
    """The folder of the checkpoint that `config.resume` means, absolute; None where nothing is resumed.

    Raises CheckpointError for what is missing, foreign, damaged or of a newer format, and UndefinedCombination where
    it is whole but does not fit this run.
    """
    if config.resume is None:
        return None
    if config.resume == LATEST:
        return str(_latest(config))
    checkpoint = _named(config.resume)
    manifest = read_manifest(checkpoint)
    if misfit := _misfit(config, manifest):
        raise UndefinedCombination(f"resume={config.resume}: {misfit}")
    if told := folders.missing(checkpoint, manifest):
        raise CheckpointError(told)
    return str(checkpoint)


def _named(resume: str) -> Path:
    path = Path(resume).resolve()
    checkpoint = path if (path / MANIFEST).is_file() else folders.newest(path)
    if checkpoint is None:
        remedy = "give the folder of a run, or one of its checkpoint/step-* folders"
        raise CheckpointError(f"resume={resume}: no whole checkpoint in there; {remedy}")
    return checkpoint


def _latest(config: Config) -> Path:
    """The newest that fits, of any run under outputs; of a run whose newest is damaged, an older one."""
    runs = Path(config.outputs).resolve().glob(f"*/*/{folders.FOLDER}")
    found = [checkpoint for run in runs for checkpoint in folders.whole(run.parent)]
    found.sort(key=lambda path: (path / MANIFEST).stat().st_mtime, reverse=True)
    unfit: set[Path] = set()  # runs: if the newest is another model's, so are the older ones
    why: list[str] = []
    for checkpoint in found:
        if checkpoint.parent in unfit:
            continue
        try:
            manifest = read_manifest(checkpoint)
        except CheckpointError as error:
            why.append(str(error))
            continue
        if misfit := _misfit(config, manifest):
            unfit.add(checkpoint.parent)
        told = misfit or folders.missing(checkpoint, manifest)
        if told is None:
            return checkpoint
        why.append(told)
    first = f"{why[0]} (and {len(why) - 1} older)" if why else "there is none"
    told = f"no checkpoint under {config.outputs} fits: {first}"
    raise UndefinedCombination(f"resume={LATEST}: {told}; use resume=null to begin anew")


def _misfit(config: Config, manifest: Manifest) -> str | None:
    """The first thing in which the checkpoint is none of this run's, in words with a remedy."""
    ours, theirs = dict(_decisive(asdict(config))), dict(_decisive(manifest.config))
    for key in (*ours, *theirs):
        if ours.get(key) != theirs.get(key):
            told = f"{key} is {theirs.get(key)} in it, {ours.get(key)} here"
            return f"{told}; use the same, or another checkpoint"
    num_steps = config.train.warmup_steps + config.train.steps
    if manifest.step >= num_steps:
        return f"{manifest.step} steps are done, of {num_steps} here; raise train.steps"
    return None


def _decisive(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in _flat(config):
        named = any(key == word or key.startswith(f"{word}.") for word in DECISIVE)
        if named and key not in INDIFFERENT:
            yield key, value


def _flat(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
