"""owner.json in a sweep's folder names the process that runs its points on this machine, and a lock tells if it lives.

A process that is killed leaves the file behind, but not the lock that it held. Readers of a point with the status
running find out so that nobody runs it, and `--rerun` takes the sweep over. Nothing is known of an owner on another
host, whose locks may not reach here, nor where the file system has no locks. Points that
Slurm has need no owner: a sweep that has submitted all its points is free for `--rerun` while it follows them.
"""

from __future__ import annotations

import io
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from zeroexp.config.keys import ConfigError
from zeroexp.process import locks
from zeroexp.tracking.json_files import read_json, remove_unfinished, write_json

OWNER = "owner.json"
LOCK = f".{OWNER}.lock"
LOOK_S = 1.0  # between two looks whether an owner has given up
WITHOUT_LOCKS = "no lock tells whether it still does, since the file system has none (flock); if it has ended, remove"

# The sweeps that this process owns, each with the open file that holds its lock, if there are locks.
_owned: dict[Path, io.FileIO | None] = {}


@dataclass(frozen=True)
class Owner:
    host: str
    pid: int
    locked: bool  # it held the lock when it wrote this

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @classmethod
    def of(cls, sweep: Path) -> Owner | None:
        content = read_json(sweep / OWNER)
        return None if content is None else cls(**content)


class OwnerLives(ConfigError):
    """Another process holds the lock."""


def take_ownership(sweep: Path) -> None:
    """Make this process the owner. Raises ConfigError if another owner may still be alive: OwnerLives if it is."""
    sweep = sweep.resolve()
    if sweep in _owned:
        return
    try:
        held, has_locks = locks.take(sweep / LOCK), True
    except locks.NoLocks:
        held, has_locks = None, False
    before, here, refusal = Owner.of(sweep), socket.gethostname(), None
    if has_locks and held is None:
        living = f"{before or 'another process'} runs its points; wait for it or end it"
        raise OwnerLives(f"{sweep}: {living}")
    if before and before.host != here:
        remedy = f"if that machine is gone, remove {sweep / OWNER}"
        refusal = f"{before} runs its points; wait for it or end it; {remedy}"
    elif before and not (before.locked and has_locks):
        refusal = f"{before} ran its points, and {WITHOUT_LOCKS} {sweep / OWNER}"
    if refusal:
        if held:
            held.close()
        raise ConfigError(f"{sweep}: {refusal}")
    _owned[sweep] = held
    if held:
        remove_unfinished(sweep)
    write_json(sweep / OWNER, asdict(Owner(here, os.getpid(), locked=has_locks)))


def wait_for_ownership(sweep: Path) -> None:
    """Make this process the owner as soon as another one, which lives, has given the sweep up. Raises ConfigError."""
    told = False
    while True:
        try:
            return take_ownership(sweep)
        except OwnerLives as error:
            if not told:
                print(f"zeroexp: {error} (this command waits)", file=sys.stderr, flush=True)
            told = True
            time.sleep(LOOK_S)


def release_ownership(sweep: Path) -> None:
    """Give the sweep up, if it is this process's."""
    sweep = sweep.resolve()
    if sweep in _owned:
        (sweep / OWNER).unlink(missing_ok=True)
        if held := _owned.pop(sweep):
            held.close()


def death_of_owner(run: Path) -> str | None:
    """Return a message if the process that was to run this point is known to be dead; else None."""
    owner = Owner.of(run.parent)
    if owner and owner.locked and owner.host == socket.gethostname():
        with suppress(locks.NoLocks, PermissionError):
            if not locks.is_held(run.parent / LOCK):
                return f"{owner}, which ran it, has died"
    return None
