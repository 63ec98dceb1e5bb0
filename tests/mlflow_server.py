"""A real MLflow server for tests, on loopback: `with MlflowServer(folder) as server`, then `server.uri`.

It is what `ui_command` starts, on the store that a sweep keeps in its outputs.
"""

from __future__ import annotations

import os
import shlex
import signal
import sqlite3
import subprocess
import time
import urllib.error
import urllib.request
import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.ports import kept_port
from zeroexp.tracking.mlflow_store import UI_PORT, Store

STARTING_SECONDS = 600.0


class MlflowServer:
    """Can be killed and started again, at the same address on the same database."""

    def __init__(self, folder: Path) -> None:
        kept, self._port = kept_port()
        weakref.finalize(self, kept.close)
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.uri = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> MlflowServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        command = shlex.split(Store(None, "zeroexp", self._folder).ui_command())
        command[command.index(str(UI_PORT))] = str(self._port)
        log = self._folder / "server.log"
        # Else seven more processes import MLflow, for jobs that nobody here gives.
        env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=out, start_new_session=True, cwd=self._folder, env=env
            )
        deadline = time.monotonic() + STARTING_SECONDS
        while not self._is_up():
            assert self._process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)  # it takes its time on anything gentler
            self._process.wait(30)
            self._process = None

    def ask(self, query: str, *arguments: Any) -> list[Any]:
        """Past the server, straight from its tables."""
        with closing(sqlite3.connect(self._folder / "mlflow.db")) as connection:
            return connection.execute(query, arguments).fetchall()

    def losses(self, run: str) -> list[tuple[int, float]]:
        """(step, loss) of every row of a run's, so that one sent twice would show."""
        return self.of_run(run, "step, value from metrics", "key = 'loss' order by step")

    def statuses(self, run: str) -> list[str]:
        """Of all runs of this name: one, if everybody found the same."""
        return [status for (status,) in self.ask("select status from runs where name = ?", run)]

    def of_run(self, run: str, what: str, which: str = "true") -> list[Any]:
        """Rows of a table of metrics, params or tags."""
        owner = "run_uuid in (select run_uuid from runs where name = ?)"
        return self.ask(f"select {what} where {owner} and {which}", run)

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
