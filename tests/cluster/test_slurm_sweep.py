"""Whole sweeps on a real Slurm, from the command line: the mission's headline, and all that one does with it."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.cluster.minicluster import Minicluster, why_not
from tests.mlflow_server import MlflowServer
from zeroexp.cluster import slurm_state
from zeroexp.cluster.job import Job
from zeroexp.cluster.submit import NO_GPUS, slurm_id
from zeroexp.tracking.files import read_json, read_records

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

ROOT = Path(__file__).parents[2]
SMALL = [
    *("model=tiny", "data=synthetic", "data.global_batch_size=4", "data.seq_len=32"),
    *("train.warmup_steps=1", "train.steps=2", "cluster=slurm", "cluster.device=cpu"),
    *("cluster.slurm.ranks_per_node=1", "cluster.slurm.cpus_per_rank=1"),
    "cluster.rehearse_s=0",  # test_budget.py rehearses
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Minicluster]:
    with Minicluster(tmp_path_factory.mktemp("slurm") / "cluster", "--nodes=4") as started:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        started.environment["PYTHONPATH"] = path
        yield started


def test_a_sweep_over_world_sizes(cluster: Minicluster, tmp_path: Path) -> None:
    done = run(cluster, tmp_path, "zeroexp", "strategy=zero3", "-m", "world_size=1,2,4", *SMALL)
    assert done.returncode == 0, done.stderr
    found = {job.config.world_size: job for job in jobs(tmp_path)}
    assert sorted(found) == [1, 2, 4]
    for world_size, job in found.items():
        submitted = read_json(job.folder / "slurm.json")
        assert (submitted["nodes"], submitted["ranks_per_node"]) == (world_size, 1)
        assert submitted["node_list"].startswith("node")
        assert len(list((job.folder / "logs").glob("rank*.log"))) == world_size
    losses = {n: [record.loss for record in read_records(job.folder)] for n, job in found.items()}
    assert len(losses[1]) == 3
    for world_size in (2, 4):  # sums in another order: equal to rounding
        assert losses[world_size] == pytest.approx(losses[1], rel=1e-5)
    assert set(in_mlflow(tmp_path).values()) == {"FINISHED"}


PLUGIN = """
import torch
from zeroexp.config.optimizer import OPTIMIZERS, OptimizerKind
from zeroexp.cut.layout import LAYOUTS, Layout, by_tensor
from plugin_helper import rate


def make(groups, config):
    return torch.optim.SGD(groups, lr=rate(config.lr), weight_decay=config.weight_decay)


OPTIMIZERS.add("of_test", OptimizerKind(make, num_moments=lambda config: 0))
LAYOUTS.add("layout_of_test", Layout(lambda *cut: tuple(reversed(by_tensor(*cut)))))
"""


def test_a_plugin_trains_on_two_nodes(cluster: Minicluster, tmp_path: Path) -> None:
    """What the module beside it says is found in the folder of the command; the plugin is the submitted one."""
    (tmp_path / "plugin_of_test.py").write_text(PLUGIN)
    (tmp_path / "plugin_helper.py").write_text("def rate(lr):\n    return lr\n")
    words = ["plugins=plugin_of_test", "optimizer=of_test", "optimizer.lr=0.1", "world_size=1,2"]
    layouts = "strategy.implementation=layout_of_test,buffer"
    done = run(cluster, tmp_path, "zeroexp", *words, layouts, *SMALL)
    assert done.returncode == 0, done.stderr
    losses = {job.name: [r.loss for r in read_records(job.folder)] for job in jobs(tmp_path)}
    assert len(losses) == 4
    first, *others = losses.values()
    for curve in others:
        assert curve == pytest.approx(first, rel=1e-5)
    assert first[0] != first[-1]
    assert list(tmp_path.glob("outputs/*/.code/*/plugin_of_test.py"))


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("cluster.slurm.partition=nowhere", "Invalid partition name specified"),
        ("cluster.device=cuda", f"Invalid generic resource (gres) specification; {NO_GPUS}"),
    ],
)
def test_what_slurm_refuses_is_failed_in_mlflow_at_once(cluster, tmp_path, word, reason):
    done = run(cluster, tmp_path, "zeroexp", "world_size=1", *SMALL, word)
    (job,) = jobs(tmp_path)
    assert (done.returncode, job.status) == (1, "failed")
    assert job.state["reason"].endswith(reason)
    assert in_mlflow(tmp_path) == {job.name: "FAILED"}


def test_submit_leave_watch_rerun(cluster: Minicluster, tmp_path: Path) -> None:
    """The second point fails, before a rank starts, until it is repaired."""
    gate = f"test $SLURM_JOB_NUM_NODES = 1 || test -e {tmp_path}/repaired || exit 3"
    settings = [f"cluster.slurm.setup=['{gate}']", "cluster.wait=false", "world_size=1,2"]
    settings.append(f"events.tell='cat >> {tmp_path}/told'")
    done = run(cluster, tmp_path, "zeroexp", *settings, *SMALL)
    assert done.returncode == 0, done.stderr
    first, second = jobs(tmp_path)
    sweep = str(first.folder.parent)
    assert f"zeroexp watch {os.path.relpath(sweep, tmp_path)}" in done.stdout

    watched = run(cluster, tmp_path, "zeroexp.watch", sweep)
    assert watched.returncode == 1, watched.stderr
    assert [first.state["status"], second.state["status"]] == ["done", "failed"]
    assert "Slurm says FAILED" in second.state["reason"]
    assert in_mlflow(tmp_path) == {first.name: "FINISHED", second.name: "FAILED"}
    run(cluster, tmp_path, "zeroexp.watch", sweep)
    told = f"{second.folder}: failed: {second.state['reason']}\n"
    assert (tmp_path / "told").read_text() == told, "once"

    (tmp_path / "repaired").touch()
    before = slurm_id(first)
    again = run(cluster, tmp_path, "zeroexp", "--rerun", sweep)
    assert again.returncode == 0, again.stderr
    followed = run(cluster, tmp_path, "zeroexp.watch", sweep)
    assert followed.returncode == 0, followed.stderr
    assert second.state["status"] == "done"
    assert slurm_id(first) == before, "what had ended well was left alone"
    assert in_mlflow(tmp_path) == {first.name: "FINISHED", second.name: "FINISHED"}
    assert run(cluster, tmp_path, "zeroexp.sync", sweep).returncode == 0
    assert in_mlflow(tmp_path) == {first.name: "FINISHED", second.name: "FINISHED"}


def test_jobs_tell_a_server_of_their_steps(cluster: Minicluster, tmp_path: Path) -> None:
    """By themselves; a server that is away is told of in a line, and filled by sync, in the same MLflow runs."""
    (tmp_path / "server").mkdir()
    server = MlflowServer(tmp_path / "server")
    told = [*SMALL, f"tracking.uri={server.uri}", "world_size=2"]
    done = run(cluster, tmp_path, "zeroexp", *told, "study.name=away")
    assert done.returncode == 0, done.stderr
    assert f"no server answers at {server.uri}); to send them:\n  zeroexp sync" in done.stdout
    (away,) = jobs(tmp_path)
    assert (away.folder / "logs" / "mlflow.log").read_text().count("\n") == 1
    told += ["cluster.wait=false"]
    endless = [*told, "train.steps=100000", "strategy=zero2"]
    with server:
        assert run(cluster, tmp_path, "zeroexp", *told, "strategy=zero1").returncode == 0
        assert run(cluster, tmp_path, "zeroexp.sync", "outputs/away").returncode == 0
        assert server.statuses(away.name) == ["FINISHED"]
        assert server.losses(away.name) == losses_of(away)
        (short,) = (job for job in jobs(tmp_path) if job.config.strategy.name == "zero1")
        # Its sender is niced, and has five seconds at the end: the endless job would take them where all share cores.
        cluster.wait_for(lambda: server.statuses(short.name) == ["FINISHED"], 60)
        assert server.losses(short.name) == losses_of(short)

        assert run(cluster, tmp_path, "zeroexp", *endless).returncode == 0
        (long,) = (job for job in jobs(tmp_path) if job.config.strategy.name == "zero2")
        cluster.wait_for(lambda: len(server.losses(long.name)) > 20, 60)
        assert server.statuses(long.name) == ["RUNNING"]
        watched = run(cluster, tmp_path, "zeroexp.watch", str(long.folder.parent), "--cancel")
        assert watched.returncode == 1, watched.stderr
        assert server.statuses(long.name) == ["KILLED"]
        cluster.wait_for(lambda: cluster.job_state(str(slurm_id(long))) == "CANCELLED", 15)
        assert run(cluster, tmp_path, "zeroexp.sync", str(long.folder.parent)).returncode == 0
        assert server.losses(long.name) == losses_of(long)
        assert server.statuses(long.name) == ["KILLED"]
    assert in_mlflow(tmp_path) == {}, "no database was opened"


@pytest.mark.parametrize("how", ["ctrl_c", "watch"])
def test_cancelling_really_ends_things(cluster: Minicluster, tmp_path: Path, how: str) -> None:
    long = [*SMALL, "train.steps=100000", "world_size=2", f"cluster.wait={how == 'ctrl_c'}"]
    if how == "watch":
        assert run(cluster, tmp_path, "zeroexp", *long).returncode == 0
        (job,) = jobs(tmp_path)
        cluster.wait_for(lambda: cluster.job_state(str(slurm_id(job))) == "RUNNING", 60)
        seen = run(cluster, tmp_path, "zeroexp.watch", str(job.folder.parent), "--once")
        assert (seen.returncode, job.state["status"]) == (0, "running"), seen.stderr
        assert "running" in seen.stdout
        assert in_mlflow(tmp_path) == {job.name: "RUNNING"}
        cancelled = run(cluster, tmp_path, "zeroexp.watch", str(job.folder.parent), "--cancel")
        assert cancelled.returncode == 1
        assert f"Slurm job {slurm_id(job)}" in cancelled.stdout
    else:
        sweep = start(cluster, tmp_path, "zeroexp", *long)
        cluster.wait_for(
            lambda: any(job.state["status"] == "running" for job in jobs(tmp_path)), 60
        )
        sweep.send_signal(signal.SIGINT)
        sweep.communicate(timeout=600)
        assert sweep.returncode == 130
        (job,) = jobs(tmp_path)
    assert job.state["status"] == "cancelled"
    cluster.wait_for(lambda: cluster.job_state(str(slurm_id(job))) == "CANCELLED", 15)
    assert in_mlflow(tmp_path) == ({job.name: "KILLED"} if how == "watch" else {})


def test_a_sweep_over_the_cluster_itself(cluster: Minicluster, tmp_path: Path) -> None:
    of_slurm = ("cluster=slurm", "cluster.slurm.", "cluster.rehearse_s=")
    settings = [word for word in SMALL if not word.startswith(of_slurm)]
    more = ["tracking=files", "world_size=1"]
    done = run(cluster, tmp_path, "zeroexp", "-m", "cluster=local,slurm", *settings, *more)
    assert done.returncode == 0, done.stderr
    found = {job.config.cluster.kind: job for job in jobs(tmp_path)}
    assert {kind: slurm_id(job) is not None for kind, job in found.items()} == {
        "local": False,
        "slurm": True,
    }
    local, slurm = ([r.loss for r in read_records(found[k].folder)] for k in ("local", "slurm"))
    assert local == slurm, "the same ranks do the same sums"
    assert "with activations" in done.stdout and "node-hours (" in done.stdout


def test_without_accounting_a_job_nobody_knows_is_none(cluster, monkeypatch):
    """sacct itself says that there is none, and is not taken for an answer."""
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    assert slurm_state.look_up_jobs(["987654"]) == {}


def run(cluster: Minicluster, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    process = start(cluster, folder, *words)
    out, err = process.communicate(timeout=600)
    assert "Traceback" not in err, err
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def start(cluster: Minicluster, folder: Path, module: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *words],
        cwd=folder,
        env=cluster.environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def jobs(folder: Path) -> list[Job]:
    return [Job(path.parent) for path in sorted(folder.glob("outputs/*/*/config.yaml"))]


def losses_of(job: Job) -> list[tuple[int, float]]:
    return [(record.step, record.loss) for record in read_records(job.folder)]


def in_mlflow(folder: Path) -> dict[str, str]:
    """Status of every run of ours that MLflow knows, by name; the sweep's report is none."""
    database = folder / "outputs" / "mlflow.db"
    if not database.exists():
        return {}
    with closing(sqlite3.connect(database)) as store:
        return dict(store.execute("select name, status from runs where name not like '%: report'"))
