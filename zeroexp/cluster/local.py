"""This machine as a cluster: it runs one job at a time, whose ranks are forked by a server that imports only once."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

from zeroexp.cluster.job import Job, JobOutcome, ending_of
from zeroexp.config.keys import ClusterConfig, Config, ConfigError
from zeroexp.tracking import failure

# By which a process ends that finds no memory; C++ aborts.
OF_MEMORY = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGKILL)
POLL_SECONDS = 0.05
END_SECONDS = 5.0  # the server's time to end its ranks and itself
PREPARE_SECONDS = 600.0  # its time to import and compile what ranks need, beside cluster.timeout_s
RANK_MAIN = "zeroexp.run.rank:main"


class LocalCluster:
    """A context manager: entering starts the server, leaving (also by Ctrl-C) ends it with all its ranks."""

    _process: subprocess.Popen[bytes]
    _server: Connection

    def __init__(self, config: ClusterConfig, *, rank_main: str = RANK_MAIN) -> None:
        self._config, self._rank_main = config, rank_main

    def __enter__(self) -> LocalCluster:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @property
    def server(self) -> int:
        """The process whose children the ranks are."""
        return self._process.pid

    def try_points(self, configs: Sequence[Config]) -> list[str | None]:
        """Return what check/try_points.py does, from a fork of the server; what it raises is raised here."""
        self._replace_if_dead()
        answer = self._answer_to({"points": list(configs)})
        if "ServerLost" in answer:
            raise ConfigError(f"no point can be tried: {answer['ServerLost']}")
        if isinstance(answer["tried"], BaseException):
            raise answer["tried"]
        return answer["tried"]

    def run(
        self,
        job: Job,
        meanwhile: Callable[[], None] = lambda: None,
        on_event: Callable[[str], None] = print,
    ) -> JobOutcome:
        """Run a job to its end; `meanwhile` is called again and again, and once after it, `on_event` with messages."""
        if self._replace_if_dead():
            on_event("the process that starts ranks has died; starting another")
        limit, self._runs = job.config.cluster.timeout_s + PREPARE_SECONDS, True
        answer = self._answer_to({"run": str(job.folder.resolve())}, limit, meanwhile)
        self._runs = False
        if "ServerLost" in answer:
            failure.write(job.folder, "ServerLost", answer["ServerLost"])
        return JobOutcome(ending_of(answer["ended"], job.failure), job.failure)

    def rehearse(self, job: Job, seconds: float) -> bool:
        """Have a run that has ended rehearsed beside its summary; tell whether that was over in so many seconds."""
        self._replace_if_dead()
        request = {"rehearse": str(job.folder.resolve()), "seconds": seconds}
        return self._answer_to(request, seconds + END_SECONDS).get("rehearsed", False)

    def _replace_if_dead(self) -> bool:
        """Start another server where this one has died; return whether it had."""
        if self._process.poll() is None:
            return False
        self._close()
        self._start()
        return True

    def _answer_to(
        self,
        request: dict[str, Any],
        timeout_seconds: float = math.inf,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Return the server's answer, or what became of the server; call `meanwhile` again and again until then."""
        with suppress(ConnectionError):  # it has ended, which the wait for its answer tells
            self._server.send(request)
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            answer = self._receive(POLL_SECONDS)
            meanwhile()
            if answer:
                return answer
        self._kill()
        lost = f"the process that starts ranks gave no answer for {timeout_seconds:.0f} s"
        return {"ended": "failed", "ServerLost": lost}

    def _start(self) -> None:
        self._server, theirs = Pipe()
        command = [sys.executable, "-m", "zeroexp.cluster.forkserver", str(theirs.fileno())]
        self._process = subprocess.Popen(
            [*command, self._rank_main],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                **thread_variables(self._config),
                # Asking CUDA itself for its devices makes a context.
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            },
            start_new_session=True,  # only this process handles Ctrl-C
        )
        theirs.close()
        self._runs = False  # a job, whose ranks the server ends before itself

    def _receive(self, timeout_seconds: float) -> dict[str, Any] | None:
        """Return the server's answer, or None if there is none yet."""
        try:
            return self._server.recv() if self._server.poll(timeout_seconds) else None
        except (EOFError, ConnectionError):
            code = self._process.wait()
            how = f"ended with code {code}"
            if code < 0:
                how = f"was ended by {signal.Signals(-code).name}"
                if -code in OF_MEMORY:
                    how += ", as where memory is short; look at `ulimit -v` and `free -h`"
            return {"ended": "failed", "ServerLost": f"the process that starts ranks {how}"}

    def _close(self) -> None:
        """Close the connection, upon which the server kills its ranks and ends; one without ranks is killed."""
        self._server.close()
        if self._runs:
            with suppress(subprocess.TimeoutExpired):  # it still imports, and has no ranks yet
                self._process.wait(END_SECONDS)
        if self._process.poll() is None:
            self._kill()

    def _kill(self) -> None:
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # whoever looks next is to see that it is gone
            self._process.wait(END_SECONDS)


def thread_variables(config: ClusterConfig) -> dict[str, str]:
    """Return the environment of ranks by which libraries make as many threads as asked, by default one."""
    threads = str(config.threads_per_rank)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
