"""Try one command line in a fork of this process: how it ends, what it says, and what is wrong with that."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

# A fork has what ranks and commands import.
import tests.preloaded  # noqa: F401
from tests.composing import compose_once
from tests.warm import Fork, start_servers_with
from zeroexp import __main__ as zeroexp
from zeroexp.cluster.sweep import Sweep

# A second's work on one rank, where the line says nothing else.
BASE = (
    *(
        "model=tiny",
        "data=synthetic",
        "data.seq_len=16",
        "data.global_batch_size=2",
        "world_size=1",
    ),
    *("train.steps=1", "train.warmup_steps=0", "tracking=files", "cluster.device=cpu"),
)
# Keys of Slurm have a meaning only there; a dry run needs none.
ON_SLURM = ("cluster=slurm", "cluster.dry_run=true", "cluster.rehearse_s=0")
PATIENCE_SECONDS = 300.0  # of a machine with much other work
ACCEPTED, TRACEBACK = 77, 99


class Accepted(BaseException):
    """Every check has passed, and the first rank would start now."""


@dataclass(frozen=True)
class Tried:
    line: tuple[str, ...]
    code: int | None  # None: it stood still
    out: str
    err: str

    @property
    def accepted(self) -> bool:
        return self.code in (0, ACCEPTED)

    @property
    def wrong(self) -> str | None:
        """What no user should meet; None if all is well."""
        if self.code is None:
            return "stands still"
        if self.code == TRACEBACK or "Traceback" in self.out + self.err:
            return "traceback"
        if self.code in (0, ACCEPTED):
            return None
        if self.code != zeroexp.REFUSED:
            return f"exit code {self.code}"
        told = self.err.splitlines()
        if len(told) != 1 or self.out:
            return "more or less than one line"
        if not told[0].startswith("zeroexp: "):
            return "no line of ours"
        return None


def split(words: Sequence[str]) -> list[str]:
    """The arguments of a line: a flag and its value are two, and a value keeps its spaces."""
    return [part for word in words for part in (word.split() if word.startswith("-") else [word])]


def command(words: Sequence[str]) -> list[str]:
    """The line with what it leaves open, so that what is accepted is a second's work."""
    given = split(words)
    own = {word.lstrip("+~").partition("=")[0] for word in given}
    if any(key.startswith("cluster.slurm.") for key in own) and not {"cluster", "--rerun"} & own:
        given = [*(word for word in ON_SLURM if word.partition("=")[0] not in own), *given]
    if "--rerun" in given or any(word.partition("=")[0] in own for word in BASE[:2]):
        base = [word for word in BASE[2:] if word.partition("=")[0] not in own]
        return given if "--rerun" in given else [*base, *given]
    return [*(word for word in BASE if word.partition("=")[0] not in own), *given]


def attempt(words: Sequence[str], *, real: bool) -> Tried:
    """Run the line to its end with `real`, else until its first rank would start."""
    folder = Path(tempfile.mkdtemp(prefix="zeroexp-fuzz-"))
    told = [os.memfd_create(name) for name in ("out", "err")]
    pid = os.fork()
    if pid == 0:
        _be_command(command(words), folder, told, real)
    try:
        code = _wait(pid)
        out, err = (
            Path(f"/proc/self/fd/{fd}").read_text(encoding="utf-8", errors="replace") for fd in told
        )
        return Tried(tuple(words), code, out, err)
    finally:
        for fd in told:
            os.close(fd)
        shutil.rmtree(folder, ignore_errors=True)


def _wait(pid: int) -> int | None:
    pidfd = os.pidfd_open(pid)
    ready, _, _ = select.select([pidfd], [], [], PATIENCE_SECONDS)
    os.close(pidfd)
    if not ready:
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if ready else None


def _be_command(arguments: list[str], folder: Path, told: list[int], real: bool) -> None:
    """In the fork, which never returns."""
    code = TRACEBACK
    try:
        os.setsid()
        os.chdir(folder)
        for number, fd in enumerate(told, start=1):
            os.dup2(fd, number)
        os.environ.update(
            ZEROEXP_CACHE=str(folder / "cache"), HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES=""
        )
        patch = pytest.MonkeyPatch()
        start_servers_with(patch, Fork)
        compose_once(patch)
        if not real:
            patch.setattr(Sweep, "_execute", _accept)
        sys.argv = ["zeroexp", *arguments]
        code = zeroexp.main()
    except Accepted:
        code = ACCEPTED
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _accept(*_: object) -> None:
    raise Accepted
