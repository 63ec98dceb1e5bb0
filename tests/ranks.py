"""A pool of real gloo ranks that stays warm for a test run.

The parent sends each rank a picklable function and its arguments, and gets every rank's return value or the first
exception, with its rank. A server that has torch loaded forks the ranks, so that they hold no threads of the test
process and a new world costs a tenth of a second. After a failure the whole world is thrown away: its peers may be
anywhere in a collective.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from zeroexp.process import world as worlds
from zeroexp.process.world import World

# Far more than anything takes, also on a machine with other work: they end a hang, they measure nothing.
COLLECTIVE_SECONDS = 300  # a hanging collective raises after this
CALL_SECONDS = 600  # the slowest test of all
GRACE_SECONDS = 2  # how long peers may take to answer too, once one rank failed

MANY_FILES = 200  # opened in a rank since the last look: engines of earlier calls are still around

# Said by torch about its own doings, with nothing for us to do about it.
ALLOWED_WARNINGS: list[str] = []


class RankError(AssertionError):
    """The first failure of a rank, with its traceback."""


class Ranks:
    """Worlds by size, made when first asked for."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.preloaded"])
        self._worlds: dict[int, _Pool] = {}

    def __call__(self, function: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
        """`function(world, *args)` on every rank of a world; what each returned, by rank. Raises RankError."""
        pool = self._worlds.get(world_size)
        if pool is None:
            pool = self._worlds[world_size] = _Pool(self._context, world_size)
        try:
            return pool.call(function, args)
        except BaseException:
            del self._worlds[world_size]
            pool.kill()
            raise

    def close(self) -> None:
        for pool in self._worlds.values():
            pool.kill()
        self._worlds.clear()


class _Pool:
    def __init__(self, context: Any, world_size: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            place = worlds.environment_of_rank(worlds.RankInfo(rank, world_size, rank))
            place["ZEROEXP_RENDEZVOUS"] = f"file://{self._folder.name}/meeting"
            process = context.Process(target=_serve, args=(theirs, place), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        message = pickle.dumps((function, args))
        for connection in self._connections:
            connection.send((sys.path, message))
        answers: dict[int, Any] = {}
        failures: list[tuple[int, str]] = []
        waiting = dict(zip(self._connections, range(len(self._connections)), strict=True))
        deadline = time.monotonic() + CALL_SECONDS
        while waiting:
            ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)
                ok, answer = _receive(connection, self._processes[rank])
                if ok:
                    answers[rank] = answer
                else:
                    failures.append((rank, answer))
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failures:
            raise RankError("\n".join(f"rank {rank}: {text}" for rank, text in failures))
        if waiting:
            raise RankError(f"no answer from ranks {sorted(waiting.values())} in {CALL_SECONDS} s")
        return [answers[rank] for rank in sorted(answers)]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join()
            connection.close()
        self._folder.cleanup()


def _receive(connection: Any, process: Any) -> tuple[bool, Any]:
    try:
        ok, message = connection.recv()
    except EOFError:
        process.join()
        return False, f"died with exit code {process.exitcode}"
    return ok, pickle.loads(message) if ok else message


def _serve(connection: Connection, place: dict[str, str]) -> None:
    """What a rank does all its life: join the world once, then answer calls."""
    assert "tests.preloaded" in sys.modules
    os.environ.update(place)
    torch.set_num_threads(1)
    world = worlds.join_process_group(timeout_seconds=COLLECTIVE_SECONDS)
    num_files = _num_open_files()
    while True:
        try:
            sys.path[:], message = connection.recv()
        except EOFError:
            os._exit(0)  # the test run is over, and a peer may be gone already
        connection.send(_answer(world, message))
        if _num_open_files() > num_files + MANY_FILES:
            gc.collect()  # engines are cycles: their sockets and mappings go with them
            num_files = _num_open_files()  # of those that something of a test keeps, by now


def _num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _answer(world: World, message: bytes) -> tuple[bool, Any]:
    try:
        function, args = pickle.loads(message)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for text in ALLOWED_WARNINGS:
                warnings.filterwarnings("ignore", message=text)
            answer = function(world, *args)
        dist.barrier()  # nobody begins the next call while a peer is still in this one
        return True, pickle.dumps(answer)
    except BaseException:  # what pytest raises is no Exception
        return False, traceback.format_exc()
