"""Send a sweep to MLflow: a run when it begins, its files when it has ended, and its steps now and then in between.

The first point waits until the store is open, since importing mlflow for a second would disturb its measured steps, but
only while the store's thread uses the CPU. A store that is away, locked or hangs costs no point and no second Ctrl-C:
its error is printed at the end, with the command that sends the files of the runs.
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Queue

from zeroexp.config.keys import DamagedFile, TrackingConfig, load
from zeroexp.measure.formats import NewerFormat
from zeroexp.process import signals
from zeroexp.process.server_address import without_password
from zeroexp.tracking.mlflow import MlflowTracker
from zeroexp.tracking.run import read_state

SECONDS_BETWEEN_LOOKS = 60.0  # at a run; a comparison's shorter points stay undisturbed
STILL_SECONDS = 3.0  # without CPU use, after which a point no longer waits for the store
END_SECONDS = 30.0  # the same, at the end of a sweep
WORK_SECONDS = 0.02  # of CPU time: less counts as no work
POLL_SECONDS = 0.05


class Uploads:
    def __init__(self, config: TrackingConfig, outputs: Path, sweep: str) -> None:
        """Raises ConfigError for a store that MLflow refuses."""
        self._tracker = MlflowTracker(config.uri, config.experiment, outputs)
        self._views: list[tuple[str, str]] = []
        self._worker = _Worker()
        self._looked: dict[Path, float] = {}  # time.monotonic() of the last look at each run
        self._worker.do(lambda: self._views.extend(self._tracker.write_views(sweep)))

    @property
    def failed(self) -> bool:
        return self._worker.error is not None

    def has_begun(self, folder: Path) -> bool:
        """Whether the store has heard of the run, or is about to, and not of its end."""
        return folder in self._looked

    def begin(self, folder: Path) -> None:
        """Start the MLflow run before its ranks run; if this process is killed, --rerun or a sync closes the run."""
        self._looked[folder] = time.monotonic()
        self._worker.do(lambda: self._tracker.log_run(folder))
        self._worker.wait(STILL_SECONDS)

    def look(self, folder: Path) -> None:
        """Send a run's new steps in the background, if it is time; call this at any time while the run goes on."""
        now = time.monotonic()
        early = now - self._looked.setdefault(folder, now) < SECONDS_BETWEEN_LOOKS
        if not early and self._worker.idle():
            self._looked[folder] = now
            self._worker.do(lambda: self._tracker.log_run(folder))

    def send(self, folder: Path) -> None:
        """Send all files of an ended run."""
        self._looked.pop(folder, None)
        self._worker.do(lambda: self._tracker.log_run(folder))
        self._worker.wait(STILL_SECONDS)

    def conclude(self, folder: Path, *, with_page: bool = True) -> None:
        """Send the sweep's page and print the addresses, or the error and the command that sends the folder again."""
        if with_page:
            self._worker.do(lambda: self._send_page(folder))
        if not self._worker.wait(END_SECONDS, at_end=True) and not self.failed:
            where = self._tracker.store.waits_for or "the store"
            self._worker.error = TimeoutError(f"no answer from {where}")
        if (error := self._worker.error) is not None:
            first = without_password(str(error).partition("\n")[0]) or type(error).__name__
            print(f"\nMLflow did not take the runs ({first}); to send them:")
            print(f"  zeroexp sync {shlex.quote(os.path.relpath(folder))}")
            return
        for key, why in self._tracker.store.refused.items():
            print(f"\nMLflow did not take {key}, and all else: {without_password(why)[:200]}")
        print(f"\nMLflow: {self._tracker.store.ui_command()}")
        for title, url in self._views:
            print(f"  {title}: {url}")

    def _send_page(self, folder: Path) -> None:
        if (address := self._tracker.log_page(folder)) is not None:
            self._views.append(("report", address))


class UploadsOfSweep:
    """The uploads of each run of a sweep, of which one may name another store or experiment than the next."""

    def __init__(self) -> None:
        self._by_run: dict[Path, Uploads | None] = {}
        self._by_store: dict[tuple[str | None, str], Uploads] = {}

    def of(self, folder: Path) -> Uploads | None:
        """Return a run's uploads, None where MLflow does not track it. Each step asks, so its config is read once."""
        if folder not in self._by_run:
            tracking, uploads = load(folder / "config.yaml").tracking, None
            if tracking.mlflow and read_state(folder)["status"] != "skipped":
                store = tracking.uri, tracking.experiment
                if (uploads := self._by_store.get(store)) is None:
                    uploads = Uploads(tracking, folder.parents[1], folder.parent.name)
                    self._by_store[store] = uploads
            self._by_run[folder] = uploads
        return self._by_run[folder]

    def look(self, folder: Path) -> None:
        if uploads := self.of(folder):
            uploads.look(folder)

    def send(self, folder: Path) -> None:
        if uploads := self.of(folder):
            uploads.send(folder)

    def has_begun(self, folder: Path) -> bool:
        uploads = self._by_run.get(folder)
        return uploads is not None and uploads.has_begun(folder)

    def conclude(self, sweep: Path) -> None:
        """Conclude each store; the page goes to that of the first run."""
        for number, uploads in enumerate(self._by_store.values()):
            uploads.conclude(sweep, with_page=number == 0)

    @property
    def num_stores(self) -> int:
        return len(self._by_store)

    @property
    def failed(self) -> bool:
        return any(uploads.failed for uploads in self._by_store.values())


class _Worker:
    """A thread that runs one action after the other, and no more once one has failed. It ends with the process,
    whatever it waits for.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._to_do: Queue[Callable[[], object]] = Queue()
        self._stands_still = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def do(self, action: Callable[[], object]) -> None:
        self._to_do.put(action)

    def idle(self) -> bool:
        return not self._to_do.unfinished_tasks

    def wait(self, still_seconds: float, *, at_end: bool = False) -> bool:
        """Wait until all is done, no work was done for `still_seconds`, or the user is impatient.

        Returns False if not all is done. A worker that once stood still is waited for only with `at_end`.
        """
        if self._stands_still and not at_end and not self.idle():
            return False
        worked, since = self._cpu_seconds(), time.monotonic()
        while not self.idle():
            if self._cpu_seconds() - worked > WORK_SECONDS:
                worked, since = self._cpu_seconds(), time.monotonic()
            self._stands_still = time.monotonic() - since > still_seconds
            if self._stands_still or signals.was_asked_twice():
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _cpu_seconds(self) -> float:
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def _work(self) -> None:
        while True:
            action = self._to_do.get()
            try:
                if self.error is None:
                    action()
            except (DamagedFile, NewerFormat) as error:  # of one run: the others are sent
                print(f"zeroexp: MLflow lacks a run: {error}", file=sys.stderr)
            except Exception as error:  # a database, a server or the network may raise anything
                self.error = error
            self._to_do.task_done()
