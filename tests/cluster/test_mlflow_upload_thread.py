"""What a sweep sends to MLflow and when, on a real store, and what becomes of a sweep whose store is away."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_sweep import ONE, zeroexp
from tests.run_folders import record, write_run
from tests.test_rank import make_job
from zeroexp.cluster.local import LocalCluster
from zeroexp.cluster.sweep import Sweep
from zeroexp.config.keys import TrackingConfig, load, save
from zeroexp.measure.formats import refuse_newer_format
from zeroexp.tracking import mlflow_upload_thread
from zeroexp.tracking.files import RecordWriter, write_json
from zeroexp.tracking.mlflow_upload_thread import Uploads

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def ask(outputs: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(outputs / "mlflow.db")) as connection:
        return connection.execute(query).fetchall()


def losses(outputs: Path) -> list[Any]:
    return ask(outputs, "select step from metrics where key = 'loss' order by step")


def test_a_run_is_there_from_its_start_followed_and_closed(
    tmp_path: Path,
    empty_store: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copy(empty_store, tmp_path)
    folder = write_run(tmp_path / "sweep" / "run", status="running", num_steps=0)
    sent = Uploads(TrackingConfig(), tmp_path, "sweep")
    sent.begin(folder)
    assert ask(tmp_path, "select name, status from runs") == [("run", "RUNNING")]
    with RecordWriter(folder) as writer:
        writer.write(record(0))
        sent.look(folder)
        assert losses(tmp_path) == [], "a short run is left alone"
        monkeypatch.setattr(mlflow_upload_thread, "SECONDS_BETWEEN_LOOKS", 0.0)
        sent.look(folder)
        sent.begin(folder)  # waits for the look
        assert losses(tmp_path) == [(0,)]
        writer.write(record(1))
    write_json(folder / "state.json", {"status": "failed", "reason": "rank 1: boom"})
    sent.send(folder)
    assert losses(tmp_path) == [(0,), (1,)]
    assert ask(tmp_path, "select status from runs") == [("FAILED",)]
    sent.conclude(folder.parent)
    printed = capsys.readouterr().out
    assert f"--backend-store-uri sqlite:///{tmp_path}/mlflow.db" in printed
    assert "memory by kind: http://127.0.0.1:5000/#/experiments/" in printed
    assert not sent.failed


def test_a_store_that_is_away_costs_a_complaint_and_nothing_else(tmp_path, capsys):
    (tmp_path / "file").touch()  # where a folder should be
    folder = write_run(tmp_path / "sweep" / "run")
    sent = Uploads(TrackingConfig(uri=f"sqlite:///{tmp_path}/file/mlflow.db"), tmp_path, "sweep")
    sent.begin(folder)
    assert sent.failed
    sent.look(folder)
    sent.send(folder)
    sent.conclude(folder.parent)
    printed = capsys.readouterr().out
    assert printed.startswith("\nMLflow did not take the runs (")
    assert printed.endswith(f"zeroexp sync {os.path.relpath(folder.parent)}\n")


@pytest.mark.slow
def test_each_run_of_a_sweep_goes_to_its_own_experiment_or_nowhere(tmp_path, empty_store):
    (tmp_path / "outputs").mkdir()
    shutil.copy(empty_store, tmp_path / "outputs")
    words = [word for word in ONE if not word.startswith("tracking")]
    done = zeroexp(tmp_path, *words, "tracking.experiment=one,two", "tracking.mlflow=true,false")
    assert done.returncode == 0, done.stderr
    (sweep,) = (path.parent for path in tmp_path.glob("outputs/*/report.html"))
    synced = zeroexp(tmp_path, "sync", str(sweep))
    assert synced.returncode == 0, synced.stderr
    sent = ask(
        tmp_path / "outputs",
        "select experiments.name, runs.name like '%: report' from runs"
        " join experiments using (experiment_id) order by 1, 2",
    )
    assert sent == [("one", 0), ("one", 1), ("two", 0)], "one page"


@pytest.mark.parametrize(
    ("at", "interrupted", "ends"),
    [("rehearse", LocalCluster, "FINISHED"), ("wait", mlflow_upload_thread._Worker, "KILLED")],
    ids=["rehearsed", "store opens"],
)
def test_ctrl_c_leaves_no_run_that_mlflow_takes_for_running(
    tmp_path: Path,
    empty_store: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
    interrupted: type,
    ends: str,
) -> None:
    """Neither while a run that is done is rehearsed, nor before the store has answered that it begins."""
    shutil.copy(empty_store, tmp_path)
    (tmp_path / "sweep").mkdir()
    job = make_job(tmp_path / "sweep" / "run", world_size=1, cluster__rehearse_s=60)
    job.enter("pending")
    plain = getattr(interrupted, at)

    def ctrl_c(*_: object) -> None:
        monkeypatch.setattr(interrupted, at, plain)
        raise KeyboardInterrupt

    monkeypatch.setattr(interrupted, at, ctrl_c)
    with Sweep([]) as sweep:
        with pytest.raises(KeyboardInterrupt):
            sweep._execute([job])
        sweep._uploads.conclude(tmp_path / "sweep")
    assert ask(tmp_path, "select status from runs") == [(ends,)]


def test_a_step_reads_no_config(tmp_path: Path) -> None:
    """It would take 2 ms, in the sweep's process, beside the ranks that are measured."""
    folder, sweep = write_run(tmp_path / "run"), Sweep([])
    tracking = TrackingConfig(mlflow=False)
    save(replace(load(folder / "config.yaml"), tracking=tracking), folder / "config.yaml")
    sweep._uploads.look(folder)
    (folder / "config.yaml").unlink()
    sweep._uploads.look(folder)


def test_a_run_of_a_later_version_keeps_no_other_from_the_store(capsys):
    worker, sent = mlflow_upload_thread._Worker(), list[str]()
    worker.do(lambda: refuse_newer_format({"format": 99}, "summary.json"))
    worker.do(lambda: sent.append("the next"))
    assert worker.wait(60.0) and worker.error is None and sent == ["the next"]
    assert "MLflow lacks a run: summary.json has format 99" in capsys.readouterr().err
