"""The folders of checkpoints on disk: their names, the rename that completes one, and what may be removed. No torch.

[Note: attempts] A run may be tried again while ranks of an earlier attempt still live, on a node that was given up as
lost. The newer attempt is in attempts.json before its ranks start; then it removes all unfinished folders, then looks
for the newest complete checkpoint. At its rename, an older attempt finds either that it is outdated or that its folder
is gone, so it cannot commit any more.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zeroexp.checkpoint.manifest import MANIFEST, WHOLE, CheckpointError, Manifest
from zeroexp.config.keys import ConfigError, DamagedFile
from zeroexp.process import locks
from zeroexp.process.content_hash import hash_of
from zeroexp.process.durable import appearing, replace_durably, sync
from zeroexp.tracking import attempt as attempts
from zeroexp.tracking.run import UNFINISHED as GOES_ON
from zeroexp.tracking.run import state_of

FOLDER = "checkpoint"  # inside the run's folder
# This file in the run's folder has one line for each save and for each checkpoint that was passed over.
LOG = "checkpoints.jsonl"
PIN = ".pin"
UNFINISHED = ".step-"  # prefix of folders that are being written or removed


def newest_checkpoint(run: Path) -> Path | None:
    """Return the complete checkpoint with the most steps in a run folder."""
    folders = complete_checkpoints(run)
    return folders[-1] if folders else None


def complete_checkpoints(run: Path) -> list[Path]:
    """Return the complete checkpoints, sorted by steps. A folder without a manifest is ignored."""
    whole = [path for path in (run / FOLDER).glob("step-*") if WHOLE.fullmatch(path.name)]
    return sorted((path for path in whole if (path / MANIFEST).is_file()), key=step_of)


def step_of(checkpoint: Path) -> int:
    match = WHOLE.fullmatch(checkpoint.name)
    assert match is not None, checkpoint
    return int(match[1])


def find_missing_file(checkpoint: Path, manifest: Manifest) -> str | None:
    """Return a message about the first file that is missing or too short; contents are not checked."""
    for file, num_bytes in manifest.file_bytes().items():
        path = checkpoint / file
        try:
            size = path.stat().st_size
        except OSError as error:
            return f"{path}: {error.strerror}"
        if size < num_bytes:
            return f"{path}: truncated to {size} of {num_bytes} bytes"
    return None


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that nobody takes it for complete and the run can save this step again."""
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return checkpoint.rename(aside)


def refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise ConfigError(f"--to={target}: exists already; choose another folder, or remove it")


@contextlib.contextmanager
def filled_or_removed(target: Path) -> Iterator[Path]:
    """Yield a folder to fill, which gets the name `target` once it is whole, and is removed after an error.

    Raises ConfigError where it can not be written.
    """
    try:
        with appearing(target) as folder:
            yield folder
            for path in folder.rglob("*"):
                sync(path)
    except Exception as error:
        if (reason := _failure_of_the_disk(error)) is None:
            raise
        remedy = _remedy(reason, "set --to to a folder that can be made")
        raise ConfigError(f"--to={target}: {reason.strerror or reason}; {remedy}") from error


def _failure_of_the_disk(error: BaseException | None) -> OSError | None:
    """Return the error of a file, also where torch fails once more as it closes what could not be written."""
    if isinstance(error, RuntimeError) and "unexpected pos" in str(error):  # by its writer in C++
        closed = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return _failure_of_the_disk(error.__context__) or closed
    return error if isinstance(error, OSError) else None


def clear_unfinished(run: Path, attempt: int) -> None:
    """Make the folder of checkpoints, and remove from it what earlier attempts have not finished.

    Raises CheckpointError if a newer attempt has begun or the folder cannot be written.
    """
    folder = run / FOLDER
    try:
        folder.mkdir(exist_ok=True)
        _refuse_outdated(run, attempt)
        tempfile.TemporaryFile(dir=folder).close()
        for path in folder.glob(f"{UNFINISHED}*"):
            # A rank of the older attempt may still write there; the next start removes what it leaves.
            shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        remedy = _remedy(error, "set outputs to a folder that can be written")
        raise CheckpointError(f"{folder}: {error.strerror}; {remedy}") from error


def _remedy(error: OSError, another: str) -> str:
    is_room = error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS)
    return f"make room there, or {another}" if is_room else another


def unfinished_folder(run: Path, step: int, attempt: int) -> Path:
    """Return the folder in which all ranks of this attempt write."""
    return run / FOLDER / f"{UNFINISHED}{step:06d}.{attempt}"


def commit(run: Path, step: int, attempt: int) -> Path:
    """Complete the checkpoint by one rename. Raises OSError, and CheckpointError for an outdated attempt."""
    source, target = unfinished_folder(run, step, attempt), run / FOLDER / f"step-{step:06d}"
    sync(source)
    _refuse_outdated(run, attempt)
    if (target / MANIFEST).is_file():  # the run resumed from this step and saved before any other
        shutil.rmtree(source)
    else:
        source.rename(target)
        sync(target.parent)
    return target


def pin(checkpoint: Path, run: Path) -> None:
    """Keep the checkpoint until `run`, which may wait long before it starts from it, has ended.

    Without a pin, the run that saved the checkpoint removes it once it has newer ones.
    """
    name = f"{PIN}.{checkpoint.name}.{hash_of([os.fsencode(run)])}"
    with contextlib.suppress(OSError):  # another user's folder may not be writable
        replace_durably(checkpoint.with_name(name), os.fsencode(run))
        for path in checkpoint.parent.glob(f"{PIN}.*"):
            _holds(path)  # the run that saved here may have ended, and removes no pin any more


@contextlib.contextmanager
def kept(checkpoint: Path) -> Iterator[None]:
    """Keep the checkpoint while this process reads it, or makes a run that will: a pin without a run, which is locked.

    It is locked before it has its name, by which others would remove it.
    """
    reader = f"{socket.gethostname()}.{os.getpid()}"
    beside = checkpoint.with_name(f".taken{PIN}.{checkpoint.name}.{reader}")
    with contextlib.ExitStack() as at_end:
        with contextlib.suppress(OSError):  # no locks, or another user's folder
            at_end.callback(_unlink, beside)
            if held := locks.take(beside):
                at_end.enter_context(held)
                pinned = beside.rename(checkpoint.with_name(f"{PIN}.{checkpoint.name}.{reader}"))
                at_end.callback(_unlink, pinned)
        yield


def _unlink(path: Path) -> None:
    # A file system that is only read refuses it, also of what is not there.
    with contextlib.suppress(OSError):
        path.unlink()


def _holds(path: Path) -> bool:
    """Tell whether the run of this pin has not ended, or its reader; remove the pin if it has.

    One that can not be read, or whose run can not, holds.
    """
    try:
        name = os.fsdecode(path.read_bytes())
        if name and Path(name).exists() and state_of(Path(name))["status"] in GOES_ON:
            return True
        if not name and locks.is_held(path):
            return True
        path.unlink()
    except FileNotFoundError:  # another command has removed it meanwhile
        return False
    except (OSError, DamagedFile):
        return True
    return False


def keep_newest(run: Path, count: int) -> None:
    """Remove older checkpoints without pins; the rename comes first, so that no half-removed folder looks complete."""
    for path in complete_checkpoints(run)[:-count]:
        if any(map(_holds, path.parent.glob(f"{PIN}.{path.name}.*"))):
            continue  # a run that has not ended waits for it
        leaving = path.with_name(f".{path.name}.leaving")
        # The remains disturb nobody, and the next start removes them.
        with contextlib.suppress(OSError):
            path.rename(leaving)
            shutil.rmtree(leaving)


def append_to_log(run: Path, line: dict[str, Any]) -> None:
    # The disk may be full.
    with contextlib.suppress(OSError), (run / LOG).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _refuse_outdated(run: Path, attempt: int) -> None:
    if (newest := attempts.newest(run)) > attempt:
        newer = f"attempt {newest} of this run has begun"
        raise CheckpointError(f"{run}: {newer}, attempt {attempt} may save no more")
