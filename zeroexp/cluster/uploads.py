"""What a sweep sends to MLflow: a run when it begins, what it left when it has ended, and now and then in between.

The store is opened while the ranks' server imports torch, since importing mlflow takes seconds too, and the first
point waits for both: what is left of either would fall into its measured steps. A store that is away costs no
point: its complaint is told at the end, with the command that sends what the files of the runs hold.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from zeroexp.config import TrackingConfig
from zeroexp.tracking.mlflow import MlflowTracker

SECONDS_BETWEEN_LOOKS = (
    60.0  # at a run that goes on: a comparison's points are shorter, and nothing disturbs them
)


class Uploads:
    def __init__(self, config: TrackingConfig, outputs: Path, sweep: str) -> None:
        """Raises ConfigError for a store that MLflow refuses."""
        self._tracker = MlflowTracker(config.uri, config.experiment, outputs)
        self._outputs, self._sweep = outputs, sweep
        self._error: Exception | None = None
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._opening = self._thread.submit(self._open)
        self._looking: Future[Any] = self._opening
        self._looked: dict[Path, float] = {}  # time.monotonic() of the last look at each run

    @property
    def failed(self) -> bool:
        return self._error is not None

    def begin(self, folder: Path) -> None:
        """Before its ranks run. If this process is killed, the next sweep finds out and closes the run."""
        self._attempt(lambda: self._tracker.start_run(folder))
        self._looked[folder] = time.monotonic()

    def look(self, folder: Path) -> None:
        """Call it at any time while a run goes on; sends its new steps if it is time, in the background."""
        now = time.monotonic()
        early = now - self._looked.setdefault(folder, now) < SECONDS_BETWEEN_LOOKS
        if self.failed or early or not self._looking.done():
            return
        self._looked[folder] = now
        self._looking = self._thread.submit(self._tracker.log_run, folder)

    def send(self, folder: Path) -> None:
        """All that a run which has ended left behind."""
        self._attempt(lambda: self._tracker.log_run(folder))

    def conclude(self, folder: Path) -> None:
        """Print where to look, or what went wrong and how to send the sweep's folder again."""
        if self._error is not None:
            first = str(self._error).partition("\n")[0]
            print(f"\nMLflow did not take the runs ({type(self._error).__name__}: {first}); later:")
            print(f"  python -m zeroexp.sync {os.path.relpath(folder)}")
            return
        print(f"\nMLflow: {self._tracker.ui_command()}")
        for title, url in self._opening.result():
            print(f"  {title}: {url}")

    def _attempt(self, action: Callable[[], object]) -> None:
        """Nothing once the store has failed."""
        if self.failed:
            return
        try:
            self._opening.result()
            self._looking.result()
            action()
        except Exception as error:  # whatever a database, a server or the network may raise
            self._error = error

    def _open(self) -> list[tuple[str, str]]:
        """Also closes what earlier sweeps that were killed left open; returns the views of this one."""
        self._tracker.close_stale(self._outputs)
        return self._tracker.write_views(self._sweep)
