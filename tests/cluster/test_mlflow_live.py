"""What a job sends by itself to a real MLflow server: while it goes on, and while the server is not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mlflow_server import MlflowServer
from tests.run_folders import record, write_run
from zeroexp.config.keys import TrackingConfig, load, save
from zeroexp.measure.record import StepRecord
from zeroexp.measure.summary import summarise, summarise_rank
from zeroexp.tracking import mlflow_live
from zeroexp.tracking.files import RecordWriter, read_records, write_json, write_summary
from zeroexp.tracking.mlflow_live import LOG, sender, sends_live
from zeroexp.tracking.mlflow_upload_thread import Uploads

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def server(mlflow: tuple[MlflowServer, dict[str, str]]) -> MlflowServer:
    """One for all tests; each has a run of another name."""
    return mlflow[0]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Niced as it is, what sends starves on a machine that runs other tests too."""
    monkeypatch.setattr(mlflow_live, "END_SECONDS", 300)


def begin_run(folder: Path, uri: str) -> Path:
    """As a job's folder is when its ranks start."""
    write_run(folder, status="pending", num_steps=0)
    change_uri(folder, uri)
    return folder


def change_uri(folder: Path, uri: str) -> None:
    config = load(folder / "config.yaml")
    config.tracking.uri = uri
    save(config, folder / "config.yaml")


def write_steps(folder: Path, first: int, last: int) -> list[StepRecord]:
    with RecordWriter(folder) as writer:
        for step in range(first, last):
            writer.write(record(step))
    return read_records(folder)


def end_run(folder: Path) -> None:
    records = read_records(folder)
    write_summary(folder, summarise(records, [summarise_rank(0, records)]))


def upload(folder: Path) -> Uploads:
    """What watch and sync do when they have found out how the job ended."""
    write_json(folder / "state.json", {"status": "done", "reason": None})
    tracking = load(folder / "config.yaml").tracking
    uploads = Uploads(tracking, folder.parents[1], folder.parent.name)
    uploads.send(folder)
    return uploads


def wait_for(happened: Callable[[], bool], timeout_s: float = 600.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline, f"did not happen within {timeout_s} s"
        time.sleep(0.05)


def expected(folder: Path) -> list[tuple[int, float]]:
    return [(record.step, record.loss) for record in read_records(folder)]


@pytest.mark.slow
def test_steps_arrive_while_the_run_goes_on_and_the_end_is_told(server, tmp_path):
    folder = begin_run(tmp_path / "sweep" / "live", server.uri)
    with sender(folder):
        wait_for(lambda: server.statuses("live") == ["RUNNING"])
        write_steps(folder, 0, 4)
        wait_for(lambda: server.losses("live") == expected(folder))
        write_steps(folder, 4, 7)
        end_run(folder)
    assert len(server.losses("live")) == 7
    assert server.losses("live") == expected(folder)
    assert server.statuses("live") == ["FINISHED"]
    assert server.of_run("live", "value from params", "key = 'strategy.name'") == [("zero3",)]
    assert server.of_run("live", "value from metrics", "key = 'world_size'") == [(1.0,)]
    assert (folder / "logs" / LOG).read_text() == ""

    before = server.of_run("live", "* from metrics", "true order by key, step")
    assert not upload(folder).failed
    assert server.of_run("live", "* from metrics", "true order by key, step") == before
    assert server.statuses("live") == ["FINISHED"], "the same run"


def test_a_server_that_is_away_costs_a_line_and_the_rest_is_sent_later(server, tmp_path):
    nobody = MlflowServer(tmp_path)
    folder = begin_run(tmp_path / "sweep" / "away", nobody.uri)
    log = folder / "logs" / LOG
    with sender(folder):
        wait_for(lambda: "\n" in log.read_text())
        write_steps(folder, 0, 5)
        time.sleep(2.5)  # it tries again, in silence
        end_run(folder)
    reason = f"ConnectionError: no server answers at {nobody.uri}"
    assert log.read_text() == f"MLflow does not take the steps now ({reason})\n"
    change_uri(folder, server.uri)
    assert not upload(folder).failed
    assert server.losses("away") == expected(folder)
    assert server.statuses("away") == ["FINISHED"]


@pytest.mark.slow
@pytest.mark.daemon
def test_a_server_that_dies_in_the_middle(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    with MlflowServer(tmp_path / "server") as server:
        folder = begin_run(tmp_path / "sweep" / "run", server.uri)
        with sender(folder):
            write_steps(folder, 0, 3)
            wait_for(lambda: len(server.losses("run")) == 3)
            server.kill()
            write_steps(folder, 3, 6)
            wait_for(lambda: "\n" in (folder / "logs" / LOG).read_text())
            server.start()
            wait_for(lambda: server.losses("run") == expected(folder))
            server.kill()
            write_steps(folder, 6, 9)
        end_run(folder)
        assert (folder / "logs" / LOG).read_text().count("\n") == 1
        server.start()
        assert len(server.losses("run")) == 6
        assert not upload(folder).failed
        assert server.losses("run") == expected(folder)
        assert server.statuses("run") == ["FINISHED"]


def test_it_ends_with_the_task_that_is_killed(server: MlflowServer, tmp_path: Path) -> None:
    """And what the rank had written is sent; how the job ended is not for this process to say."""
    folder = begin_run(tmp_path / "sweep" / "killed", server.uri)
    (tmp_path / "task.py").write_text(TASK)
    task = subprocess.Popen([sys.executable, tmp_path / "task.py", folder], env=with_path())
    wait_for(lambda: server.statuses("killed") == ["RUNNING"])
    pid = child_of(task.pid)
    # 19 more than that of the task, whatever these tests themselves were given
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(own + 19, 19)
    os.kill(pid, signal.SIGTERM)  # as Slurm does, to all of a job
    write_steps(folder, 0, 5)
    task.kill()
    task.wait()
    wait_for(lambda: not Path(f"/proc/{pid}").exists())
    assert server.losses("killed") == expected(folder)
    assert server.statuses("killed") == ["RUNNING"]


TASK = """
import sys, time
from pathlib import Path
from zeroexp.tracking import mlflow_live
mlflow_live.END_SECONDS = 300
with mlflow_live.sender(Path(sys.argv[1])):
    time.sleep(1000)
"""


def with_path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def child_of(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    return int(child)


@pytest.mark.parametrize(
    ("uri", "tracks", "live"),
    [
        ("http://tracking:5000", True, True),
        ("https://tracking", True, True),
        ("https://tracking", False, False),
        ("sqlite:////shared/mlflow.db", True, False),
        ("postgresql://tracking/db", True, False),
        (None, True, False),
    ],
)
def test_only_servers_are_written_from_nodes(uri: str | None, tracks: bool, live: bool) -> None:
    assert sends_live(TrackingConfig(mlflow=tracks, uri=uri)) is live
