"""Send run folders to MLflow as runs and saved views of one experiment; tracking reaches MLflow only through this file.

Everything is made from the files of a run. So no measured rank calls anything here, sending again writes the same rows,
and a store that was away can be filled later. Importing mlflow takes two seconds and happens on first use.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shlex
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from yaml import YAMLError

from zeroexp.config import Config, ConfigError
from zeroexp.measure.record import StepRecord
from zeroexp.network import answers, without_password
from zeroexp.tracking import entries, views
from zeroexp.tracking.files import read_timed_records
from zeroexp.tracking.link import LINK, Link, attempt_of
from zeroexp.tracking.run import Run, read_run

if TYPE_CHECKING:
    from mlflow import MlflowClient

Item = TypeVar("Item")

SQLITE = "sqlite:///"
SERVERS = ("http://", "https://")
DATABASES = ("postgresql", "mysql", "mssql")
STORE = "MLFLOW_TRACKING_URI"
VERSION = "select version_num from alembic_version"
METRICS_PER_CALL = 500
PARAMS_PER_CALL = 100  # a server's limit
UI_PORT = 5000
PAGE = "report.html"  # of a sweep's folder, see report/page
PAGE_OF = "report_of"  # the tag of the run that holds it; `sweep` would show it among the points
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, YAMLError)
# MLflow's own limits are minutes: 7 retries of 120 s. Whatever a store does not accept now is sent later.
CLIENT_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # seconds
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}


class MlflowTracker:
    """One experiment of one store. It is cheap to make: the store is opened, and created if necessary, on first use."""

    def __init__(
        self, uri: str | None, experiment: str, outputs: Path | str = Path("outputs")
    ) -> None:
        """`uri` None means a sqlite file in `outputs`. Raises ConfigError for a store that MLflow refuses."""
        self.uri = store_uri(uri, Path(outputs))
        self.shown = without_password(self.uri)
        self.experiment = experiment
        self.waits_for: str | None = None  # the lock it waits for now
        self._client: MlflowClient | None = None
        # Maps key -> reason for the entries that MLflow refused; all others were sent.
        self.refused: dict[str, str] = {}
        self._sent: dict[str, set[int]] = {}  # sent steps by run id

    def start_run(self, folder: Path, tags: Mapping[str, str] | None = None) -> str:
        """Return the id of the run folder's MLflow run; the first call creates the run, later calls reopen it.

        A run that is repeated from its start becomes a new one; the old one leaves the views of the sweep.
        """
        with self._locked(folder / f".{LINK}.lock"):
            link = Link.read(folder)
            if link is None or not self._has(link):
                link = self._create_run(folder)
            elif link.attempt != attempt_of(folder):
                self._send(link.run_id, tags={"sweep": f"{folder.parent.name}/earlier"})
                link = self._create_run(folder)
            elif link.closed:
                with self._store() as client:
                    client.update_run(link.run_id, status=entries.RUNNING)
            replace(link, closed=False).write(folder)
        if tags:
            self._send(link.run_id, tags=tags)
        return link.run_id

    def log_run(
        self, folder: Path, status: str | None = None, tags: Mapping[str, str] | None = None
    ) -> str | None:
        """Send everything the folder holds; call this at any time, also while the run goes on.

        This object remembers which steps it has sent; another object sends the same rows again. `status` is one of
        state.json's words, by default the one in that file; a final status closes the run. Returns the id of the MLflow
        run, or None for a skipped point, which never was a run.
        """
        run, records = read_run(folder), read_timed_records(folder)
        status = status or run.status
        if status == "skipped":
            return None
        run_id = self.start_run(folder)
        ended = entries.ended(run, status, records)
        summary = [] if run.summary is None else entries.summary_entries(ended, run.summary)
        self.log_steps(run_id, records)
        self._send(
            run_id, summary, entries.params(run), {**entries.tags(run, status), **(tags or {})}
        )
        if entries.MLFLOW_STATUS[status] != entries.RUNNING:
            self._send(run_id, entries.system_entries(folder))
            self._note_data(run_id, run)
            self._close(folder, run_id, entries.MLFLOW_STATUS[status], ended)
        return run_id

    def log_page(self, sweep: Path) -> str | None:
        """Send the page of a sweep, as the artifact of a run of its own that no view of points shows.

        Return the address at which MLflow shows it; None without a page. Sent again, it replaces the old one.
        """
        page = sweep / PAGE
        if not page.exists():
            return None
        link = Link.read(sweep)
        if link is None or not self._has(link):
            experiment_id, title = self._experiment_id, f"{sweep.name}: report"
            with self._store() as client:
                tags = {PAGE_OF: sweep.name, "status": "done"}
                made = client.create_run(experiment_id, tags=tags, run_name=title)
            link = Link(self.shown, experiment_id, made.info.run_id, 0, closed=True)
            link.write(sweep)
        with self._store() as client:
            client.log_artifact(link.run_id, str(page))
            client.set_terminated(link.run_id, entries.FINISHED)
        place = f"experiments/{link.experiment_id}/runs/{link.run_id}/artifacts/{PAGE}"
        return f"{self._base}/#/{place}"

    def log_steps(self, run_id: str, records: Sequence[tuple[float, StepRecord]]) -> None:
        """Send those of the steps (Unix seconds of writing, record) that this object has not sent yet."""
        sent = self._sent.setdefault(run_id, set())
        new = [(at, record) for at, record in records if record.step not in sent]
        self._send(run_id, [e for at, record in new for e in entries.step_entries(at, record)])
        sent.update(record.step for _, record in new)

    def close_stale(self, outputs: Path) -> list[Path]:
        """Close the ended runs below `outputs` that MLflow takes for running; return their folders.

        A run has also ended if its sweep died. The files of such a run are sent too.
        """
        return [
            path.parent for path in sorted(outputs.rglob(LINK)) if self._close_if_stale(path.parent)
        ]

    def write_views(self, sweep: str) -> list[tuple[str, str]]:
        """Save the views of a sweep in the experiment; return (title, link) for each."""
        experiment_id, saved = self._experiment_id, views.of_sweep(sweep)
        with self._store() as client:
            tags = client.get_experiment(experiment_id).tags
            for view in saved:
                client.set_experiment_tag(experiment_id, view.tag, view.envelope(time.time()))
            for tag in views.outdated(tags, sweep):
                client.delete_experiment_tag(experiment_id, tag)
        return [(view.title, view.url(self._base, experiment_id)) for view in saved]

    @property
    def _base(self) -> str:
        """The address of the server, or of the one that `ui_command` starts."""
        return self.shown if self.uri.startswith(SERVERS) else f"http://127.0.0.1:{UI_PORT}"

    def _note_data(self, run_id: str, run: Run) -> None:
        """Record what the run trained on as MLflow's data set of it; doing so again changes nothing."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        if (known := entries.dataset(run)) is None:
            return
        context = [InputTag("mlflow.data.context", "training")]
        name, digest, kind, source = known
        made = DatasetInput(Dataset(name, digest, kind, source), context)
        with self._store() as client:
            client.log_inputs(run_id, datasets=[made])

    def ui_command(self) -> str:
        """Return the command that shows the runs; for a running server, its address."""
        if self.uri.startswith(SERVERS):
            return self.shown
        python, uri = shlex.quote(sys.executable), shlex.quote(self.shown)
        return f"{python} -m mlflow ui --backend-store-uri {uri} --port {UI_PORT} --workers 1"

    @contextmanager
    def _store(self) -> Iterator[MlflowClient]:
        """Open the store; all access goes through this. Not reentrant.

        One process at a time may use a sqlite file: the first one creates the tables, and none fails after waiting too
        long for another.
        """
        local = self.uri.startswith(SQLITE)
        with self._locked(Path(f"{_database(self.uri)}.lock")) if local else nullcontext():
            if self._client is None:
                self._client = _open_client(self.uri)
            yield self._client

    @contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """Hold a lock among all processes of this host; the system releases it when its holder dies."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            self.waits_for = f"{path}, which another process holds"
            fcntl.flock(file, fcntl.LOCK_EX)
            self.waits_for = None
            yield

    @cached_property
    def _experiment_id(self) -> str:
        with self._store() as client:
            found = client.get_experiment_by_name(self.experiment)
            if found is None:
                return self._create_experiment(client)
        if found.lifecycle_stage != "active":
            raise ConfigError(
                f"tracking.experiment={self.experiment} was deleted in MLflow; restore it with "
                f"`mlflow experiments restore -x {found.experiment_id}` or choose another name"
            )
        return found.experiment_id

    def _create_experiment(self, client: MlflowClient) -> str:
        # Relative artifact locations would depend on the folder in which the UI is started.
        location = None
        if self.uri.startswith(SQLITE):
            location = (_database(self.uri).parent / "mlartifacts" / self.experiment).as_uri()
        # Without this kind, the UI opens its view for agents.
        kind = {"mlflow.experimentKind": "custom_model_development"}
        return client.create_experiment(self.experiment, location, kind)

    def _has(self, link: Link) -> bool:
        """Does this store have the run? It may belong to another store, or have been deleted."""
        from mlflow.exceptions import MlflowException

        if link.uri != self.shown:
            return False
        with self._store() as client:
            try:
                return client.get_run(link.run_id).info.lifecycle_stage == "active"
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                return False

    def _create_run(self, folder: Path) -> Link:
        run = read_run(folder)
        experiment_id = self._experiment_id
        with self._store() as client:
            made = client.create_run(
                experiment_id,
                start_time=int(entries.began(run) * 1000),
                tags=entries.tags(run, "running"),
                run_name=run.name,
            )
        return Link(self.shown, experiment_id, made.info.run_id, attempt_of(folder))

    def _send(
        self,
        run_id: str,
        metrics: Sequence[entries.Entry] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        from mlflow.entities import Metric, Param, RunTag

        with self._store() as client:
            for batch in _batches([Metric(*entry) for entry in metrics], METRICS_PER_CALL):
                self._log(batch, lambda some: client.log_batch(run_id, metrics=some))
            told = [Param(*item) for item in (params or {}).items()]
            for batch in _batches(told, PARAMS_PER_CALL):
                self._log(batch, lambda some: client.log_batch(run_id, params=some))
            for batch in _batches(
                [RunTag(*item) for item in (tags or {}).items()], PARAMS_PER_CALL
            ):
                self._log(batch, lambda some: client.log_batch(run_id, tags=some))

    def _log(self, items: Sequence[Any], log: Callable[[Sequence[Any]], object]) -> None:
        """Log all items at once; if MLflow refuses, log them one by one, so that only the refused ones are lost."""
        from mlflow.exceptions import MlflowException

        try:
            log(items)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            if len(items) == 1:
                self.refused[items[0].key] = str(error).partition("\n")[0]
            else:
                for item in items:
                    self._log([item], log)

    def _close(self, folder: Path, run_id: str, status: str, ended: float) -> None:
        with self._store() as client:
            for path in entries.artifacts(folder):
                if path.is_dir():
                    client.log_artifacts(run_id, str(path), path.name)
                else:
                    client.log_artifact(run_id, str(path))
            client.set_terminated(run_id, status, int(ended * 1000))
        link = Link.read(folder)
        assert link is not None
        replace(link, closed=True).write(folder)

    def _close_if_stale(self, folder: Path) -> bool:
        link = Link.read(folder)
        if link is None or link.closed:
            return False
        try:
            ended = entries.MLFLOW_STATUS[read_run(folder).status] != entries.RUNNING
            read_timed_records(folder)
        except UNREADABLE:  # one unreadable run must not keep another sweep from the store
            return False
        ended = ended and self._has(link)
        if ended:
            self.log_run(folder)
        return ended


def store_uri(uri: str | None, outputs: Path) -> str:
    """Return the store's URI; a sqlite file, by default <outputs>/mlflow.db, gets an absolute path.

    The password is added from the environment's MLFLOW_TRACKING_URI, if that names the same store. Raises ConfigError
    for a store that MLflow refuses.
    """
    of_environment = os.environ.get(STORE) or None
    if of_environment and uri in (None, without_password(of_environment)):
        key, uri = STORE, of_environment
    else:
        key = "tracking.uri"
    if uri is None:
        return f"{SQLITE}{outputs.resolve() / 'mlflow.db'}"
    if uri.startswith(SQLITE):
        return f"{SQLITE}{_database(uri).resolve()}"
    if not uri.startswith((*SERVERS, *DATABASES)):
        raise ConfigError(
            f"{key}={without_password(uri)} is no store that MLflow writes to; use "
            "sqlite:///path/to/mlflow.db, the http(s) address of a server, or leave it empty"
        )
    return uri.rstrip("/")


def with_store(config: Config) -> Config:
    """Return the config with the store that applies here and now, for later or remote senders, without its password."""
    named = config.tracking.uri is not None or os.environ.get(STORE)
    if not config.tracking.mlflow or not named:
        return config
    uri = without_password(store_uri(config.tracking.uri, Path(config.outputs)))
    return replace(config, tracking=replace(config.tracking, uri=uri))


def _database(uri: str) -> Path:
    return Path(uri.removeprefix(SQLITE))


def _open_client(uri: str) -> MlflowClient:
    if uri.startswith(SERVERS) and not answers(uri):
        raise ConnectionError(f"no server answers at {without_password(uri)}")
    for name, value in CLIENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    for chatter in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(chatter).setLevel(logging.WARNING)
    if uri.startswith(SQLITE) and not _has_tables(_database(uri)):
        _make_tables(_database(uri))
    # This hides a warning for each retry.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    return MlflowClient(uri)


def _has_tables(database: Path) -> bool:
    """Does the file have tables? Raises ConfigError for a file on whose opening MLflow would fail after a minute."""
    if not database.exists():
        return False
    remedy = f"move it away ({database}.broken) and send the runs again, which makes a new one"
    try:
        with closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True)) as tables:
            names = {name for (name,) in tables.execute("select name from sqlite_master")}
            version = "alembic_version" in names and tables.execute(VERSION).fetchone()
    except sqlite3.Error as error:
        raise ConfigError(f"{database}: no database of MLflow ({error}); {remedy}") from error
    if names and not version:
        problem = "its tables are incomplete: whoever made them was killed meanwhile"
        raise ConfigError(f"{database}: {problem}; {remedy}")
    return bool(names)


def _make_tables(database: Path) -> None:
    """Create all tables in another file, then rename it: MLflow makes 65, and never opens a file with only some."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    for left in database.parent.glob(f".{database.name}.*"):  # from a process that was killed
        left.unlink()
    beside = database.with_name(f".{database.name}.{os.getpid()}")
    store = SqlAlchemyStore(f"{SQLITE}{beside}", (database.parent / "mlartifacts").as_uri())
    store.engine.dispose()
    beside.replace(database)


def _batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    return (items[start : start + size] for start in range(0, len(items), size))
