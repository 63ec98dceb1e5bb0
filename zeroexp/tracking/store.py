"""Open a store of MLflow and send entries to it: where it is, who may use it now, and what it does not accept.

mlflow is imported by this file and by mlflow.py alone, on first use, since importing it takes two seconds.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shlex
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from zeroexp.config import Config, ConfigError
from zeroexp.network import server_answers, without_password
from zeroexp.tracking.entries import Entry

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
# MLflow's own limits are minutes: 7 retries of 120 s. Whatever a store does not accept now is sent later.
CLIENT_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # seconds
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}


class Store:
    """One experiment of a store. It is cheap to make: the store is opened, and created if necessary, on first use."""

    def __init__(self, uri: str | None, experiment: str, outputs: Path) -> None:
        """`uri` None means a sqlite file in `outputs`. Raises ConfigError for a store that MLflow refuses."""
        self.uri = store_uri(uri, outputs)
        self.shown = without_password(self.uri)
        self.experiment = experiment
        self.waits_for: str | None = None  # the lock it waits for now
        # Maps key -> reason for the entries that MLflow refused; all others were sent.
        self.refused: dict[str, str] = {}
        self._client: MlflowClient | None = None

    @contextmanager
    def opened(self) -> Iterator[MlflowClient]:
        """Open the store; all access goes through this. Not reentrant.

        One process at a time may use a sqlite file: the first one creates the tables, and none fails after waiting too
        long for another.
        """
        local = self.uri.startswith(SQLITE)
        with self.locked(Path(f"{_database(self.uri)}.lock")) if local else nullcontext():
            if self._client is None:
                self._client = _open_client(self.uri)
            yield self._client

    @contextmanager
    def locked(self, path: Path) -> Iterator[None]:
        """Hold a lock among all processes of this host; the system releases it when its holder dies."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            self.waits_for = f"{path}, which another process holds"
            fcntl.flock(file, fcntl.LOCK_EX)
            self.waits_for = None
            yield

    @cached_property
    def experiment_id(self) -> str:
        """The experiment's id; the experiment is created if the store has none. ConfigError if it was deleted."""
        with self.opened() as client:
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

    def has_run(self, uri: str, run_id: str) -> bool:
        """Tell whether this store has the run; it may belong to another store, or have been deleted."""
        from mlflow.exceptions import MlflowException

        if uri != self.shown:
            return False
        with self.opened() as client:
            try:
                return client.get_run(run_id).info.lifecycle_stage == "active"
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                return False

    def send(
        self,
        run_id: str,
        metrics: Sequence[Entry] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Send entries of a run in calls of bounded size. What MLflow refuses stands in `refused` afterwards."""
        from mlflow.entities import Metric, Param, RunTag

        kinds = (
            ("metrics", [Metric(*entry) for entry in metrics], METRICS_PER_CALL),
            ("params", [Param(*item) for item in (params or {}).items()], PARAMS_PER_CALL),
            ("tags", [RunTag(*item) for item in (tags or {}).items()], PARAMS_PER_CALL),
        )
        with self.opened() as client:
            for kind, items, per_call in kinds:
                log = partial(_log_batch, client, run_id, kind)
                for batch in _batches(items, per_call):
                    self._log(batch, log)

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

    @property
    def address(self) -> str:
        """The address of the server, or of the one that `ui_command` starts."""
        return self.shown if self.uri.startswith(SERVERS) else f"http://127.0.0.1:{UI_PORT}"

    def ui_command(self) -> str:
        """Return the command that shows the runs; for a running server, its address."""
        if self.uri.startswith(SERVERS):
            return self.shown
        python, uri = shlex.quote(sys.executable), shlex.quote(self.shown)
        return f"{python} -m mlflow ui --backend-store-uri {uri} --port {UI_PORT} --workers 1"


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
    if uri.startswith(SERVERS) and not server_answers(uri):
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
    """Tell whether the file has tables; ConfigError for a file on whose opening MLflow would fail after a minute."""
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


def _log_batch(client: MlflowClient, run_id: str, kind: str, items: Sequence[Any]) -> None:
    arguments: dict[str, Any] = {kind: items}
    client.log_batch(run_id, **arguments)


def _batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    return (items[start : start + size] for start in range(0, len(items), size))
