"""Runs that MLflow can not take as they are, or that nobody can read: on one real sqlite store."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.run_folders import record, write_run
from zeroexp.config.keys import load, save
from zeroexp.tracking.files import RecordWriter, write_json
from zeroexp.tracking.mlflow import LINK, MlflowTracker
from zeroexp.tracking.views import filter_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="module")
def tracker(outputs: Path) -> MlflowTracker:
    return MlflowTracker(None, "odd", outputs)


def ask(outputs: Path, query: str, *arguments: Any) -> list[Any]:
    with closing(sqlite3.connect(outputs / "mlflow.db")) as connection:
        return connection.execute(query, arguments).fetchall()


def test_a_clock_that_is_set_back_loses_no_step(tracker: MlflowTracker, outputs: Path) -> None:
    folder = write_run(outputs / "clock" / "run", status="running", num_steps=4)
    run_id = tracker.log_run(folder)
    with RecordWriter(folder) as writer:
        for step in range(4, 7):
            writer.write(record(step))
    rows = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    rows = [{**row, "written_at": row["written_at"] - 3600 * (row["step"] > 3)} for row in rows]
    (folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tracker.log_run(folder)
    query = "select step from metrics where run_uuid = ? and key = 'loss' order by step"
    assert [step for (step,) in ask(outputs, query, run_id)] == list(range(7))


def test_a_key_that_is_refused_costs_that_key_alone(tracker: MlflowTracker, outputs: Path) -> None:
    folder = write_run(outputs / "keys" / "run", num_steps=4)
    config = load(folder / "config.yaml")
    odd = {**config.model.hf_config, "what?": 1, "fine": 2}
    config = replace(config, model=replace(config.model, hf_config=odd))
    save(config, folder / "config.yaml")
    run_id = tracker.log_run(folder)
    assert list(tracker.store.refused) == ["model.hf_config.what?"]
    params = dict(ask(outputs, "select key, value from params where run_uuid = ?", run_id))
    assert params["model.hf_config.fine"] == "2" and "optimizer.lr" in params
    assert ask(outputs, "select status from runs where run_uuid = ?", run_id) == [("FINISHED",)]


@pytest.mark.parametrize("file", [LINK, "config.yaml", "state.json", "records.jsonl"])
def test_what_nobody_can_read_keeps_no_other_sweep_out(
    tracker: MlflowTracker, outputs: Path, file: str
) -> None:
    torn = write_run(outputs / f"torn-{file}" / "a", status="running", num_steps=4)
    fine = write_run(outputs / f"torn-{file}" / "b", status="running", num_steps=4)
    for folder in (torn, fine):
        tracker.start_run(folder)
        write_json(folder / "state.json", {"status": "failed", "reason": "boom"})
    (torn / file).write_text('{"uri": [\n')
    # A run whose state is torn has failed, and is closed as one.
    closed = [torn, fine] if file == "state.json" else [fine]
    assert tracker.close_stale(torn.parent) == closed


@pytest.mark.parametrize("name", ["it's", 'a "b"', """it's "b\""""])
def test_a_quote_in_the_name_of_a_sweep_breaks_no_view(
    tracker: MlflowTracker, outputs: Path, name: str
) -> None:
    from mlflow import MlflowClient  # seconds, which every process that collects tests would pay

    run_id = tracker.log_run(write_run(outputs / name / "run", num_steps=4))
    experiment = ask(outputs, "select experiment_id from runs where run_uuid = ?", run_id)[0][0]
    found = MlflowClient(tracker.store.uri).search_runs([str(experiment)], filter_of(name))
    assert [run.info.run_id for run in found] == [run_id]
