"""Sweeps from the command line to the exit code, with real ranks on a tiny model; and which points there are."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from tests.composing import composed, values_of
from tests.run_folders import write_run
from tests.warm import Warm
from zeroexp.check.sweep_points import point_of, require_points
from zeroexp.cluster.job import Job
from zeroexp.cluster.sweep import Sweep
from zeroexp.config.keys import Config, ConfigError, StudyConfig
from zeroexp.report import reading
from zeroexp.report.measured_points import points_of
from zeroexp.sync import jobs_of
from zeroexp.tracking import sweep_owner
from zeroexp.tracking.files import (
    MAKING,
    read_records,
    read_summary,
    read_timed_records,
    write_json,
)
from zeroexp.tracking.run import read_run

ROOT = Path(__file__).resolve().parents[2]
CUT = "damaged, as by a power cut"
# A second per point: three steps of two short samples, of a model for which ranks need not import transformers.
LIGHT = [
    *("model=mlp_tiny", "data=vectors", "data.global_batch_size=2", "tracking=files"),
    *("train.warmup_steps=1", "train.steps=2", "cluster.device=cpu"),
]
ONE = ["world_size=1", "cluster.rehearse_s=0", *LIGHT]


# ---- which points there are


def points(config: Config, *overrides: str):
    point = point_of(overrides, asdict(config))
    return [point] if point else []


def test_a_point_is_named_by_strategy_implementation_and_ranks():
    (point,) = points(composed("world_size=1"))
    assert point.name == "zero3-buffer-n1" and point.refusal is None


def test_what_else_is_swept_is_in_the_name():
    words = ["model=tiny", "strategy=zero3", "optimizer.lr=0.01", "data.path='a b/c.txt'"]
    (point,) = points(composed("model=tiny"), *words)
    assert point.name == "zero3-buffer-n2-tiny-lr0.01-path_a_b_c.txt_"
    (point,) = points(composed("model=tiny"), "optimizer.lr=0.1", "strategy.outer.lr=0.7")
    assert point.name == "zero3-buffer-n2-optimizer.lr0.1-outer.lr0.7"
    (point,) = points(composed(), "strategy=mine")  # a file of the user's that begins with zero3
    assert point.name == "zero3-buffer-n2-mine"


def with_strategy(config: Config, stage: str, implementation: str) -> Config:
    strategy = composed(f"strategy={stage}").strategy
    return replace(config, strategy=replace(strategy, implementation=implementation))


def test_a_study_is_the_points_that_match_one_of_its_rows():
    study = StudyConfig(
        include=[
            {"strategy": ["ddp", "zero1"], "world_size": [2]},
            {"strategy": ["zero3"], "strategy.implementation": ["tensor"]},
        ]
    )
    names = [
        point.name
        for stage in ("ddp", "zero2", "zero3")
        for implementation in ("buffer", "tensor")
        for size in (1, 2)
        for config in [replace(composed(), study=study, world_size=size)]
        for point in points(with_strategy(config, stage, implementation))
    ]
    assert names == ["ddp-buffer-n2", "ddp-tensor-n2", "zero3-tensor-n1", "zero3-tensor-n2"]


def test_a_row_of_a_study_that_fits_no_point_is_named(capsys):
    rows = [{"world_size": [1]}, {"strategy": ["zero3"]}, {"strategy.name": ["zero9"]}]
    include: list[dict[str, list[Any]]] = [*rows]
    every = points(replace(composed(), study=StudyConfig(include=include)))
    require_points(every, None)
    said = "zeroexp: study.include: no point of this sweep fits row 1, 3 of it\n"
    assert capsys.readouterr().err == said
    require_points([*every, *points(replace(every[0].config, world_size=1))], None)
    assert "fits row 3 of it" in capsys.readouterr().err


def test_the_main_study_is_what_make_run_promises():
    """Every stage by hand and by torch, and ZeRO-3 in all three layouts; loss must fall and curves agree."""
    study = composed("study=compare")
    assert (study.model.name, study.data.name, study.precision.name) == ("small", "offline", "fp32")
    assert (study.world_size, study.train.warmup_steps, study.train.steps) == (2, 3, 20)
    assert study.study.loss_must_fall and study.study.loss_agreement
    names = [
        point.name
        for stage in ("ddp", "zero1", "zero1_allreduce", "zero2", "zero3")
        for implementation in ("buffer", "torch", "parameter", "tensor")
        for point in points(with_strategy(study, stage, implementation))
    ]
    assert names == [
        *("ddp-buffer-n2", "ddp-torch-n2", "zero1-buffer-n2", "zero1-torch-n2"),
        *("zero2-buffer-n2", "zero2-torch-n2", "zero3-buffer-n2", "zero3-torch-n2"),
        *("zero3-parameter-n2", "zero3-tensor-n2"),
    ]


# ---- real sweeps


# A plugin, which ranks have too.
THIRTEEN_FAILS = """
import os, torch

class Generator(torch.Generator):
    def manual_seed(self, seed):
        if seed == 13 and "RANK" in os.environ:
            raise RuntimeError("this rank fails")
        return super().manual_seed(seed)

torch.Generator = Generator
"""


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent / "plugins")])
    return {**os.environ, "PYTHONPATH": path}


def start(folder: Path, *words: str) -> Warm:
    return Warm([sys.executable, "-m", "zeroexp", *words], cwd=folder, env=environment())


def zeroexp(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    process = start(folder, *words)
    out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.poll() or 0, out, err)


def jobs(folder: Path) -> dict[str, Job]:
    return {path.parent.name: Job(path.parent) for path in folder.glob("outputs/*/*/state.json")}


def statuses(folder: Path) -> dict[str, str]:
    return {name: job.state["status"] for name, job in jobs(folder).items()}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Of a study's stages, by two implementations and two world sizes, two; `-m` in the middle of the line."""
    folder = tmp_path_factory.mktemp("matrix")
    torchs = "{strategy: [zero1_allreduce], strategy.implementation: [torch]}"
    ours = "{strategy: [zero3], strategy.implementation: [buffer]}"
    include = f"include: [{torchs}, {ours}, {{strategy: [zero3], world_size: [2]}}]"
    stages = "hydra: {sweeper: {params: {strategy: 'zero1_allreduce,zero2,zero3'}}}"
    study = write_study(folder, f"loss_agreement: 1e-5, {include}", stages)
    words = [*study, "-m", "strategy.implementation=buffer,torch", "world_size=1,2", *LIGHT]
    command = [sys.executable, "-m", "zeroexp", *words]  # from its first import on
    return folder, subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True
    )


def write_study(folder: Path, claim: str, more: str = "") -> list[str]:
    """The words that choose it."""
    (folder / "study").mkdir()
    text = f"# @package _global_\nstudy: {{name: mine, {claim}}}\n{more}\n"
    (folder / "study" / "mine.yaml").write_text(text)
    return ["--config-dir", str(folder), "study=mine"]


@pytest.mark.slow
def test_every_defined_point_runs_and_the_others_are_skipped(matrix):
    folder, done = matrix
    assert done.returncode == 0, done.stderr
    assert statuses(folder) == {
        "zero1_allreduce-torch-n1": "skipped",
        "zero1_allreduce-torch-n2": "skipped",
        "zero3-buffer-n1": "done",
        "zero3-buffer-n2": "done",
        "zero3-torch-n2": "done",
    }
    reason = jobs(folder)["zero1_allreduce-torch-n2"].state["reason"]
    assert "use zero1" in reason and reason in done.stderr
    assert {job.folder.parent.name for job in jobs(folder).values()} == {"mine"}


def test_a_sweep_ends_with_a_table_a_verdict_and_a_page(matrix):
    folder, done = matrix
    # A verdict about two points, which the machine may give, has a dot between their words.
    rows = re.findall(r"^(?:zero1_allreduce|zero3) [^·\n]*$", done.stdout, flags=re.MULTILINE)
    assert len(rows) == 5 and "3 loss curves agree" in done.stdout
    assert "Report: outputs/mine/report.html" in done.stdout
    page = (folder / "outputs/mine/report.html").read_text()
    assert "zero3-buffer-n2" in page and "zero3-torch-n2" in page


def test_a_rehearsal_stands_beside_what_each_point_has_measured(matrix):
    folder, done = matrix
    table = done.stdout.splitlines()
    assert "planned" in table[0]
    for name, job in jobs(folder).items():
        if summary := read_summary(job.folder):
            assert summary.memory.peak and summary.not_rehearsed is None, name
            above = summary.memory.peak.fullest - summary.rehearsed["peak"]
            assert above > -100_000, name
            # A thread of gloo ends FSDP2's gathers: that of another unit may still live, or not.
            assert above < 100_000 or job.config.strategy.implementation == "torch", name


def test_points_of_a_sweep_train_alike_at_every_world_size(matrix):
    folder, _ = matrix
    curves = {
        name: [record.loss for record in read_records(job.folder)]
        for name, job in jobs(folder).items()
        if job.state["status"] == "done"
    }
    reference = curves["zero3-buffer-n1"]
    assert len(reference) == 3
    for curve in curves.values():
        assert curve == pytest.approx(reference, rel=1e-5)


def test_a_run_folder_says_what_ran_where(matrix):
    folder, _ = matrix
    run = jobs(folder)["zero3-torch-n2"]
    assert (run.config.strategy.implementation, run.config.world_size) == ("torch", 2)
    environment = json.loads((run.folder / "environment.json").read_text())
    assert "study=mine -m strategy.implementation=buffer,torch" in environment["command"]
    assert environment["versions"]["torch"] and environment["host"]
    assert len(environment["git"]["commit"]) == 40
    assert read_summary(run.folder) is not None
    assert not (run.folder / "earlier").exists(), "only repeated points are run again"
    assert sorted(log.name for log in (run.folder / "logs").iterdir()) == ["rank0.log", "rank1.log"]


@pytest.mark.slow
def test_repeats_run_in_rounds_and_give_verdicts_and_a_broken_claim_fails_the_study(
    tmp_path, busy_cores
):
    """Each point runs once before any runs again, and what others used of the machine is written down.

    Since others use all of it, each run is run again at the end, once, and its first files are kept.
    """
    study = write_study(tmp_path, "must_equal: [strategy, versions]")
    with busy_cores:
        words = ["strategy=ddp,zero3", "repeats=2", "world_size=1", *LIGHT]
        done = zeroexp(tmp_path, *study, "-m", *words)
    assert done.returncode == 1, done.stderr
    assert set(statuses(tmp_path).values()) == {"done"}, "it is the claim that fails"
    assert re.search(r"study\.must_equal: strategy\S* differs: ", done.stdout)
    rounds = [f"{point}-buffer-n1{n}" for n in ("", "-r2") for point in ("ddp", "zero3")]
    order = sorted(jobs(tmp_path).values(), key=lambda job: first_state(job)["running_at"])
    assert [job.name for job in order] == rounds
    again = sorted(order, key=lambda job: job.state["running_at"])
    assert [job.name for job in again] == rounds, "times are compared within a round"
    last = max(first_state(job)["done_at"] for job in order)
    for job in order:
        assert [each.name for each in (job.folder / "earlier").iterdir()] == ["1"]
        assert job.state["running_at"] > last
        assert len(read_records(job.folder / "earlier/1")) == len(read_records(job.folder)) == 3
        summary = read_summary(job.folder)
        assert summary and summary.rehearsed, "once for all runs of a point"
    told = "in doubt, are runs of ddp-buffer-n1 (2), zero3-buffer-n1 (2)."
    assert told in " ".join(done.stdout.split())
    of = re.findall(r"^\[\d+/(\d+)\]", done.stderr, flags=re.MULTILINE)
    assert {*of} == {"4", "8"}, "how many run again is known before they do"
    rows = re.findall(r"^(?:ddp|zero3) .*$", done.stdout, flags=re.MULTILINE)
    assert len(rows) == 2, "one row per point"
    assert re.search(r"zero3-buffer-n1 +[\d.]+: can't tell from 2 rounds", done.stdout)
    loads = [read_run(job.folder).other_cores for job in order]
    assert all(0 <= load <= os.cpu_count() for load in loads)


def first_state(job: Job) -> dict[str, Any]:
    return json.loads((job.folder / "earlier/1/state.json").read_text())


@pytest.fixture
def busy_cores() -> Iterator[ExitStack]:
    """Programs that use what is left of half of the cores until the block ends."""
    with ExitStack() as running:
        for _ in range((os.cpu_count() or 2) // 2):
            command = ["nice", "-n", "19", sys.executable, "-S", "-c", "while True: pass"]
            process = subprocess.Popen(command)
            running.callback(process.wait)
            running.callback(process.kill)
        yield running


@pytest.mark.slow
def test_a_failed_point_leaves_the_others_and_is_run_again_alone(tmp_path):
    """One seed fails in the ranks alone; the points before and after it run."""
    (tmp_path / "thirteen_fails.py").write_text(THIRTEEN_FAILS)
    done = zeroexp(tmp_path, "-m", "plugins=thirteen_fails", "train.seed=0,13,0", *ONE)
    assert done.returncode == 1
    found = jobs(tmp_path)
    (failed,) = [job for job in found.values() if job.state["status"] == "failed"]
    assert list(statuses(tmp_path).values()).count("done") == 2
    assert failed.failure is not None and failed.failure["rank"] == 0
    assert failed.failure["exception"] in done.stderr and "rank0.log" in done.stderr

    command = re.search(r"zeroexp (--rerun \S+)", done.stdout)
    assert command is not None
    first_states = {name: job.state for name, job in found.items()}
    again = zeroexp(tmp_path, *command[1].split())
    assert again.returncode == 1
    changed = [name for name, job in jobs(tmp_path).items() if job.state != first_states[name]]
    assert changed == [failed.name]
    assert (failed.folder / "earlier" / "1" / "failure.json").exists()


def test_after_a_power_cut_a_damaged_run_is_named_and_the_others_run_again(
    tmp_path, monkeypatch, capsys
):
    """Which runs a rerun would start, and what it says of those whose files do not let them go on."""
    names = ("done", "failed", "state", "results", "lost", "config", "hole", "curve")
    folders = {name: write_run(tmp_path / name, status="done") for name in names}
    write_json(folders["failed"] / "state.json", {"status": "failed", "reason": "of its own"})
    (folders["state"] / "state.json").write_bytes(b"")
    summary = folders["results"] / "summary.json"
    summary.write_bytes(bytes(summary.stat().st_size))
    (folders["lost"] / "summary.json").unlink()
    (folders["config"] / "config.yaml").write_bytes(b"")
    write_json(folders["hole"] / "state.json", {"status": "failed", "reason": "power"})
    for name in ("hole", "curve"):
        records = folders[name] / "records.jsonl"
        lines = records.read_bytes().split(b"\n")[:-1]
        lines[2] = bytes(len(lines[2]))  # a page of zeros
        records.write_bytes(b"\n".join(lines) + b"\n")
    for step in (2, 5):
        checkpoint = folders["hole"] / f"checkpoint/step-00000{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
    assert read_run(folders["curve"]).reason == f"{records}: {CUT} (1 of 23 steps are missing)"

    begun: list[Job] = []
    monkeypatch.setattr(Sweep, "_execute", lambda _, again: begun.extend(again))
    with Sweep([]) as sweep:
        sweep.rerun_unfinished(tmp_path)
        assert {job.name for job in begun} == {*names} - {"done", "config"}
        assert sweep.conclude() == 1
    told = capsys.readouterr().err.splitlines()
    hole = folders["hole"]
    assert told == [
        f"zeroexp: config is not run again: {folders['config']}/config.yaml: {CUT} (empty); "
        "restore or remove it",
        "zeroexp: hole goes on from an older checkpoint, if there is one: "
        f"{hole}/records.jsonl: {CUT} (1 steps are missing from 2 on)",
    ]
    assert [record.step for record in read_records(hole)] == [0, 1], "what the older one rests on"
    assert (hole / "earlier/1/step-000005/manifest.json").exists()
    assert (hole / "checkpoint/step-000002").exists()
    assert (folders["curve"] / "earlier/1/records.jsonl").read_bytes().count(b"\n") == len(lines)
    assert (folders["results"] / "earlier/1/summary.json").exists()


@pytest.mark.parametrize("ends", [KeyboardInterrupt, pytest.param(OSError, marks=pytest.mark.slow)])
def test_a_batch_gets_all_of_its_folders_or_none(tmp_path, monkeypatch, ends):
    """What ends their making leaves no sweep, of which `--rerun` would know some points alone."""
    made: list[Path] = []

    def end_third(arguments: Any, device: str) -> dict[str, Any]:
        made.extend(tmp_path.glob("outputs/*/*/config.yaml"))
        if len(made) > 3:  # one, then one and two
            raise ends
        return {}

    monkeypatch.setattr("zeroexp.cluster.make_runs.describe_environment", end_third)
    batch = [
        (words, values_of(*words), {})
        for stage in ("ddp", "zero1", "zero2", "zero3")
        if (words := [f"strategy={stage}", f"outputs={tmp_path}/outputs", *LIGHT])
    ]
    with Sweep([]) as sweep:
        with pytest.raises(ends):
            sweep.run(batch)
        assert made and list((tmp_path / "outputs").iterdir()) == []
        assert sweep.conclude() == 0, "there is nothing to tell of"


def rerun(folder: Path) -> None:
    with Sweep([]) as sweep:
        sweep.rerun_unfinished(folder)


@pytest.mark.parametrize("read", [rerun, jobs_of, reading.read_runs])
def test_the_folder_of_a_run_is_no_sweep_whose_run_is_hydras_own_folder(tmp_path, read):
    write_run(tmp_path / ".hydra", status="failed")
    with pytest.raises(ConfigError, match=r"no run in there; give .*outputs/<sweep>"):
        read(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".hydra"]


def test_a_rerun_says_that_a_kill_left_points_without_a_folder(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "here", status="failed")
    (tmp_path / MAKING).touch()
    assert reading.read_runs(tmp_path)[1][0].endswith("some may be missing")
    with monkeypatch.context() as beside_its_owner, pytest.raises(ConfigError, match="lives"):
        refusal = ConfigError("its owner lives")
        beside_its_owner.setattr(sweep_owner, "take_ownership", Mock(side_effect=refusal))
        rerun(tmp_path)
    assert "never ran" not in capsys.readouterr().err
    monkeypatch.setattr(Sweep, "_execute", lambda *_: None)
    with Sweep([]) as sweep:
        sweep.rerun_unfinished(tmp_path)
        assert sweep.conclude() == 1
    assert "never ran; start the sweep again for them" in capsys.readouterr().err


def test_a_point_is_called_by_its_first_run_after_a_rerun_too(tmp_path):
    for repeat, pending in enumerate((9.0, 1.0)):  # the first was set aside, and pends anew
        folder = write_run(tmp_path / f"run-r{repeat + 1}", status="failed")
        environment = json.loads((folder / "environment.json").read_text())
        write_json(folder / "environment.json", {**environment, "repeat": repeat})
        write_json(folder / "state.json", {"status": "failed", "pending_at": pending})
    folders = [tmp_path / "run-r2", tmp_path / "run-r1"]
    assert [run.name for run in reading.readable_runs(folders)] == ["run-r1", "run-r2"]
    assert [point.name for point in points_of(reading.read_runs(tmp_path)[0])] == ["run-r1"]


def test_a_point_that_is_set_aside_keeps_its_place(tmp_path):
    """Else another one would be the first, by which a report divides."""
    for name, pending in (("first", 1.0), ("second", 2.0)):
        folder = write_run(tmp_path / name, status="failed")
        state = {"status": "failed", "reason": "why", "pending_at": pending}
        write_json(folder / "state.json", state)
    Job(tmp_path / "first").put_back()
    assert Job(tmp_path / "first").status == "pending"
    folders = [tmp_path / name for name in ("second", "first")]
    assert [run.name for run in reading.readable_runs(folders)] == ["first", "second"]


def test_a_run_is_set_aside_beside_what_is_left_of_earlier_attempts(tmp_path):
    """Their folders are the user's to remove."""
    folder = write_run(tmp_path / "run", status="failed")
    (folder / "earlier" / "2").mkdir(parents=True)
    Job(folder).put_back()
    assert (folder / "earlier" / "3" / "state.json").exists()


def test_ctrl_c_cancels_what_has_not_ended(tmp_path):
    process = start(tmp_path, "-m", "strategy=zero2,zero3", *LIGHT, "train.steps=10000000")
    while not any(read_records(job.folder) for job in jobs(tmp_path).values()):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130 and "Traceback" not in err
    assert statuses(tmp_path) == {"zero2-buffer-n2": "cancelled", "zero3-buffer-n2": "cancelled"}
    assert "--rerun" in out
    (job,) = (job for job in jobs(tmp_path).values() if job.config.strategy.name == "zero2")
    last, _ = read_timed_records(job.folder)[-1]
    assert last <= job.state["cancelled_at"], "its ranks have ended by then"


OPTUNA = [
    *("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1"),
    *("hydra.sweeper.sampler.seed=1", "optimizer.lr=interval(0.0001,0.01)", "world_size=1"),
]
needs_optuna = pytest.mark.skipif(
    find_spec("hydra_plugins.hydra_optuna_sweeper") is None,
    reason="hydra-optuna-sweeper is not installed: pip install 'zeroexp[optuna]'",
)


@pytest.mark.slow  # test_diverged.py reads what another sweeper is given
@needs_optuna
def test_optuna_minimises_the_final_loss(tmp_path):
    done = zeroexp(tmp_path, *OPTUNA, *LIGHT)
    assert done.returncode == 0, done.stderr
    found = [
        (read_summary(job.folder).final_loss, job.config.optimizer.lr)
        for job in jobs(tmp_path).values()
    ]
    assert len(set(found)) == 2
    assert len({job.folder.parent for job in jobs(tmp_path).values()}) == 1, "one sweep"
    best = yaml.safe_load((tmp_path / "outputs/.hydra/optimization_results.yaml").read_text())
    assert (best["best_value"], best["best_params"]["optimizer.lr"]) == min(found)
    assert done.stdout.count("zero3 ") == 2, "one table of all batches"


@pytest.mark.slow
@needs_optuna
def test_trials_that_fail_are_told_as_points_that_fail(tmp_path):
    """The seed fails in the ranks alone; Optuna then has no best trial."""
    (tmp_path / "thirteen_fails.py").write_text(THIRTEEN_FAILS)
    words = ["plugins=thirteen_fails", "train.seed=13", "hydra.sweeper.n_trials=1"]
    done = zeroexp(tmp_path, *OPTUNA, *LIGHT, *words)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "zeroexp: hydra/sweeper: No trials are completed yet." in done.stderr
    assert "rank0.log" in done.stdout
