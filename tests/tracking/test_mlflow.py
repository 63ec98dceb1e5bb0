"""MLflow on a real sqlite store: what a run folder becomes, twice the same, and however its process ended."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from tests.run_folders import record, write_run
from zeroexp import sync
from zeroexp.config.keys import ConfigError, load, save
from zeroexp.tracking import attempt, mlflow_views
from zeroexp.tracking.files import RecordWriter, read_timed_records, write_json
from zeroexp.tracking.mlflow import MlflowTracker
from zeroexp.tracking.mlflow_store import METRICS_PER_CALL, store_uri
from zeroexp.tracking.mlflow_views import filter_of

# What mlflow's own libraries think of one another is none of our business.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

NUM_STEPS = 23
# Per step: loss, grad_norm, lr, step time, tokens/s, three phases, peak, waiting and bytes sent.
METRICS_PER_STEP = 11


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """One store for all tests, each of which has its own experiment."""
    folder = tmp_path_factory.mktemp("outputs")
    shutil.copy(empty_store, folder)
    return folder


@pytest.fixture
def tracker(outputs: Path, request: pytest.FixtureRequest) -> MlflowTracker:
    return MlflowTracker(None, request.node.name, outputs)


@pytest.fixture
def sweep(outputs: Path, request: pytest.FixtureRequest) -> Path:
    return outputs / request.node.name


def ask(outputs: Path, query: str, *arguments: Any) -> list[Any]:
    """Past MLflow, straight from the tables."""
    with closing(sqlite3.connect(outputs / "mlflow.db")) as connection:
        return connection.execute(query, arguments).fetchall()


def num_metrics(outputs: Path, run_id: str) -> int:
    ((count,),) = ask(outputs, "select count(*) from metrics where run_uuid = ?", run_id)
    return count


def status(outputs: Path, run_id: str) -> str:
    ((found,),) = ask(outputs, "select status from runs where run_uuid = ?", run_id)
    return found


def tag(outputs: Path, run_id: str, key: str) -> str:
    ((found,),) = ask(outputs, "select value from tags where run_uuid = ? and key = ?", run_id, key)
    return found


def test_a_run_has_its_params_metrics_tags_times_and_files(tracker, outputs, sweep):
    folder = write_run(sweep / "zero3-buffer", started=1000.0)
    run_id = tracker.log_run(folder)
    params = dict(ask(outputs, "select key, value from params where run_uuid = ?", run_id))
    assert params["strategy.name"] == "zero3"
    assert params["world_size"] == "2"
    losses = ask(
        outputs,
        "select step, value from metrics where run_uuid = ? and key = 'loss' order by step",
        run_id,
    )
    assert losses == [(step, record(step).loss) for step in range(NUM_STEPS)]
    latest = dict(ask(outputs, "select key, value from latest_metrics where run_uuid = ?", run_id))
    assert latest["world_size"] == 2.0
    assert latest["memory/total_mib"] == 192.0
    assert tag(outputs, run_id, "sweep") == sweep.name
    assert tag(outputs, run_id, "strategy") == "zero3-buffer"
    assert tag(outputs, run_id, "status") == "done"
    ((name, state, began, ended, place),) = ask(
        outputs,
        "select name, status, start_time, end_time, artifact_uri from runs where run_uuid = ?",
        run_id,
    )
    assert (name, state) == ("zero3-buffer", "FINISHED")
    assert (began, ended) == (1_000_000, 1_060_000)
    assert place.startswith((outputs / "mlartifacts").as_uri())
    files = Path(place.removeprefix("file://"))
    assert {path.name for path in files.iterdir()} == {
        *("config.yaml", "environment.json", "state.json", "records.jsonl", "summary.json", "logs")
    }
    assert (files / "logs" / "rank1.log").read_text() == "rank 1 of 2: ready\n"


def test_the_page_of_a_sweep_is_an_artifact_that_no_view_takes_for_a_point(tracker, outputs, sweep):
    assert tracker.log_page(sweep) is None
    sweep.mkdir(parents=True, exist_ok=True)
    for text in ("first", "second"):
        (sweep / "report.html").write_text(text)
        address = tracker.log_page(sweep)
    runs = "select run_uuid, status, artifact_uri from runs where name = ?"
    ((run_id, state, place),) = ask(outputs, runs, f"{sweep.name}: report")
    assert state == "FINISHED"
    assert (
        Path(place.removeprefix("file://"), "report.html").read_text(encoding="utf-8") == "second"
    )
    assert address is not None and address.endswith(f"/runs/{run_id}/artifacts/report.html")
    keys = {key for (key,) in ask(outputs, "select key from tags where run_uuid = ?", run_id)}
    assert "report_of" in keys and "sweep" not in keys


def test_instruments_and_samples_are_kept_and_the_data_is_named(tracker, outputs, sweep):
    folder = write_run(sweep / "run")
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "data_source": "topics, PSF"}))
    for name in ("trace.0.5.json", "profile.0.5.txt"):
        (folder / name).write_text("{}")
    (folder / "system.node.jsonl").write_text(
        '{"written_at": 7.0, "cpu_utilization_percentage": 50}\n'
    )
    for _ in range(2):  # sent twice, it is there once
        run_id = tracker.log_run(folder)
    ((place,),) = ask(outputs, "select artifact_uri from runs where run_uuid = ?", run_id)
    kept = {path.name for path in Path(place.removeprefix("file://")).iterdir()}
    assert {"trace.0.5.json", "profile.0.5.txt", "system.node.jsonl"} <= kept
    key = "system/node/cpu_utilization_percentage"
    told = "select value, timestamp, step from metrics where run_uuid = ? and key = ?"
    assert ask(outputs, told, run_id, key) == [(50.0, 7000, 0)]
    assert tag(outputs, run_id, "data") == "topics, PSF"


def test_sending_again_changes_nothing(tracker: MlflowTracker, outputs: Path, sweep: Path) -> None:
    folder = write_run(sweep / "run")
    run_id = tracker.log_run(folder)
    assert run_id is not None
    before = ask(outputs, "select * from metrics where run_uuid = ? order by key, step", run_id)
    assert len(before) > NUM_STEPS * METRICS_PER_STEP
    assert tracker.log_run(folder) == run_id
    assert MlflowTracker(None, tracker.store.experiment, outputs).log_run(folder) == run_id
    after = ask(outputs, "select * from metrics where run_uuid = ? order by key, step", run_id)
    assert after == before
    assert status(outputs, run_id) == "FINISHED"


@pytest.mark.parametrize("is_there_anew", [False, True])
def test_outputs_that_were_renamed_hold_the_same_runs(
    is_there_anew: bool, outputs: Path, empty_store: Path, tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    shutil.copy(empty_store, old)
    folder = write_run(old / "sweep/run", status="failed", num_steps=3)
    run_id = MlflowTracker(None, "renamed", old).log_run(folder)
    write_json(folder / "state.json", {"status": "running", "running_at": 1_800_000_000.0})
    old.rename(new)
    if is_there_anew:  # a sweep ran since
        (old / "mlartifacts/renamed").mkdir(parents=True)
    assert MlflowTracker(None, "renamed", new).log_run(new / "sweep/run") == run_id
    write_json(new / "sweep/run/state.json", {"status": "failed", "running_at": 1_800_000_000.0})
    from mlflow.tracking._tracking_service import utils

    utils._artifact_repos_cache.clear()  # a process that sees both folders is the test alone
    MlflowTracker(None, "renamed", new).log_run(new / "sweep/run")
    assert not [path for path in old.rglob("*") if path.is_file()]
    assert (new / "mlartifacts/renamed" / run_id / "artifacts/config.yaml").exists()


@pytest.mark.slow
def test_sent_to_another_store_and_back_it_is_the_same_run(
    tracker: MlflowTracker, outputs: Path, sweep: Path, empty_store: Path, tmp_path: Path
) -> None:
    folder = write_run(sweep / "run")
    run_id = tracker.log_run(folder)
    there = shutil.copy(empty_store, tmp_path / "other.db")
    other = MlflowTracker(f"sqlite:///{there}", tracker.store.experiment, outputs)
    assert other.log_run(folder) != run_id
    before = num_metrics(outputs, run_id)
    assert MlflowTracker(None, tracker.store.experiment, outputs).log_run(folder) == run_id
    assert num_metrics(outputs, run_id) == before


def test_a_sweep_that_mlflow_does_not_track_is_refused(sweep: Path, monkeypatch, capsys) -> None:
    file = write_run(sweep / "run") / "config.yaml"
    config = load(file)
    save(replace(config, tracking=replace(config.tracking, mlflow=False)), file)
    monkeypatch.setattr(sys, "argv", ["zeroexp sync", str(sweep)])
    assert sync.main() == 2
    assert "MLflow tracks none of its runs" in capsys.readouterr().err


def test_a_sync_takes_files_as_they_are_where_there_is_no_slurm(sweep, monkeypatch, capsys):
    folder = write_run(sweep / "run", status="running")
    write_json(folder / "slurm.json", {"job_id": "17"})
    config = load(folder / "config.yaml")
    save(replace(config, tracking=replace(config.tracking, mlflow=False)), folder / "config.yaml")
    monkeypatch.setattr(sys, "argv", ["zeroexp sync", str(sweep)])
    monkeypatch.setenv("PATH", str(sweep))
    assert sync.main() == 2
    told = capsys.readouterr().err
    assert "states are those of the last look: squeue is not here" in told
    assert "MLflow tracks none of its runs" in told


def test_a_run_can_be_followed_and_a_resumed_one_goes_on(tracker, outputs, sweep):
    folder = write_run(sweep / "run", status="running", num_steps=3)
    run_id = tracker.log_run(folder)
    assert status(outputs, run_id) == "RUNNING"
    assert num_metrics(outputs, run_id) == 3 * METRICS_PER_STEP
    write_json(folder / "state.json", {"status": "timed_out", "reason": "after 3600 s"})
    tracker.log_run(folder)
    assert status(outputs, run_id) == "FAILED"
    assert tag(outputs, run_id, "reason") == "after 3600 s"
    (folder / "earlier" / "1" / "logs").mkdir(parents=True)  # as --rerun leaves it, with its steps
    write_json(folder / "attempts.json", {"attempts": [{"number": 2, "began_at": 1.0}]})
    write_json(folder / "state.json", {"status": "running"})
    assert tracker.log_run(folder) == run_id
    assert status(outputs, run_id) == "RUNNING"
    with RecordWriter(folder) as writer:
        writer.write(record(3))
    tracker.log_run(folder)
    assert num_metrics(outputs, run_id) == 4 * METRICS_PER_STEP
    finish(folder)
    tracker.log_run(folder)
    assert status(outputs, run_id) == "FINISHED"
    assert tag(outputs, run_id, "reason") == "", "it is the first attempt's"


def finish(folder: Path) -> None:
    """With the steps and results of another run."""
    other = write_run(folder.with_name("other"), num_steps=4)
    for name in ("records.jsonl", "summary.json"):
        shutil.copy(other / name, folder)
    write_json(folder / "state.json", {"status": "done"})


def test_steps_that_a_killed_attempt_had_sent_stand_once_after_the_next_repeats_them(
    tracker: MlflowTracker, outputs: Path, sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(sweep / "run", num_steps=7, status="running")  # killed behind step 4
    live = MlflowTracker(None, tracker.store.experiment, outputs)
    run_id = live.log_run(folder)
    tracker.log_steps(run_id, read_timed_records(folder)[:3])  # of `zeroexp watch`, which lags
    monkeypatch.setenv(attempt.NUMBER, "2")  # which `begin` sets
    attempt.begin(folder, 2)
    with RecordWriter(folder, from_step=4, rests_on=True) as writer:
        for step in range(4, 9):
            writer.write(replace(record(step), step_seconds=9.0 + step))
    again = MlflowTracker(None, tracker.store.experiment, outputs)
    for each in (again, tracker):
        each.log_run(folder)
    for key in ("loss", "time/step_ms"):
        query = "select step from metrics where run_uuid = ? and key = ? order by step"
        assert ask(outputs, query, run_id, key) == [(step,) for step in range(9)], key


def test_a_sync_that_waits_for_another_sender_leaves_the_end_that_it_sent(
    tracker: MlflowTracker, outputs: Path, sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it waited, the run went on."""
    folder = write_run(sweep / "zero3-buffer", status="running")
    run_id, other = tracker.log_run(folder), MlflowTracker(None, sweep.name, outputs)
    locked = other.store.locked

    @contextmanager
    def locked_once_the_end_is_sent(path: Path) -> Iterator[None]:
        monkeypatch.setattr(other.store, "locked", locked)
        write_json(folder / "state.json", {"status": "failed", "reason": "rank 1: no"})
        tracker.log_run(folder)
        with locked(path):
            yield

    _ = other.store.experiment_id  # the store is open
    monkeypatch.setattr(other.store, "locked", locked_once_the_end_is_sent)
    other.log_run(folder)
    assert (status(outputs, run_id), tag(outputs, run_id, "status")) == ("FAILED", "failed")


def test_a_run_that_is_run_again_is_another_run(tracker, outputs, sweep):
    folder = write_run(sweep / "run", status="failed", num_steps=3)
    first = tracker.log_run(folder)
    earlier = folder / "earlier" / "1"
    earlier.mkdir(parents=True)
    for name in ("records.jsonl", "state.json", "logs"):
        (folder / name).rename(earlier / name)
    with RecordWriter(folder) as writer:
        writer.write(record(0))
    write_json(folder / "state.json", {"status": "running"})
    second = tracker.log_run(folder)
    assert second != first
    assert num_metrics(outputs, second) == METRICS_PER_STEP
    finish(folder)
    assert tracker.log_run(folder) == second
    assert [status(outputs, run_id) for run_id in (first, second)] == ["FAILED", "FINISHED"]
    assert tag(outputs, first, "sweep") == f"{sweep.name}/earlier"
    assert tag(outputs, second, "sweep") == sweep.name


def test_a_skipped_point_never_was_a_run(tracker: MlflowTracker, sweep: Path) -> None:
    folder = write_run(sweep / "run", status="skipped", reason="undefined", num_steps=0)
    assert tracker.log_run(folder) is None
    assert not (folder / "mlflow.json").exists()


def test_long_runs_are_sent_whole(tracker: MlflowTracker, outputs: Path, sweep: Path) -> None:
    num_steps = METRICS_PER_CALL // METRICS_PER_STEP * 3
    folder = write_run(sweep / "run", status="cancelled", num_steps=num_steps)
    run_id = tracker.log_run(folder)
    assert run_id is not None
    assert num_metrics(outputs, run_id) == num_steps * METRICS_PER_STEP
    assert (status(outputs, run_id), tag(outputs, run_id, "status")) == ("KILLED", "cancelled")


def _send_all(folders: list[Path], outputs: Path, together: Barrier) -> None:
    together.wait()
    tracker = MlflowTracker(None, "together", outputs)
    for folder in folders:
        tracker.log_run(folder)
    tracker.write_views(folders[0].parent.name)


@pytest.mark.slow
def test_several_sweeps_at_once_on_a_fresh_store_lose_no_metric(tmp_path: Path) -> None:
    num_sweeps, num_runs = 2, 3
    context = multiprocessing.get_context("forkserver")
    together = context.Barrier(num_sweeps)
    sweeps = [
        [
            write_run(tmp_path / f"sweep{s}" / f"run{r}", num_steps=100, status="cancelled")
            for r in range(num_runs)
        ]
        for s in range(num_sweeps)
    ]
    processes = [
        context.Process(target=_send_all, args=(folders, tmp_path, together)) for folders in sweeps
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * num_sweeps
    counts = ask(tmp_path, "select run_uuid, count(*) from metrics group by run_uuid")
    assert [count for _, count in counts] == [100 * METRICS_PER_STEP] * num_sweeps * num_runs
    assert ask(tmp_path, "select count(*) from experiments where name = 'together'") == [(1,)]
    assert ask(tmp_path, "select count(*) from runs where status != 'KILLED'") == [(0,)]
    saved = ask(
        tmp_path,
        "select count(*) from experiment_tags where key like ?",
        f"{mlflow_views.TAG_PREFIX}%",
    )
    assert saved == [(len(mlflow_views.of_sweep("a")) * num_sweeps,)]


def test_views_are_saved_once_however_often_they_are_written(tracker, outputs, sweep):
    tracker.log_run(write_run(sweep / "run"))
    links = tracker.write_views(sweep.name)
    assert tracker.write_views(sweep.name) == links
    assert [title for title, _ in links] == [
        *("table", "memory × step time", "memory by kind", "speed", "loss"),
        "scaling over world size",
    ]
    assert all(url.startswith("http://127.0.0.1:5000/#/experiments/") for _, url in links)
    query = "select key from experiment_tags where key like ?"
    keys = {key for (key,) in ask(outputs, query, f"{mlflow_views.TAG_PREFIX}%{sweep.name}.%")}
    assert keys == {view.tag for view in mlflow_views.of_sweep(sweep.name)}


def test_a_deleted_experiment_is_refused_with_the_remedy(tracker, outputs, sweep):
    from mlflow import MlflowClient

    folder = write_run(sweep / "run")
    tracker.log_run(folder)
    client = MlflowClient(tracker.store.uri)
    found = client.get_experiment_by_name(tracker.store.experiment)
    client.delete_experiment(found.experiment_id)
    with pytest.raises(ConfigError, match=r"tracking\.experiment=.* was deleted.*restore"):
        MlflowTracker(None, tracker.store.experiment, outputs).write_views("x")


def test_an_experiment_that_another_process_has_made_meanwhile_is_taken(tracker):
    """Two jobs that begin at once have both found that there is none."""
    store = tracker.store
    with store.opened() as client:
        assert store._create_experiment(client) == store._create_experiment(client)
    assert store.experiment_id == client.get_experiment_by_name(store.experiment).experiment_id


def test_the_store_is_an_absolute_path_wherever_one_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert store_uri(None, Path("outputs")) == f"sqlite:///{tmp_path}/outputs/mlflow.db"
    assert store_uri("sqlite:///here.db", Path("outputs")) == f"sqlite:///{tmp_path}/here.db"
    assert store_uri("http://host:5000/", Path("outputs")) == "http://host:5000"
    command = MlflowTracker(None, "x").store.ui_command()
    assert f"--backend-store-uri sqlite:///{tmp_path}/outputs/mlflow.db" in command


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/mlruns", "mlflow.db", "databricks"])
def test_a_store_that_mlflow_refuses_is_refused_before_it_is_opened(uri: str) -> None:
    with pytest.raises(ConfigError, match=f"tracking.uri={uri}.*use sqlite:///"):
        MlflowTracker(uri, "x")


@pytest.fixture(scope="module")
def quiet(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A process of its own that makes a store in this folder, and sends one run."""
    folder = tmp_path_factory.mktemp("quiet")
    write_run(folder / "sweep" / "done")
    code = (
        "import sys, zeroexp.tracking.mlflow as door\n"
        "from pathlib import Path\n"
        "assert 'mlflow' not in sys.modules, 'imported too early'\n"
        "tracker = door.MlflowTracker(None, 'thrown-away', Path(sys.argv[1]))\n"
        "tracker.log_run(Path(sys.argv[1], 'sweep', 'done'))\n"
        "assert 'pandas' not in sys.modules, 'half a second for nothing'\n"
    )
    words = [sys.executable, "-c", code, str(folder)]
    return folder, subprocess.run(words, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_mlflow_is_imported_late_and_makes_its_store_in_silence(quiet) -> None:
    _, process = quiet
    assert process.returncode == 0, process.stderr
    assert (process.stdout, process.stderr) == ("", "")


@pytest.mark.slow
def test_a_store_that_was_thrown_away_is_made_again_from_the_folders(quiet) -> None:
    """By another process: mlflow keeps a store open for good."""
    folder, _ = quiet
    (before,) = ask(folder, "select run_uuid from runs where name = 'done'")
    (folder / "mlflow.db").unlink()
    tracker = MlflowTracker(None, "thrown-away", folder)
    after = tracker.log_run(folder / "sweep" / "done")
    assert after is not None
    assert after != before[0]
    assert num_metrics(folder, after) > NUM_STEPS * METRICS_PER_STEP
    assert ask(folder, "select count(*) from runs") == [(1,)]


# -- a store that is away for a while ----------------------------------------------------------------


@contextmanager
def away(outputs: Path) -> Iterator[None]:
    """A file where the folder of the store was: whoever asks for the store gets an error."""
    moved = outputs.with_name(f"{outputs.name}-moved")
    outputs.rename(moved)
    outputs.touch()
    try:
        yield
    finally:
        outputs.unlink()
        moved.rename(outputs)


def steps_sent(outputs: Path, run_id: str) -> list[int]:
    query = "select step from metrics where run_uuid = ? and key = 'loss' order by step"
    return [step for (step,) in ask(outputs, query, run_id)]


def test_steps_that_the_store_refused_are_sent_later(tracker, outputs, sweep):
    records = read_timed_records(write_run(sweep / "other", num_steps=7, status="running"))
    run_id = tracker.log_run(write_run(sweep / "run", num_steps=2, status="running"))
    with away(outputs), pytest.raises(OSError):
        tracker.log_steps(run_id, records[2:5])
    assert steps_sent(outputs, run_id) == [0, 1]
    tracker.log_steps(run_id, records[:6])
    assert steps_sent(outputs, run_id) == [0, 1, 2, 3, 4, 5]
    tracker.log_steps(run_id, records)
    assert steps_sent(outputs, run_id) == list(range(7)), "each once"


# -- runs that MLflow can not take as they are ---------------------------------


def test_a_clock_that_is_set_back_loses_no_step(tracker, outputs, sweep):
    folder = write_run(sweep / "run", status="running", num_steps=4)
    run_id = tracker.log_run(folder)
    with RecordWriter(folder) as writer:
        for step in range(4, 7):
            writer.write(record(step))
    rows = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    rows = [{**row, "written_at": row["written_at"] - 3600 * (row["step"] > 3)} for row in rows]
    (folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tracker.log_run(folder)
    assert steps_sent(outputs, run_id) == list(range(7))


def test_a_key_that_is_refused_costs_that_key_alone(tracker, outputs, sweep):
    folder = write_run(sweep / "run", num_steps=4)
    config = load(folder / "config.yaml")
    odd = {**config.model.hf_config, "what?": 1, "fine": 2}
    config = replace(config, model=replace(config.model, hf_config=odd))
    save(config, folder / "config.yaml")
    run_id = tracker.log_run(folder)
    assert list(tracker.store.refused) == ["model.hf_config.what?"]
    params = dict(ask(outputs, "select key, value from params where run_uuid = ?", run_id))
    assert params["model.hf_config.fine"] == "2" and "optimizer.lr" in params
    assert ask(outputs, "select status from runs where run_uuid = ?", run_id) == [("FINISHED",)]


@pytest.mark.parametrize("name", ['a "b"', """it's "b\""""])
def test_a_quote_in_the_name_of_a_sweep_breaks_no_view(tracker, outputs, name):
    from mlflow import MlflowClient

    run_id = tracker.log_run(write_run(outputs / name / "run", num_steps=4))
    experiment = ask(outputs, "select experiment_id from runs where run_uuid = ?", run_id)[0][0]
    found = MlflowClient(tracker.store.uri).search_runs([str(experiment)], filter_of(name))
    assert [run.info.run_id for run in found] == [run_id]
