"""Commands of ours as processes that begin with everything imported: forks of the server that forks ranks of tests.

`zeroexp` imports for half a second and the server of its ranks for four, and no test that uses this is about
either. Those that are start an interpreter: tests/cluster/test_local.py, tests/test_rank.py, tests/test_configs.py, and
the matrix of tests/cluster/test_sweep.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import runpy
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


class Warm:
    """What tests ask of subprocess.Popen, for the command [sys.executable, "-m", a module of ours, words ...].

    `forks`: the command starts processes by multiprocessing, so that whoever made it must wait for its end.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: dict[str, str],
        cwd: Path | None = None,
        pass_fds: Sequence[int] = (),
        forks: bool = False,
        **_: Any,  # its input is empty and it begins a session, whether asked to or not
    ) -> None:
        self.args = command
        self._told = [os.memfd_create(name) for name in ("output", "errors")]
        for fd in self._told:
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)  # else ranks write over one another's lines
        weakref.finalize(self, lambda told: [os.close(fd) for fd in told], self._told)
        descriptors = [_Descriptor(fd) for fd in (*self._told, *pass_fds)]
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(
            target=_be_command,
            args=(command, env, cwd or Path.cwd(), descriptors),
            daemon=not forks,  # else multiprocessing would let it start none
        )
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        output, errors = (
            Path(f"/proc/self/fd/{fd}").read_text(encoding="utf-8") for fd in self._told
        )
        return output, errors

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(self._process.pid or 0, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Fork:
    """What zeroexp.cluster.local asks of subprocess.Popen for the server of ranks, in a fork of a warm command."""

    def __init__(
        self, command: Sequence[str], *, env: dict[str, str], pass_fds: Sequence[int], **_: Any
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            first = 3
            for fd in (*sorted(pass_fds), os.sysconf("SC_OPEN_MAX")):
                os.closerange(first, fd)
                first = fd + 1
            try:
                _run(command, env, Path.cwd())
            except SystemExit as error:
                os._exit(int(error.code or 0))
            except BaseException:
                sys.excepthook(*sys.exc_info())
            os._exit(1)
        self._pidfd = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("server", timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


def start_servers_with(patch: pytest.MonkeyPatch, popen: type[Warm] | type[Fork]) -> None:
    """The server of a LocalCluster's ranks, as long as `patch` lives."""
    words = {name: getattr(subprocess, name) for name in ("DEVNULL", "TimeoutExpired")}
    patch.setattr("zeroexp.cluster.local.subprocess", SimpleNamespace(Popen=popen, **words))


class _Descriptor:
    """One that a process gets when it starts, under a number of its own."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> tuple[int, Any]:
        return self.number, DupFd(self.number)

    def __setstate__(self, state: tuple[int, Any]) -> None:
        self.number, received = state
        self.here = received.detach()


def _be_command(
    command: Sequence[str], env: dict[str, str], cwd: Path, descriptors: Sequence[_Descriptor]
) -> None:
    """In the process that was forked. How it ends is what multiprocessing tells: a code, or the signal."""
    for number, file in enumerate(descriptors[:2], start=1):
        os.dup2(file.here, number)
    passed = {str(each.number): str(each.here) for each in descriptors[2:]}
    start_servers_with(pytest.MonkeyPatch(), Fork)
    _run([passed.get(word, word) for word in command], env, cwd)


def _run(command: Sequence[str], env: dict[str, str], cwd: Path) -> None:
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    paths = [str(cwd), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
    _, _, module, *words = command
    sys.argv = [module, *words]
    for name in (module, f"{module}.__main__"):  # what is run is a module of its own
        if not hasattr(sys.modules.get(name), "__path__"):
            sys.modules.pop(name, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
