"""The folders of checkpoints on disk: names, the rename that makes one whole, and what may be removed. No torch.

[Note: attempts] A run may be tried again while ranks of an earlier attempt still live, on a node that was given up as
lost. The newer attempt registers, then removes whatever is being written, then looks for the newest whole checkpoint.
An older one finds at the rename either that it is outdated, or that its folder is gone: it can not commit any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from zeroexp.checkpoint.manifest import MANIFEST, CheckpointError, Manifest, hash_of
from zeroexp.tracking.run import UNFINISHED as GOES_ON
from zeroexp.tracking.run import settled

FOLDER = "checkpoint"  # inside of a run's
LOG = "checkpoints.jsonl"  # beside it: a line for each save, and for each checkpoint that was passed over
ATTEMPT = ".attempt"
PIN = ".pin"
WHOLE = re.compile(r"step-(\d{6,})")
UNFINISHED = ".step-"  # how names of folders begin that are being written, or removed


def newest(run: Path) -> Path | None:
    """The whole checkpoint of most steps in a run folder."""
    folders = whole(run)
    return folders[-1] if folders else None


def whole(run: Path) -> list[Path]:
    """By steps. A folder without manifest is none of ours."""
    found = [path for path in (run / FOLDER).glob("step-*") if WHOLE.fullmatch(path.name)]
    return sorted((path for path in found if (path / MANIFEST).is_file()), key=step_of)


def step_of(checkpoint: Path) -> int:
    match = WHOLE.fullmatch(checkpoint.name)
    assert match is not None, checkpoint
    return int(match[1])


def missing(checkpoint: Path, manifest: Manifest) -> str | None:
    """The first file that is not there or too short, in words with a remedy; what is in them only hashes tell."""
    for file, num_bytes in manifest.file_bytes().items():
        path = checkpoint / file
        if not path.is_file():
            return f"{path}: missing{remedy(checkpoint)}"
        size = path.stat().st_size
        if size < num_bytes:
            return f"{path}: truncated to {size} of {num_bytes} bytes{remedy(checkpoint)}"
    return None


def remedy(checkpoint: Path) -> str:
    """An older checkpoint of the same run, if there is one."""
    there = whole(checkpoint.parent.parent)
    older = [path for path in there if checkpoint in there and step_of(path) < step_of(checkpoint)]
    return f"; use resume={older[-1]}" if older else "; give another checkpoint"


def set_aside(checkpoint: Path) -> Path:
    """Give a damaged one a name under which nobody takes it for whole, and the run saves after the same step again."""
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return checkpoint.rename(aside)


def prepare(run: Path, attempt: int) -> None:
    """Make this attempt the only one that may commit, and remove what earlier ones left unfinished.

    Raises CheckpointError where a newer attempt is registered or the folder can not be written.
    """
    folder = run / FOLDER
    try:
        folder.mkdir(exist_ok=True)
        _refuse_outdated(run, attempt)
        write_durably(folder / f"{ATTEMPT}.{attempt}", str(attempt).encode())
        (folder / f"{ATTEMPT}.{attempt}").replace(folder / ATTEMPT)
        _sync(folder)
        for path in folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(path)
    except OSError as error:
        remedy = "make room there, or set outputs to a folder that can be written"
        raise CheckpointError(f"{folder}: {error.strerror}; {remedy}") from error


def unfinished(run: Path, step: int, attempt: int) -> Path:
    """Where this attempt writes; its ranks share the folder."""
    return run / FOLDER / f"{UNFINISHED}{step:06d}.{attempt}"


def commit(run: Path, step: int, attempt: int) -> Path:
    """One rename: from here on it is whole. Raises CheckpointError for an outdated attempt, OSError."""
    source, target = unfinished(run, step, attempt), run / FOLDER / f"step-{step:06d}"
    _sync(source)
    _refuse_outdated(run, attempt)
    if (
        target / MANIFEST
    ).is_file():  # this run was resumed from it and asked to save before any step
        shutil.rmtree(source)
    else:
        source.rename(target)
        _sync(target.parent)
    return target


def discard(run: Path, step: int, attempt: int) -> None:
    """Of a save that failed: gives back its room on the disk."""
    shutil.rmtree(unfinished(run, step, attempt), ignore_errors=True)


def pin(checkpoint: Path, run: Path) -> None:
    """Keep it until `run`, which begins with it and may wait for long, has ended: its own run thins the others."""
    name = f"{PIN}.{checkpoint.name}.{hash_of([os.fsencode(run)])}"
    with contextlib.suppress(OSError):  # in a folder of somebody else's nothing can be kept
        write_durably(checkpoint.with_name(name), os.fsencode(run))


def _pinned(checkpoint: Path) -> bool:
    """Pins of runs that have ended are removed."""
    for path in checkpoint.parent.glob(f"{PIN}.{checkpoint.name}.*"):
        run = Path(os.fsdecode(path.read_bytes()))
        if run.exists() and settled(run)["status"] in GOES_ON:
            return True
        path.unlink(missing_ok=True)
    return False


def keep_newest(run: Path, count: int) -> None:
    """Remove older ones that nobody waits for. First renamed, so that nobody takes what is half removed for whole."""
    for path in whole(run)[:-count]:
        if _pinned(path):
            continue
        leaving = path.with_name(f".{path.name}.leaving")
        with contextlib.suppress(OSError):  # it is in nobody's way; the next start tries again
            path.rename(leaving)
            shutil.rmtree(leaving)


def log(run: Path, line: dict[str, Any]) -> None:
    with contextlib.suppress(OSError), (run / LOG).open("a") as file:  # a full disk
        file.write(json.dumps(line) + "\n")


def write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _refuse_outdated(run: Path, attempt: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        registered = int((run / FOLDER / ATTEMPT).read_text())
        if registered > attempt:
            newer = f"attempt {registered} of this run has begun"
            raise CheckpointError(f"{run}: {newer}, attempt {attempt} may save no more")


def _sync(folder: Path) -> None:
    """What was created or renamed in a folder survives a power cut only then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
