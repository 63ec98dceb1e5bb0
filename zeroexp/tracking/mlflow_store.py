"""Open a store of MLflow and send entries to it: where it is, who may use it now, and what it does not accept.

mlflow is imported by this file and by mlflow.py alone, on first use, since importing it takes two seconds.
"""

from __future__ import annotations

import logging
import os
import shlex
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from zeroexp.config.keys import Config, ConfigError
from zeroexp.process import locks
from zeroexp.process.cheap_imports import importing_cheaply
from zeroexp.process.server_address import server_answers, without_password
from zeroexp.tracking.mlflow_metrics import Entry

if TYPE_CHECKING:
    from mlflow import MlflowClient

SQLITE = "sqlite:///"
ARTIFACTS = "mlartifacts"  # beside the file
SERVERS = ("http://", "https://")
DATABASES = ("postgresql", "mysql", "mssql")
STORE = "MLFLOW_TRACKING_URI"
VERSION = "select version_num from alembic_version"
METRICS_PER_CALL = 500
PARAMS_PER_CALL = 100  # a server's limit
UI_PORT = 5000
# For a sqlite file's lock that another program holds; MLflow itself waits for 20.
BUSY_SECONDS = 5.0
# MLflow's own limits are minutes: 7 retries of 120 s. Whatever a store does not accept now is sent later.
CLIENT_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # seconds
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}
NO_PERMISSION = (
    "this user may not write it and its folder; ask for the permission, or name another store: "
    "tracking.uri=sqlite:///path/to/mlflow.db"
)


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

    @contextmanager
    def opened(self) -> Iterator[MlflowClient]:
        """Open the store; all access goes through this. Not reentrant.

        One process of ours at a time may use a sqlite file: the first one creates the tables, and none fails after
        waiting too long for another.
        """
        if not self._is_file:
            yield self._client
            return
        _client_class()  # whoever imports for seconds holds up nobody else
        database = _database(self.uri)
        with self.locked(Path(f"{database}.lock")):
            try:
                yield self._client
            except Exception as error:
                if cause := _error_of_sqlite(error):
                    raise _explain(database, cause) from error
                raise

    @cached_property
    def _client(self) -> MlflowClient:
        if self._is_file:
            return _open_file(_database(self.uri))
        if self.uri.startswith(SERVERS) and not server_answers(self.uri):
            raise ConnectionError(f"no server answers at {self.shown}")
        return _client_class()(self.uri)

    @property
    def _is_file(self) -> bool:
        return self.uri.startswith(SQLITE)

    @contextmanager
    def locked(self, path: Path) -> Iterator[None]:
        """Hold a lock among all processes of this host; the system releases it when its holder dies."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.waits_for = f"{path}, which another process holds"
        try:
            held = locks.take(path, wait=True)
        except locks.NoLocks:  # sqlite has its own, where there are any
            held = None
        except PermissionError as error:
            raise ConfigError(f"{path}: {error.strerror}: {NO_PERMISSION}") from error
        finally:
            self.waits_for = None
        with held or nullcontext():
            yield

    @cached_property
    def experiment_id(self) -> str:
        """The experiment's id; the experiment is created if the store has none. ConfigError if it was deleted."""
        with self.opened() as client:
            experiment = client.get_experiment_by_name(self.experiment)
            if experiment is None:
                return self._create_experiment(client)
        if experiment.lifecycle_stage != "active":
            raise ConfigError(
                f"tracking.experiment={self.experiment} was deleted in MLflow; restore it with "
                f"`mlflow experiments restore -x {experiment.experiment_id}` or choose another name"
            )
        return experiment.experiment_id

    def _create_experiment(self, client: MlflowClient) -> str:
        # Relative artifact locations would depend on the folder in which the UI is started.
        location = None
        if self._is_file:
            location = (_database(self.uri).parent / ARTIFACTS / self.experiment).as_uri()
        # Without this kind, the UI opens its view for agents.
        kind = {"mlflow.experimentKind": "custom_model_development"}
        from mlflow.exceptions import MlflowException

        try:
            return client.create_experiment(self.experiment, location, kind)
        except MlflowException:
            # Another process may have been quicker, which servers report in different ways.
            made = client.get_experiment_by_name(self.experiment)
            if made is None:
                raise
            return made.experiment_id

    def has_run(self, run_id: str) -> bool:
        """Tell whether this store, which may have been moved, has the run; it may have been deleted."""
        from mlflow.exceptions import MlflowException

        with self.opened() as client:
            try:
                return client.get_run(run_id).info.lifecycle_stage == "active"
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                return False

    def steps_of(self, run_id: str, metric: str) -> set[int]:
        """Return the steps of which the run has a value of this metric."""
        with self.opened() as client:
            return {value.step for value in client.get_metric_history(run_id, metric)}

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
                for start in range(0, len(items), per_call):
                    self._log(client, run_id, kind, items[start : start + per_call])

    def _log(self, client: MlflowClient, run_id: str, kind: str, items: Sequence[Any]) -> None:
        """Log all items at once; if MLflow refuses, log them one by one, so that only the refused ones are lost."""
        from mlflow.exceptions import MlflowException

        arguments: dict[str, Any] = {kind: items}
        try:
            client.log_batch(run_id, **arguments)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            if len(items) == 1:
                self.refused[items[0].key] = str(error).partition("\n")[0]
            else:
                for item in items:
                    self._log(client, run_id, kind, [item])

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
        key, uri = "outputs", f"{SQLITE}{outputs.resolve() / 'mlflow.db'}"
    if uri.startswith(SQLITE):
        database = _database(uri).resolve()
        if "?" in str(database) or unquote(str(database)) != str(database):
            problem = "MLflow can not open a database whose path has a ? or a % with two digits"
            raise ConfigError(f"{key}: {database}: {problem}; choose another, or tracking=files")
        return f"{SQLITE}{database}"
    if not uri.startswith((*SERVERS, *DATABASES)):
        raise ConfigError(
            f"{key}={without_password(uri)} is no store that MLflow writes to; use "
            "sqlite:///path/to/mlflow.db, the http(s) address of a server, or leave it out"
        )
    return uri.rstrip("/")


def with_store(config: Config) -> Config:
    """Return the config with the store that applies here and now, for later or remote senders, without its password."""
    if not config.tracking.mlflow:
        return config
    uri = without_password(store_uri(config.tracking.uri, Path(config.outputs)))
    if config.tracking.uri is None and not os.environ.get(STORE):
        return config  # the default follows a folder that is moved
    return replace(config, tracking=replace(config.tracking, uri=uri))


def _database(uri: str) -> Path:
    return Path(uri.removeprefix(SQLITE))


def _open_file(database: Path) -> MlflowClient:
    with importing_cheaply("pygments"):  # a tenth of a second, to colour templates
        if _has_tables(database):
            _follow_move(database)
        else:
            _make_tables(database)
        return _client_class()(f"{SQLITE}{database}")


@cache
def _client_class() -> type[MlflowClient]:
    """Import MLflow's client, which takes seconds the first time, and keep it quiet."""
    for name, value in CLIENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    # Half a second, for MLflow's own data sets, of which we send none.
    with importing_cheaply("pandas"):
        from mlflow import MlflowClient

    logging.getLogger("alembic").setLevel(logging.WARNING)
    # It prints a traceback of an error that it also raises.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    # This hides a warning for each retry.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    return MlflowClient


def _has_tables(database: Path) -> bool:
    """Tell whether the file has tables; ConfigError for a file on whose opening MLflow would fail after a minute."""
    if not database.exists():
        return False
    with closing(
        sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True, timeout=BUSY_SECONDS)
    ) as tables:
        names = {name for (name,) in tables.execute("select name from sqlite_master")}
        version = "alembic_version" in names and tables.execute(VERSION).fetchone()
    if names and not version:
        problem = "its tables are incomplete: whoever made them was killed meanwhile"
        raise ConfigError(f"{database}: {problem}; {_move_away(database)}")
    return bool(names)


def _follow_move(database: Path) -> None:
    """Point at files that were moved with the database, as with a renamed `outputs`: MLflow keeps absolute places."""
    here = database.parent / ARTIFACTS
    of_experiments = "update experiments set artifact_location = ? where artifact_location = ?"
    of_runs = "update runs set artifact_uri = ?1 || substr(artifact_uri, ?2) where substr(artifact_uri, 1, ?2) = ?3"
    files = "select substr(artifact_uri, ?1) from runs where substr(artifact_uri, 1, ?1) = ?2"
    with closing(sqlite3.connect(database, timeout=BUSY_SECONDS)) as tables, tables:
        ours = f"file:%/{ARTIFACTS}/%"  # no place of a bucket's
        places = tables.execute(
            "select distinct artifact_location from experiments where artifact_location like ?",
            (ours,),
        ).fetchall()
        for (old,) in places:
            parent, _, name = old.rpartition(f"/{ARTIFACTS}/")
            length, new = len(old) + 1, f"{here.as_uri()}/{name}"
            runs = (f"{new}{rest}" for (rest,) in tables.execute(files, (length, f"{old}/")))
            if _came_along(_path_of(f"{parent}/{ARTIFACTS}"), here, map(_path_of, runs)):
                tables.execute(of_experiments, (new, old))
                tables.execute(of_runs, (new, length, f"{old}/"))


def _came_along(there: Path, here: Path, of_runs: Iterable[Path]) -> bool:
    """Tell whether files are here that were there, where a copy of them or others of a new `outputs` may be now."""
    if not (there.exists() and here.exists()):
        return here.exists()
    return not there.samefile(here) and any(path.exists() for path in of_runs)


def _path_of(uri: str) -> Path:
    return Path(unquote(urlsplit(uri).path))


def _error_of_sqlite(error: BaseException | None) -> sqlite3.Error | None:
    """Return the error of sqlite that an error of MLflow was made from."""
    while error is not None and not isinstance(error, sqlite3.Error):
        error = error.__cause__ or error.__context__
    return error


def _explain(database: Path, error: sqlite3.Error) -> Exception:
    """Return what to tell a user of an error of sqlite, whose number tells more than its class."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the rest of the number details it
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return ConfigError(f"{database}: another program has locked it; send the runs again later")
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT) or database.is_dir():
        return ConfigError(f"{database}: no database of MLflow ({error}); {_move_away(database)}")
    if not _may_write(database.parent) or (database.exists() and not _may_write(database)):
        return ConfigError(f"{database}: {error}: {NO_PERMISSION}")
    return ConfigError(f"{database}: {error}")


def _move_away(database: Path) -> str:
    return f"move it away ({database}.broken) and send the runs again, which makes a new one"


def _may_write(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK, effective_ids=True)


def _make_tables(database: Path) -> None:
    """Create all tables in another file, then rename it: MLflow makes 65, and never opens a file with only some."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    for left in database.parent.glob(f".{database.name}.*"):  # from a process that was killed
        left.unlink()
    beside = database.with_name(f".{database.name}.{os.getpid()}")
    artifacts = (database.parent / ARTIFACTS).as_uri()
    try:
        SqlAlchemyStore(f"{SQLITE}{beside}", artifacts).engine.dispose()
        beside.replace(database)
    finally:
        beside.unlink(missing_ok=True)
