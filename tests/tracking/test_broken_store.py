"""Stores that are killed while they are made, broken, or held by somebody else: on a real sqlite file."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.cluster.test_dead_owner import FOR_EVER, wait_for_steps
from tests.cluster.test_sweep import LIGHT, jobs, start, statuses
from tests.run_folders import write_run
from tests.small_disks import files_of_at_most
from tests.somebody_else import not_root, open_to_all, read_only
from zeroexp.config.keys import ConfigError, TrackingConfig
from zeroexp.tracking import mlflow_store
from zeroexp.tracking.mlflow import MlflowTracker
from zeroexp.tracking.mlflow_upload_thread import Uploads

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def statuses_in_mlflow(outputs: Path) -> list[str]:
    with closing(sqlite3.connect(outputs / "mlflow.db")) as connection:
        return [status for (status,) in connection.execute("select status from runs")]


def num_tables(database: Path) -> int:
    try:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            return connection.execute("select count(*) from sqlite_master").fetchone()[0]
    except sqlite3.Error:  # not there yet, or being written
        return 0


def kill_a_maker(database: Path) -> None:
    """A fork of this process, which has imported MLflow, dies amid its tables."""
    mlflow_store._client_class()
    maker = multiprocessing.get_context("fork").Process(
        target=mlflow_store._make_tables, args=(database,)
    )
    maker.start()
    while num_tables(database.with_name(f".{database.name}.{maker.pid}")) < 20:
        assert maker.is_alive() and not database.exists()
        time.sleep(0.01)
    maker.kill()
    maker.join()
    assert not database.exists() and len(list(database.parent.glob(".mlflow.db*"))) >= 1


@pytest.fixture(scope="module")
def outputs(empty_store: Path) -> Iterator[Path]:
    """A folder that everybody may enter, with a store."""
    with open_to_all() as folder:
        shutil.copy(empty_store, folder)
        yield folder


@pytest.mark.slow
def test_a_store_whose_maker_was_killed_is_made_by_the_next(tmp_path: Path) -> None:
    kill_a_maker(tmp_path / "mlflow.db")
    sent = Uploads(TrackingConfig(), tmp_path, "sweep")
    folder = write_run(tmp_path / "sweep" / "run", num_steps=4)
    sent.send(folder)
    sent.conclude(folder.parent)
    assert statuses_in_mlflow(tmp_path) == ["FINISHED"]
    assert list(tmp_path.glob(".mlflow.db*")) == []


def interrupted(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table experiments (id integer)")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (interrupted, "its tables are incomplete: whoever made them was killed meanwhile"),
        (lambda path: path.write_text("no database " * 100), "file is not a database"),
        (lambda path: path.mkdir(), "no database of MLflow"),
    ],
)
def test_a_broken_store_is_told_with_its_remedy(tmp_path, capsys, damage, said) -> None:
    damage(tmp_path / "mlflow.db")
    folder = write_run(tmp_path / "sweep" / "run", num_steps=4)
    sent = Uploads(TrackingConfig(), tmp_path, "sweep")
    sent.send(folder)
    sent.conclude(folder.parent)
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 2 and lines[0].startswith("MLflow did not take the runs (")
    assert "Error: " not in lines[0] and lines[0].endswith("); to send them:")
    assert said in lines[0] and f"move it away ({tmp_path / 'mlflow.db'}.broken)" in lines[0]


@contextmanager
def held(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130 and "Traceback" not in err, err
    return out, err


@pytest.mark.slow
def test_a_store_that_is_held_delays_no_step_and_no_ctrl_c_and_an_open_one_hears_of_it(
    empty_store: Path, tmp_path: Path
) -> None:
    words = [*LIGHT, FOR_EVER, "tracking=mlflow", "world_size=1"]
    with held(tmp_path / "outputs" / "mlflow.db.lock"):
        process = start(tmp_path, *words)
        wait_for_steps(tmp_path, 3, process)
        process.send_signal(signal.SIGINT)
        while set(statuses(tmp_path).values()) != {"cancelled"}:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, _ = end(process)
    assert "MLflow did not take the runs (no answer from " in out
    assert "mlflow.db.lock, which another process holds)" in out

    (sweep,) = {job.folder.parent for job in jobs(tmp_path).values()}
    shutil.copy(empty_store, tmp_path / "outputs")
    again = start(tmp_path, "--rerun", str(sweep))
    while not statuses_in_mlflow(tmp_path / "outputs"):
        assert again.poll() is None
        time.sleep(0.1)
    wait_for_steps(tmp_path, 3, again)
    os.kill(again.pid, signal.SIGTERM)
    end(again)
    assert statuses_in_mlflow(tmp_path / "outputs") == ["KILLED"]


# -- a sound store that does not take what is sent now ----------------------------------------------


@pytest.mark.slow
def test_a_store_that_another_program_has_locked_is_told_as_such(outputs, monkeypatch, capsys):
    monkeypatch.setattr(mlflow_store, "BUSY_SECONDS", 0.05)
    folder = write_run(outputs / "busy" / "run", num_steps=4)
    with closing(sqlite3.connect(outputs / "mlflow.db", isolation_level=None)) as connection:
        connection.execute("begin exclusive")
        sent = Uploads(TrackingConfig(), outputs, "busy")
        sent.send(folder)
        sent.conclude(folder.parent)
    said = capsys.readouterr().out
    assert f"{outputs / 'mlflow.db'}: another program has locked it; send the runs again" in said
    assert "move it away" not in said


def test_a_store_without_room_is_no_matter_of_permission_and_leaves_nothing(tmp_path: Path) -> None:
    tracker = MlflowTracker(None, "x", tmp_path)
    with files_of_at_most(100_000), pytest.raises(ConfigError) as caught:
        tracker.write_views("x")
    assert "may not write" not in str(caught.value)
    assert [path.name for path in tmp_path.glob("*mlflow.db*")] == ["mlflow.db.lock"]


def test_a_store_of_somebody_else_is_told_as_a_matter_of_permission(outputs: Path) -> None:
    folder, database = write_run(outputs / "mine" / "run"), outputs / "mlflow.db"
    tracker = MlflowTracker(None, "x", outputs)
    run_id = tracker.log_run(folder)
    missing = MlflowTracker(f"sqlite:///{outputs}/other.db", "x")
    database.chmod(0o644)
    with read_only(outputs), not_root():
        with pytest.raises(ConfigError, match=r"mlflow\.db: .*: this user may not write it and"):
            tracker.store.send(run_id, tags={"a": "b"})
        with pytest.raises(ConfigError, match=r"other\.db\.lock: Permission denied: this user may"):
            missing.write_views("x")
    database.chmod(0)
    with not_root(), pytest.raises(ConfigError) as unreadable:
        MlflowTracker(None, "x", outputs).write_views("x")
    assert "this user may not write it" in str(unreadable.value)
    assert "move it away" not in str(unreadable.value)
    database.chmod(0o644)
