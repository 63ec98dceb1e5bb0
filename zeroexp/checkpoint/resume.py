"""Find the checkpoint that `resume` means and check that it fits, in the submitter, before a rank starts. No torch.

A checkpoint fits any strategy, implementation, world size and precision, if it is of the same model and was trained on
the same samples in the same order by the same kind of optimizer. Everything else is the new run's own choice.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from zeroexp.checkpoint import folders
from zeroexp.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Damaged,
    Manifest,
    read_manifest,
)
from zeroexp.checkpoint.verify import find_damage, modification_times
from zeroexp.config.keys import Config, UndefinedCombination

LATEST = "latest"
# Results of earlier checks are kept by the files' signature.
_damages: dict[tuple[Path | int, ...], str | None] = {}
ANEW = "use resume=null to begin anew"
MOST_LOOKS = 20  # attempts to read runs that save and remove checkpoints faster than we read them
# These keys decide what weights, moments and the next samples mean.
DECISIVE = ("model", "data", "train.seed", "optimizer.name")
# Among them, these are exceptions: names, the source of the first weights, and how a batch is divided.
INDIFFERENT = (
    *("model.name", "model.weights", "model.path", "model.init", "model.blocks"),
    *("data.name", "data.micro_batch_size"),
)


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
        return str(_newest_of(config, path))
    try:
        manifest = read_manifest(path)
        if misfit := _why_it_does_not_fit(config, manifest):
            raise UndefinedCombination(f"resume={config.resume}: {misfit}")
        if damage := _damage_of(path, manifest):
            raise Damaged(damage)
    except Damaged as error:
        if older := _whole_one_before(path):
            damage = str(error).partition(";")[0]
            raise CheckpointError(f"{damage}; use resume={older}") from error
        raise
    return str(path)


def _whole_one_before(checkpoint: Path) -> Path | None:
    """Return the newest older checkpoint of the same run that is whole; each is read to its end."""
    there = folders.complete_checkpoints(checkpoint.parent.parent)
    for older in reversed(there[: there.index(checkpoint)] if checkpoint in there else []):
        with suppress(CheckpointError):
            if _damage_of(older, read_manifest(older)) is None:
                return older
    return None


def _newest_of(config: Config, run: Path) -> Path:
    chosen, checkpoint = _first_undamaged(
        config, lambda: [_CheckpointsOfRun(run)] if run.is_dir() else []
    )
    if checkpoint:
        return checkpoint
    for one in chosen:
        for misfit in one.misfits:
            raise UndefinedCombination(f"resume={config.resume}: {misfit}")
        if one.damaged:
            raise CheckpointError(f"resume={config.resume}: {one.all_damaged}, or {ANEW}")
    remedy = "give the folder of a run, or one of its checkpoint/step-* folders"
    raise CheckpointError(f"resume={config.resume}: no whole checkpoint in there; {remedy}")


def _latest_of_all_runs(config: Config) -> Path:
    """Return the newest fitting checkpoint of any run under outputs."""
    outputs = Path(config.outputs).resolve()
    chosen, checkpoint = _first_undamaged(
        config,
        lambda: [_CheckpointsOfRun(one.parent) for one in outputs.glob(f"*/*/{folders.FOLDER}")],
    )
    if checkpoint:
        return checkpoint
    why = [why for one in chosen if (why := next(iter(one.misfits), one.all_damaged))]
    reason = f"{why[0]}, or {ANEW}" if why else f"there is none; {ANEW}"
    runs = f", of {len(why)} runs" if len(why) > 1 else ""
    reason = f"no checkpoint under {config.outputs} fits{runs}: {reason}"
    raise UndefinedCombination(f"resume={LATEST}: {reason}")


def _first_undamaged(
    config: Config, look: Callable[[], list[_CheckpointsOfRun]]
) -> tuple[list[_CheckpointsOfRun], Path | None]:
    """Return the first complete checkpoint, newest run first; retry if a running run removed what was found."""
    candidates: list[_CheckpointsOfRun] = []
    for _ in range(MOST_LOOKS):
        candidates = sorted(look(), key=lambda one: one.saved_at, reverse=True)
        if checkpoint := next(
            filter(None, (one.first_undamaged(config) for one in candidates)), None
        ):
            return candidates, checkpoint
        if not any(one.changed() for one in candidates):
            break
    return candidates, None


class _CheckpointsOfRun:
    """The checkpoints of one run, sorted by the steps in their manifests, most first; file times are ignored."""

    def __init__(self, run: Path) -> None:
        self.readable: list[tuple[Manifest, Path]] = []
        self.damaged: dict[int, str] = {}  # by step
        self.misfits: list[str] = []
        self._folder = run / folders.FOLDER
        self._seen = self._look()
        for checkpoint in folders.complete_checkpoints(run):
            try:
                self.readable.append((read_manifest(checkpoint), checkpoint))
            except CheckpointError as error:
                self._note(checkpoint, str(error))
        self.readable.sort(key=lambda one: one[0].step, reverse=True)
        self.saved_at = max((manifest.saved_at for manifest, _ in self.readable), default=0.0)

    def first_undamaged(self, config: Config) -> Path | None:
        """Return the newest complete checkpoint; None if there is none.

        If the newest one is of another model or has no steps left, older ones do not help, and the result is None.
        """
        for manifest, checkpoint in self.readable:
            if misfit := _why_it_does_not_fit(config, manifest):
                self.misfits.append(misfit)
                return None
            damage = _damage_of(checkpoint, manifest)
            if damage is None:
                for line in self.damaged.values():
                    _say(f"resume={config.resume}: {line}; goes on from {checkpoint}")
                return checkpoint
            self._note(checkpoint, damage)
        return None

    def _note(self, checkpoint: Path, reason: str) -> None:
        if checkpoint.exists():  # otherwise its run has just removed it
            self.damaged[folders.step_of(checkpoint)] = reason.partition(";")[0]

    @property
    def all_damaged(self) -> str | None:
        """Return what is wrong with the newest, where no checkpoint is whole; None if nothing is damaged."""
        if not self.damaged:
            return None
        number = f"{self._folder}: none of {len(self.damaged)} checkpoints can be used"
        return f"{number} (the newest: {self.damaged[max(self.damaged)]}); restore one"

    def changed(self) -> bool:
        """Tell whether the run has saved or removed a checkpoint meanwhile."""
        return self._look() != self._seen

    def _look(self) -> tuple[int, set[str]] | None:
        try:
            return self._folder.stat().st_mtime_ns, set(os.listdir(self._folder))
        except OSError:
            return None


def _damage_of(checkpoint: Path, manifest: Manifest) -> str | None:
    """Check for damage, once for all points of a sweep, since the check reads every byte."""
    try:
        files = (checkpoint, *modification_times(checkpoint, manifest))
    except OSError:
        return find_damage(checkpoint, manifest)
    if files not in _damages:
        _damages[files] = find_damage(checkpoint, manifest)
    return _damages[files]


@cache
def _say(line: str) -> None:
    print(f"zeroexp: {line}", file=sys.stderr)


def _why_it_does_not_fit(config: Config, manifest: Manifest) -> str | None:
    """Return a message about the first difference that keeps the checkpoint from fitting this run, with a remedy."""
    ours, theirs = (
        dict(_decisive_settings(asdict(config))),
        dict(_decisive_settings(manifest.config)),
    )
    for key in (*ours, *theirs):
        if ours.get(key) != theirs.get(key):
            difference = f"{key} is {theirs.get(key)} in it, {ours.get(key)} here"
            return f"{difference}; use the same, or another checkpoint"
    num_steps = config.train.warmup_steps + config.train.steps
    if manifest.step >= num_steps:
        return f"{manifest.step} steps are done, of {num_steps} here; raise train.steps"
    return None


def _decisive_settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
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
