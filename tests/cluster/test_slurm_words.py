"""What is made of Slurm's words, and what is asked of it: without a Slurm."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_sweep import ONE, jobs, start, zeroexp
from tests.warm import Warm
from zeroexp.cluster import slurm_state
from zeroexp.cluster.batch_file import BatchFile, array_file, batch_file
from zeroexp.cluster.code_snapshot import PACKAGE, snapshot_code
from zeroexp.cluster.follow import cancel, cancel_unfinished, follow, refresh
from zeroexp.cluster.job import Job
from zeroexp.cluster.slurm_state import Sighting, conclude_state
from zeroexp.cluster.submit import SUBMITTING, _complaint, hold, slurm_id, submit_all
from zeroexp.cluster.sweep import Sweep
from zeroexp.cluster.task import ENDED, JOB_ID, PREEMPTED, WANTS_ANOTHER
from zeroexp.config.job_shape import JobShape
from zeroexp.config.keys import (
    ClusterConfig,
    Config,
    EventsConfig,
    SlurmConfig,
    TrackingConfig,
    save,
)
from zeroexp.process import signals
from zeroexp.process.world import device_index
from zeroexp.report.sweep_progress import SweepProgress
from zeroexp.tracking import attempt, failure, sweep_owner
from zeroexp.tracking.files import read_json, read_records, write_json

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("world_size", "most", "shape"),
    [
        (1, 8, JobShape(1, 1)),
        (8, 8, JobShape(1, 8)),
        (12, 8, JobShape(2, 6)),
        (9, 4, JobShape(3, 3)),
        (5, 4, JobShape(5, 1)),
    ],
)
def test_a_point_takes_the_fewest_nodes_that_share_it_evenly(world_size, most, shape):
    assert JobShape.of(world_size, most) == shape


def test_a_task_that_nobody_met_is_named_by_srun(tmp_path: Path) -> None:
    """Its peers had not reached it yet; the lines are what srun of Slurm 22 printed of a killed task."""
    job = make_job(tmp_path)
    write_json(job.folder / "slurm.json", {"job_id": "13"})
    (job.folder / "slurm").mkdir()
    (job.folder / "slurm" / "9_batch.err").write_text("srun: error: node8: task 5: Killed\n")
    (job.folder / "slurm" / "13_batch.err").write_text(
        "srun: error: node1: task 0: Killed\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=13.0\n"
        "srun: error: node3: task 2: Exited with exit code 143\n"
    )
    status, reason = conclude_state(
        job, Sighting("FAILED", "NonZeroExitCode", "node1", preempted=False)
    )
    assert status == "failed"
    assert reason == "rank 0 on node1: its task ended first (killed, says srun)"
    write_json(job.folder / "slurm.json", {"job_id": "14"})  # it never began
    assert conclude_state(job, None)[1] == "Slurm has forgotten the job, and it left no result"


def test_that_a_job_made_room_is_known_after_squeue_forgot(tmp_path: Path) -> None:
    """Accounting only knows that it failed; its own note knows why."""
    job = make_job(tmp_path)
    seen = Sighting("FAILED", "None", "node[1-2]", preempted=False)
    assert conclude_state(job, seen) != ("failed", f"{PREEMPTED} (node[1-2])")
    ended = {"number": 1, "began_at": 10.0, "ended_at": 15.0, "reason": PREEMPTED}
    write_json(tmp_path / "attempts.json", {"attempts": [ended]})
    assert conclude_state(job, seen) == ("failed", f"{PREEMPTED} (node[1-2])")
    assert conclude_state(job, None) == ("failed", PREEMPTED)


def test_a_job_that_slurm_holds_after_a_failed_start_says_so(tmp_path: Path) -> None:
    """Nobody but a user or an admin starts it again."""
    seen = Sighting("PENDING", "launch failed requeued held", "", preempted=False, restarts=1)
    job = make_job(tmp_path)
    assert conclude_state(job, seen) == ("requeued", "launch failed requeued held")
    assert conclude_state(job, replace(seen, reason="BeginTime")) == ("requeued", "")
    held = replace(seen, word="SPECIAL_EXIT", reason="JobHeldUser")
    assert conclude_state(job, held) == ("requeued", "JobHeldUser")


def test_words_of_squeue_and_of_sacct_are_read_alike() -> None:
    squeue = "7|PENDING|Resources||N/A|2|\n8|FAILED|NonZeroExitCode|n[1-2]|2026-01-01T00:00:00|0|\n"
    assert slurm_state.parse_job_lines(squeue, {"7", "8"}) == {
        "7": Sighting("PENDING", "Resources", "", preempted=False, restarts=2),
        "8": Sighting("FAILED", "NonZeroExitCode", "n[1-2]", preempted=True),
    }
    sacct = "6|CANCELLED|None|None assigned|\n7|FAILED|||\n8|CANCELLED by 1000|None|n1|\n9|RUNNING|None|n2|\n"
    assert slurm_state.parse_job_lines(sacct, {"6", "7", "8"}) == {
        "6": Sighting("CANCELLED", "None", "", False),
        "7": Sighting("FAILED", "", "", False),
        "8": Sighting("CANCELLED", "None", "n1", False),
    }


def test_the_batch_file_asks_for_what_the_point_takes(tmp_path: Path) -> None:
    site = SlurmConfig(ranks_per_node=4, cpus_per_rank=3, memory_gb=1.5, partition="gpu")
    site.save_s = 77
    site.setup, site.sbatch = ["module load cuda"], {"reservation": "mine"}
    job = make_job(tmp_path / "run", ClusterConfig(device="cuda", timeout_s=90, slurm=site), 8)
    text = batch_file(job).text()
    for line in (
        *("--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--cpus-per-task=3"),
        *("--mem=1536M", "--time=2", "--partition=gpu", "--reservation=mine", "--no-requeue"),
        "--signal=USR2@77",
    ):
        assert f"#SBATCH {line}\n" in text, line
    assert text.index("module load cuda") < text.index("\nsrun ")
    assert "--kill-on-bad-exit=1" in text


def test_a_batch_file_heeds_neither_the_users_options_nor_what_a_killed_attempt_asked_for(
    slurm, monkeypatch, tmp_path
):
    slurm(srun=f"env > {tmp_path}/seen", squeue="true", scontrol=f'echo "$@" >> {tmp_path}/asked')
    job = make_job(tmp_path / "run", ClusterConfig(kind="slurm", requeue=True))
    (job.folder / "slurm").mkdir()
    (job.folder / "slurm" / WANTS_ANOTHER).touch()
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    assert run_batch_file(job, monkeypatch).returncode == 0
    assert "SQUEUE" not in (tmp_path / "seen").read_text()
    assert "requeue" not in (tmp_path / "asked").read_text()


def run_batch_file(job, monkeypatch) -> subprocess.CompletedProcess[str]:
    """As job 7 of Slurm."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (batch := job.folder.parent / "batch.sh").write_text(batch_file(job).text())
    return subprocess.run(["bash", batch], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("words", "num_asked", "waits"),
    [
        ("Unexpected message received for job 7", 3, True),
        ("Access/permission denied for job 7", 1, False),
        ("Job/step already completing or completed for job 7", 1, True),
    ],
)
def test_a_controller_that_is_away_is_asked_again_for_another_start(
    slurm, monkeypatch, tmp_path, words, num_asked, waits
):
    """It takes the third request, or took one whose answer was lost, and ends the job, which waits for that."""
    asked = tmp_path / "asked"
    takes = f"[ $(wc -l < {asked}) -lt 3 ] || exit 0"
    requeue = f"echo >> {asked}; {takes}; echo 'slurm_requeue error: {words}'; exit 1"
    job = make_job(tmp_path / "run", ClusterConfig(kind="slurm", requeue=True))
    (job.folder / "slurm").mkdir()
    slurm(
        srun=f"touch {job.folder}/slurm/{WANTS_ANOTHER}",
        squeue="echo 'squeue: warning 13 of its own' >&2; echo N/A",
        sleep="[ $1 != 60 ] || kill $PPID",
        scontrol=f"case $1 in requeue) {requeue};; esac",
    )
    run_batch_file(job, monkeypatch)
    assert len(asked.read_text()) == num_asked
    (ended,) = [*(job.folder / "slurm").glob("ended*")] or [None]
    assert (ended is None) == waits
    assert ended is None or words in ended.read_text()


def test_the_failure_of_an_attempt_is_not_that_of_the_next_which_fails_before_its_tasks(
    slurm, monkeypatch, tmp_path
):
    """The first lost a node; the second ends in the site's lines, before anything of ours runs."""
    slurm(srun="true", squeue="true", scontrol="true")
    site = SlurmConfig(setup=["false"])
    job = make_job(tmp_path / "run", ClusterConfig(kind="slurm", requeue=True, slurm=site))
    (job.folder / "slurm").mkdir()
    write_json(job.folder / "slurm.json", {"job_id": "7"})
    failure.write(job.folder, "TaskLost", "rank 3 on node17 is gone")
    errors = job.folder / "slurm" / "7_batch.err"
    errors.write_text(run_batch_file(job, monkeypatch).stderr)
    seen = Sighting("FAILED", "NonZeroExitCode", "node3", preempted=False, restarts=1)
    words = "cluster.slurm.setup: exit code 1 of: false"
    assert conclude_state(job, seen) == ("failed", f"{words} ({errors})")


@pytest.mark.slow
def test_the_example_of_a_site_is_what_the_page_says(tmp_path: Path) -> None:
    """Its first command: a dry run, on a machine that need not have Slurm."""
    command = ["-m", "zeroexp", "--config-dir", str(ROOT / "slurm" / "site.example")]
    settings = ["cluster=mysite", "cluster.dry_run=true", "world_size=12", "model=tiny"]
    done = Warm([sys.executable, *command, *settings], cwd=tmp_path, env=slurm_task(0))
    output, errors = done.communicate()
    assert done.returncode == 0, errors
    for line in ("#SBATCH --partition=gpu\n", "#SBATCH --nodes=3\n", "module purge\n"):
        assert line in output
    example = (ROOT / "slurm" / "site.example" / "cluster" / "mysite.yaml").read_text()
    settings = [line for line in example.partition("_self_")[2].splitlines() if ": " in line]
    assert all("# ADAPT" in line or line.startswith("  setup:") for line in settings)


def test_without_slurm_a_sweep_is_refused_in_one_line(tmp_path: Path) -> None:
    empty = {**slurm_task(0), "PATH": str(tmp_path)}
    command = [sys.executable, "-m", "zeroexp", "cluster=slurm", "cluster.device=cpu"]
    done = Warm(command, cwd=tmp_path, env=empty)
    (line,) = done.communicate()[1].splitlines()
    assert done.returncode == 2
    assert line.startswith("zeroexp: cluster=slurm: there is no sbatch") and "minicluster" in line
    assert not list(tmp_path.glob("outputs/*/config.yaml"))


@pytest.mark.parametrize(
    ("visible", "index"), [(1, 0), (2, 1), (8, 1)], ids=["its own", "two", "all of the node"]
)
def test_a_rank_takes_the_only_gpu_that_it_sees(visible: int, index: int) -> None:
    assert device_index(local_rank=1, num_visible=visible) == index


def test_without_hard_links_the_first_failure_still_counts(tmp_path, monkeypatch):
    def refused(*_: object) -> None:
        # Of vfat, and of some networks.
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    for rank in (1, 0):
        failure.write_raised(tmp_path, rank, ArithmeticError(f"of rank {rank}"))
    told = Job(tmp_path).failure
    assert told is not None and told["message"] == "of rank 1"
    assert [path.name for path in tmp_path.iterdir()] == ["failure.json"]


def test_of_one_name_only_as_many_as_may_run(tmp_path: Path) -> None:
    job = make_job(tmp_path / "run", ClusterConfig(device="cpu", slurm=SlurmConfig(max_running=2)))
    text = batch_file(job).text()
    assert "--dependency=singleton\n" in text
    assert f"--job-name={tmp_path.name}-0\n" in text
    assert "--gpus-per-node" not in text


def test_a_sites_dependency_stands_beside_what_limits_the_sweep(tmp_path: Path) -> None:
    """Of an array too, which limits its elements by itself."""
    site = SlurmConfig(max_running=2, sbatch={"dependency": "afterok:1"})
    job = make_job(tmp_path / "run", ClusterConfig(device="cpu", slurm=site))
    assert "--dependency=afterok:1,singleton\n" in batch_file(job).text()
    text = array_file([job, job]).text()
    assert "--dependency=afterok:1\n" in text and "--array=0-1%2\n" in text


def test_the_same_code_is_copied_once_and_changed_code_again(tmp_path, monkeypatch):
    package = tmp_path / PACKAGE.name
    package.mkdir()
    (package / "loop.py").write_text("SPEED = 1\n")
    monkeypatch.setattr("zeroexp.cluster.code_snapshot.PACKAGE", package)
    first = snapshot_code(tmp_path / "sweep")
    assert snapshot_code(tmp_path / "sweep") == first
    (package / "loop.py").write_text("SPEED = 2\n")
    second = snapshot_code(tmp_path / "sweep")
    assert second != first
    assert (first / PACKAGE.name / "loop.py").read_text() == "SPEED = 1\n"
    assert len(list((tmp_path / "sweep" / ".code").iterdir())) == 2


def test_a_task_costs_its_rank_next_to_nothing() -> None:
    """It waits beside every rank, while that is measured."""
    imports = (
        "import sys, zeroexp.cluster.task; print(*{'torch', 'mlflow', 'yaml'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", imports], env=slurm_task(0), capture_output=True)
    assert (done.returncode, done.stdout.strip()) == (0, b"")


@pytest.mark.parametrize(
    ("main", "code", "exception"),
    [("kill_rank_1", 137, "SIGKILL"), ("exit_silently", 7, "exit code 7")],
)
def test_a_task_says_how_its_rank_died(tmp_path, main, code, exception):
    (tmp_path / "pid0").touch()  # of the other rank
    done = subprocess.run(task(tmp_path, main), env=slurm_task(1), timeout=600)
    assert done.returncode == code
    found = Job(tmp_path).failure
    assert found is not None and (found["rank"], found["exception"]) == (1, exception)


def test_a_rank_that_is_done_does_not_wait_for_its_threads(tmp_path: Path) -> None:
    """Nor for the interpreter's end, which kills them, and with one of gloo's the process."""
    done = subprocess.run(task(tmp_path, "leave_a_thread"), env=slurm_task(1), timeout=600)
    assert (done.returncode, Job(tmp_path).failure) == (0, None)


def test_a_rank_that_can_not_start_leaves_its_traceback(tmp_path: Path) -> None:
    done = subprocess.run(task(tmp_path, "no_such_function"), env=slurm_task(1), timeout=600)
    assert done.returncode == 1
    found = Job(tmp_path).failure
    assert "no_such_function" in Path(found["log"]).read_text(encoding="utf-8")
    assert "exit code 1; its log ends with: AttributeError: " in found["message"]


def test_a_task_that_slurm_ends_blames_nobody(tmp_path: Path) -> None:
    running = subprocess.Popen(task(tmp_path, "hang"), env=slurm_task(0), start_new_session=True)
    try:
        while not (tmp_path / "pid0").exists():
            assert running.poll() is None
            time.sleep(0.02)
        os.killpg(running.pid, signal.SIGTERM)  # as Slurm does: the task and its children
        assert running.wait(timeout=600) == 128 + signal.SIGTERM
    finally:
        running.kill()
    assert Job(tmp_path).failure is None
    (told,) = attempt.read(tmp_path)
    assert told["reason"] == ENDED


def test_that_slurm_ended_a_task_is_noted_before_slurm_is_asked_why(slurm, tmp_path: Path) -> None:
    """Its controller may be away until the task is killed."""
    slurm(squeue=f"touch {tmp_path}/asked; exec sleep 1000")
    running = subprocess.Popen(task(tmp_path, "hang"), env=slurm_task(0), start_new_session=True)
    try:
        for reached, then in (("pid0", signal.SIGTERM), ("asked", signal.SIGKILL)):
            while not (tmp_path / reached).exists():
                assert running.poll() is None
                time.sleep(0.02)
            os.killpg(running.pid, then)
        running.wait(timeout=600)
    finally:
        running.kill()
    assert [each["reason"] for each in attempt.read(tmp_path)] == [ENDED]


def task(folder: Path, main: str) -> list[str]:
    (folder / "slurm").mkdir()
    make_job(folder, ClusterConfig(kind="slurm", device="cpu"), world_size=2)
    rank_main = f"tests.cluster.light_ranks:{main}"
    return [sys.executable, "-m", "zeroexp.cluster.task", rank_main, str(folder)]


def slurm_task(rank: int) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    place = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    place["ZEROEXP_JOB"] = "987654"
    place |= {"ZEROEXP_HEARTBEAT": "127.0.0.1", "ZEROEXP_SECRET": "ab" * 32}
    return {**os.environ, **place, "PYTHONPATH": path}


def test_jobs_that_a_silent_slurm_can_not_cancel_go_on_and_one_line_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Silent because this PATH has no scancel."""
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    local, slurm = make_job(sweep / "local"), make_job(sweep / "slurm")
    write_json(slurm.folder / "slurm.json", {"job_id": "17"})
    for job in (local, slurm):
        job.enter("running")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cancel_unfinished([local, slurm]) == [local]
    assert [job.state["status"] for job in (local, slurm)] == ["cancelled", "running"]
    said = capsys.readouterr().err
    assert said.startswith("zeroexp: Slurm does not answer (scancel is not here;")
    assert "so that 1 jobs go on (17)" in said and said.count("\n") == 1
    assert f"`zeroexp watch {os.path.relpath(sweep)} --cancel` ends them" in said
    ends = Sighting("CANCELLED", "None", "n1", False)
    assert conclude_state(slurm, ends)[1].startswith("cancelled in Slurm"), (
        "by somebody else, later"
    )


def make_job(folder: Path, cluster: ClusterConfig | None = None, world_size: int = 1) -> Job:
    folder.mkdir(exist_ok=True)
    config = Config(cluster=cluster or ClusterConfig(), world_size=world_size)
    save(config, folder / "config.yaml")
    return Job(folder)


FILES_ALONE = TrackingConfig(mlflow=False)


def keep(job: Job, **sections: Any) -> None:
    save(replace(job.config, **sections), job.folder / "config.yaml")


@pytest.fixture
def slurm(monkeypatch, tmp_path) -> Callable[..., None]:
    """A Slurm of shell scripts: each word is a command and its value what it runs."""

    def slurm(**scripts: str) -> None:
        (tmp_path / "bin").mkdir()
        for name, script in scripts.items():
            (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / "bin" / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)

    return slurm


def test_an_sbatch_that_is_killed_is_said_to_be(slurm, tmp_path):
    """It says nothing, and the line that told of it was empty."""
    slurm(sbatch="kill -9 $$")
    job_id, words = BatchFile(tmp_path, {}, [], "true").submit("name")
    assert job_id is None and _complaint(words).startswith("sbatch was killed, or ended without")


def test_the_line_counts_and_not_what_the_environment_asks_sbatch_for(slurm, tmp_path):
    """sbatch takes SBATCH_ACCOUNT for --account of the file, and only its own arguments before that."""
    asks = {"nodes": 1, "account": "a b"}
    slurm(sbatch=f'echo "$@" > {tmp_path}/arguments; echo Submitted batch job 7')
    site = ["#SBATCH --exclusive  # what people paste", "#SBATCH --comment=don't"]
    assert BatchFile(tmp_path, asks, site, "true").submit("name") == ("7", "")
    arguments = (tmp_path / "arguments").read_text()
    assert "--account=a b " in arguments and "--exclusive" not in arguments


def test_no_option_of_the_environment_hides_jobs(monkeypatch):
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    assert "SQUEUE_PARTITION" not in slurm_state._ask("env")


def test_of_a_job_that_outlives_its_sweep_whoever_sees_its_end_tells_once(slurm, tmp_path):
    slurm(squeue="echo '17|FAILED|None|n1|N/A|0|'")
    job = make_job(tmp_path / "run")
    keep(job, events=EventsConfig(tell=f"cat >> {tmp_path}/told"))
    job.enter("running")
    write_json(job.folder / "slurm.json", {"job_id": "17"})
    refresh([job])
    refresh([job])
    assert (tmp_path / "told").read_text() == f"{job.folder}: failed: {job.state['reason']}\n"


def test_a_job_that_slurm_cancels_by_itself_is_told_and_says_on_which_node(slurm, tmp_path):
    """As where a node's Prolog fails. What somebody cancels by a command of ours is not told."""
    slurm(squeue="echo '17|CANCELLED|None|n1|N/A|0|'", scancel="true")
    slurms, ours = make_job(tmp_path / "run1"), make_job(tmp_path / "run2")
    for job in (slurms, ours):
        keep(job, events=EventsConfig(tell=f"cat >> {tmp_path}/told"))
        job.enter("running")
    write_json(slurms.folder / "slurm.json", {"job_id": "17"})
    refresh([slurms])
    cancel_unfinished([ours])
    reason = "cancelled in Slurm before it began on n1 (sinfo -R may say why)"
    assert (tmp_path / "told").read_text() == f"{slurms.folder}: cancelled: {reason}\n"
    (slurms.folder / "slurm").mkdir()
    (slurms.folder / "slurm" / JOB_ID).touch()
    seen = Sighting("CANCELLED", "None", "n1", False)
    assert conclude_state(slurms, seen) == ("cancelled", "cancelled in Slurm")


def test_a_time_limit_of_the_sites_options_is_named(tmp_path):
    job = make_job(tmp_path, ClusterConfig(slurm=SlurmConfig(sbatch={"time": "0-02"})))
    limit = "time limit of 0-02 (cluster.slurm.sbatch.time)"
    assert conclude_state(job, Sighting("TIMEOUT", "None", "n1", False)) == ("timed_out", limit)


def test_a_job_that_has_ended_is_not_cancelled(slurm, tmp_path):
    """One looks at Slurm every 15 s, and Ctrl-C came in between."""
    slurm(squeue="echo '17|COMPLETED|None|n1|N/A|0|'", scancel="true")
    job = make_job(tmp_path / "run")
    job.enter("running")
    write_json(job.folder / "slurm.json", {"job_id": "17"})
    write_json(job.folder / "summary.json", {"num_steps": 1})
    cancel_unfinished([job])
    assert job.state["status"] == "done"


# Job 1 fails at once. At the next look another command has submitted its run again, as job 9, and job 2 is {ends}.
SQUEUE = """
echo >> {here}/looks
if [ $(wc -l < {here}/looks) = 1 ]; then
    echo '1|FAILED|None|n1|N/A|0|'
    echo '2|RUNNING|None|n1|N/A|0|'
    exit
fi
echo '{{"job_id": "9"}}' > {here}/run1/slurm.json
echo '{{"status": "pending", "reason": null}}' > {here}/run1/state.json
echo '9|RUNNING|None|n1|N/A|0|'
echo '2|{ends}|None|n1|N/A|0|'
[ $(wc -l < {here}/looks) != 2 ] || {then}
"""


@pytest.mark.parametrize(
    ("ends", "then", "cancelled"),
    [("COMPLETED", "true", ""), ("RUNNING", "kill -INT $PPID", "2\n")],
    ids=["at its end", "interrupted"],
)
def test_a_sweep_leaves_alone_what_another_command_has_submitted_again(
    slurm, tmp_path, monkeypatch, ends, then, cancelled
):
    # This process may have handlers of ours.
    monkeypatch.setattr(signals, "_num_asked", 0)
    slurm(
        sbatch=f"echo >> {tmp_path}/ids; echo Submitted batch job $(wc -l < {tmp_path}/ids)",
        squeue=SQUEUE.format(here=tmp_path, ends=ends, then=then),
        scancel=f'echo "$@" >> {tmp_path}/cancelled',
    )
    jobs = [make_job(tmp_path / f"run{number}", ClusterConfig(kind="slurm")) for number in (1, 2)]
    for job in jobs:
        keep(job, tracking=FILES_ALONE)
        job.enter("pending")
    write_json(jobs[1].folder / "summary.json", {"num_steps": 1})
    (tmp_path / "cancelled").touch()
    stops = pytest.raises(KeyboardInterrupt) if cancelled else nullcontext()
    with stops, Sweep([]) as sweep:
        sweep._execute(jobs)
    assert (tmp_path / "cancelled").read_text() == cancelled
    assert jobs[0].status == "pending"


# Job 1 trains. Before the second look it has failed, and another command runs its run again, as job 9.
SUBMITTED_AGAIN = """
echo >> {here}/looks
case $(wc -l < {here}/looks) in
1) echo '1|RUNNING|None|n1|N/A|0|' ;;
2)
    echo '{{"job_id": "9"}}' > {here}/run/slurm.json
    echo '{{"status": "running", "reason": null}}' > {here}/run/state.json
    echo '1|FAILED|None|n1|N/A|0|' ;;
*) cp {here}/run/state.json {here}/state3; echo '9|COMPLETED|None|n9|N/A|0|' ;;
esac
"""


def test_the_end_of_a_job_is_not_that_of_another_which_runs_its_point_again(slurm, tmp_path):
    slurm(
        sbatch="echo Submitted batch job 1",
        squeue=SUBMITTED_AGAIN.format(here=tmp_path),
        sacct="true",
    )
    job = make_job(tmp_path / "run", ClusterConfig(kind="slurm"))
    keep(job, events=EventsConfig(tell=f"cat >> {tmp_path}/told"), tracking=FILES_ALONE)
    job.enter("pending")
    write_json(job.folder / "summary.json", {"num_steps": 1})
    with Sweep([]) as sweep:
        sweep._execute([job])
    assert '"running"' in (tmp_path / "state3").read_text()
    assert job.status == "done" and not (tmp_path / "told").exists()
    assert read_json(job.folder / "slurm.json") == {"job_id": "9", "node_list": "n9"}


NAME_OF = """sed 's/.*"name": "\\([^"]*\\)".*/7|\\1|/' {here}/run0/submitting.json"""


def test_points_of_an_array_keep_their_ids_where_others_look_while_it_is_submitted(slurm, tmp_path):
    """A look finds the job by its name, notes the ids, and removes the files that say which element is whose."""
    look = f"{sys.executable} -m zeroexp.watch {tmp_path} --once > /dev/null"
    runs = "".join(f"7_{index}|RUNNING|None|n1|N/A|0|\\n" for index in (0, 1))
    by_name = NAME_OF.format(here=tmp_path)
    slurm(
        sbatch=f"{look}; echo Submitted batch job 7",
        squeue=f"case $* in *Comment*) {by_name} ;; *) printf '{runs}' ;; esac",
    )
    jobs = slurm_jobs(tmp_path, array=True)
    submit_all(jobs)
    assert [slurm_id(job) for job in jobs] == ["7_0", "7_1"]
    assert not any((job.folder / SUBMITTING).exists() for job in jobs)
    refresh(jobs)
    assert [job.status for job in jobs] == ["running", "running"]


def test_points_beyond_the_largest_array_are_submitted_one_by_one(slurm, tmp_path):
    no = SAYS.format("Invalid job array specification")
    ids = tmp_path / "ids"
    answer = f"echo >> {ids}; echo Submitted batch job $(wc -l < {ids})"
    slurm(sbatch=f"case $* in *--array=*) {no} ;; esac; {answer}")
    jobs = slurm_jobs(tmp_path, array=True)
    submit_all(jobs)
    assert [slurm_id(job) for job in jobs] == ["1", "2"]


def test_what_watch_cancels_is_not_submitted_afterwards(slurm, tmp_path):
    """One point trains, another is held: once the first has ended, Slurm would take it."""
    slurm(
        squeue="echo '7|RUNNING|None|n1|N/A|0|'",
        scancel=f'echo "$@" >> {tmp_path}/cancelled',
        sbatch=f"touch {tmp_path}/submitted; echo Submitted batch job 8",
    )
    first, second = jobs = slurm_jobs(tmp_path)
    write_json(first.folder / "slurm.json", {"job_id": "7"})
    hold(second, "MaxSubmitJobs")
    told = _run("zeroexp.watch", str(tmp_path), "--cancel").stdout
    assert told.startswith(f"cancelled {first.name} (Slurm job 7)\n")
    assert f"cancelled {second.name} (not submitted)\n" in told
    assert (tmp_path / "cancelled").read_text() == "7\n"
    with SweepProgress(2) as progress:
        follow(dict(enumerate(jobs, start=1)), progress, on_step=lambda _: None, on_end=print)
    submit_all(jobs)
    assert not (tmp_path / "submitted").exists()
    assert [job.status for job in jobs] == ["cancelled", "cancelled"]


def test_what_watch_cancels_while_it_is_submitted_is_cancelled_in_slurm(slurm, tmp_path):
    """sbatch has the first point, and has not answered; the second is not submitted so far."""
    cancel = f"{sys.executable} -m zeroexp.watch {tmp_path} --cancel > /dev/null"
    slurm(
        squeue="true",
        sbatch=f"echo >> {tmp_path}/ids; {cancel}; echo Submitted batch job 7",
        scancel=f'echo "$@" >> {tmp_path}/cancelled',
    )
    jobs = slurm_jobs(tmp_path)
    submit_all(jobs)
    assert (tmp_path / "ids").read_text() == "\n"
    assert (tmp_path / "cancelled").read_text() == "7\n"
    assert [job.status for job in jobs] == ["cancelled", "cancelled"]


def test_a_job_whose_submitter_died_behind_sbatch_goes_on(slurm, tmp_path):
    """A look finds it by its name: the death of who ran the sweep is no reason to cancel it."""
    slurm(
        squeue=f"case $* in *Comment*) {NAME_OF.format(here=tmp_path)} ;; *) echo '7|RUNNING|None|n1|N/A|0|' ;; esac",
        scancel=f"touch {tmp_path}/cancelled",
    )
    job, _ = slurm_jobs(tmp_path)
    write_json(job.folder / SUBMITTING, {"name": "of the one that died"})
    owned_by_a_dead_process(tmp_path)
    refresh([job])
    assert job.status == "running" and slurm_id(job) == "7"
    assert not (tmp_path / "cancelled").exists()


@pytest.mark.parametrize("is_wished", [False, True])
def test_a_job_that_slurm_shows_after_its_submitter_has_died_is_cancelled_on_request_alone(
    slurm, tmp_path, is_wished
):
    """The first look comes while sbatch still asks the controller."""
    queued = tmp_path / "queued"
    shown = f"case $* in *Comment*) {NAME_OF.format(here=tmp_path)} ;; *) echo '7|RUNNING|None|n1|N/A|0|' ;; esac"
    slurm(
        squeue=f"[ ! -e {queued} ] || {shown}",
        sacct="true",
        scancel=f'echo "$@" >> {tmp_path}/cancelled',
    )
    job, _ = slurm_jobs(tmp_path)
    write_json(job.folder / SUBMITTING, {"name": "of the one that died"})
    owned_by_a_dead_process(tmp_path)
    refresh([job])
    if is_wished:
        cancel([job], "cancelled by watch --cancel")
    queued.touch()
    refresh([job])
    assert job.status == ("cancelled" if is_wished else "running") and slurm_id(job) == "7"
    assert (tmp_path / "cancelled").exists() == is_wished


def owned_by_a_dead_process(sweep: Path) -> None:
    dead = {"host": socket.gethostname(), "pid": 1, "locked": True}
    write_json(sweep / "owner.json", dead)
    (sweep / ".owner.json.lock").touch()


def test_a_held_point_that_slurm_refuses_later_is_told(slurm, tmp_path):
    """By the watch that submits it, as nobody follows it otherwise."""
    slurm(sbatch=SAYS.format("Invalid account"), squeue="true")
    (job, _), told = slurm_jobs(tmp_path), tmp_path / "told"
    keep(job, events=EventsConfig(tell=f"cat >> {told}"))
    hold(job, "MaxSubmitJobs")
    _run("zeroexp.watch", str(tmp_path))
    assert told.read_text() == f"{job.folder}: failed: {job.state['reason']}\n"
    assert "Invalid account" in told.read_text()


def test_a_watch_tells_of_points_that_a_lost_machine_was_to_submit(slurm, tmp_path):
    slurm(squeue="true", sbatch=f"touch {tmp_path}/submitted")
    first, second = slurm_jobs(tmp_path)
    write_json(first.folder / "slurm.json", {"job_id": "7"})
    first.enter("done")
    hold(second, "MaxSubmitJobs")
    write_json(tmp_path / "owner.json", {"host": "login1", "pid": 77, "locked": True})
    done = _run("zeroexp.watch", str(tmp_path))
    assert f"another process is to submit {second.name}: " in done.stderr
    assert "77 on login1" in done.stderr
    assert done.returncode == 1 and not (tmp_path / "submitted").exists()


def test_a_watch_follows_what_a_living_sweep_submits_meanwhile(slurm, tmp_path):
    """It notes the second job's id while the first is followed."""
    first, second = slurm_jobs(tmp_path)
    write_json(first.folder / "slurm.json", {"job_id": "7"})
    looks, note = tmp_path / "looks", f'{{"job_id": "8"}}\' > {second.folder}/slurm.json'
    later = f"echo '{note}; echo '7|COMPLETED|None|n1|N/A|0|\n8|COMPLETED|None|n1|N/A|0|'"
    runs = f"echo >> {looks}; if [ $(wc -l < {looks}) -lt 3 ]; then echo '7|RUNNING|None|n1|N/A|0|'; else {later}; fi"
    slurm(squeue=f"case $* in *Comment*) ;; *) {runs} ;; esac")
    for job in (first, second):
        write_json(job.folder / "summary.json", {"num_steps": 1})
    _run("zeroexp.watch", str(tmp_path))
    assert [job.status for job in (first, second)] == ["done", "done"]


def test_a_watch_waits_for_points_that_a_living_sweep_has_not_submitted(slurm, tmp_path):
    """Also where it begins before any of them has an id."""
    slurm(squeue="printf '7|COMPLETED|None|n1|N/A|0|\\n8|COMPLETED|None|n1|N/A|0|\\n'")
    jobs = slurm_jobs(tmp_path)
    sweep_owner.take_ownership(tmp_path)
    command = [sys.executable, "-m", "zeroexp.watch", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as watch:
        assert watch.stderr is not None
        line = watch.stderr.readline()
        for number, job in enumerate(jobs, start=7):
            write_json(job.folder / "summary.json", {"num_steps": 1})
            write_json(job.folder / "slurm.json", {"job_id": str(number)})
        sweep_owner.release_ownership(tmp_path)
        watch.stderr.read()
    assert line.startswith("zeroexp: another process is to submit run")
    assert f"process {os.getpid()} on " in line
    assert [job.status for job in jobs] == ["done", "done"]


def test_what_watch_cancels_is_not_told_by_who_sees_it_first(slurm, tmp_path):
    """A sweep that lives, or another look, sees the end in Slurm before watch has written it."""
    look = f"{sys.executable} -m zeroexp.watch {tmp_path} --once > /dev/null"
    slurm(
        squeue=f'[ -e {tmp_path}/ends ] && word=CANCELLED || word=RUNNING; echo "7|$word|None|n1|N/A|0|"',
        scancel=f"touch {tmp_path}/ends; {look}; cp {tmp_path}/run0/state.json {tmp_path}/seen",
    )
    job, other = slurm_jobs(tmp_path)
    other.enter("done")
    keep(job, events=EventsConfig(tell=f"cat >> {tmp_path}/told"))
    write_json(job.folder / "slurm.json", {"job_id": "7"})
    _run("zeroexp.watch", str(tmp_path), "--cancel")
    assert '"cancelled by watch --cancel"' in (tmp_path / "seen").read_text()
    assert job.state["reason"] == "cancelled by watch --cancel"
    assert not (tmp_path / "told").exists()


def test_a_terminal_that_is_gone_leaves_what_slurm_has_and_ends_what_runs_here(slurm, tmp_path):
    slurm(sbatch="echo Submitted batch job 7", scancel=f"touch {tmp_path}/asked", squeue="true")
    process = start(tmp_path, "-m", "cluster=slurm,local", *ONE, "train.steps=10000000")
    while not any(read_records(job.folder) for job in jobs(tmp_path).values()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 130
    ended = {job.config.cluster.kind: job.status for job in jobs(tmp_path).values()}
    assert ended == {"local": "cancelled", "slurm": "pending"}
    assert not (tmp_path / "asked").exists()
    (sweep,) = tmp_path.glob("outputs/*-*")
    assert "Points that Slurm has now: 1; to see what becomes of them:" in out
    assert f"  zeroexp watch outputs/{sweep.name}\n" in out


def test_points_that_nobody_waits_for_are_slurms_or_wait_for_watch(slurm, tmp_path):
    ids, full = tmp_path / "ids", SAYS.format("QOSMaxSubmitJobPerUserLimit")
    slurm(
        sbatch=f"echo >> {ids}; [ $(wc -l < {ids}) = 1 ] || {{ {full}; }}; echo Submitted batch job 7"
    )
    words = ["cluster=slurm", "cluster.wait=false", "train.seed=0,1,2", *ONE]
    done = zeroexp(tmp_path, "-m", *words)
    assert done.returncode == 0, done.stderr
    told = "Points that Slurm has now: 1, and that zeroexp watch is to submit: 2; to see"
    assert told in done.stdout


def _run(*words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, "-m", *words], {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, **how)


def slurm_jobs(sweep: Path, *, array: bool = False) -> list[Job]:
    """Two points that are to be submitted."""
    cluster = ClusterConfig(kind="slurm", device="cpu", slurm=SlurmConfig(array=array))
    jobs = [make_job(sweep / f"run{number}", cluster) for number in (0, 1)]
    for job in jobs:
        keep(job, tracking=FILES_ALONE)
        write_json(job.folder / "environment.json", {"folder": str(sweep)})
        job.enter("pending")
    return jobs


# A plugin that the first of two commands imports once it has chosen what it submits: in there the second one runs.
MEETS = """
import os, subprocess, sys
if "SECOND" not in os.environ:
    with open("second", "w") as file:
        again = [sys.executable, "-m", "zeroexp", "--rerun", "sweep"]
        subprocess.run(again, env={**os.environ, "SECOND": "1"}, stdout=file, stderr=file)
"""


def test_two_that_run_a_sweep_again_at_once_submit_each_point_once(slurm, tmp_path):
    """While a point has no job, no look at it calls it cancelled for the death of who ran the sweep before."""
    look = f"{sys.executable} -m zeroexp.watch {tmp_path}/sweep --once > /dev/null"
    slurm(sbatch=f"echo >> {tmp_path}/ids; {look}; echo Submitted batch job 7", squeue="true")
    (tmp_path / "meets.py").write_text(MEETS)
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    job = make_job(sweep / "run", ClusterConfig(kind="slurm", wait=False))
    keep(job, tracking=FILES_ALONE, plugins=["meets"])
    job.enter("failed", "rank 0: no")
    write_json(job.folder / "slurm.json", {"job_id": "1"})
    write_json(job.folder / "environment.json", {"folder": str(tmp_path)})
    owned_by_a_dead_process(sweep)
    done = _run("zeroexp", "--rerun", "sweep", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ids").read_text() == "\n", "one sbatch"
    assert "runs its points; wait for it or end it" in (tmp_path / "second").read_text()
    assert job.status == "pending" and job.state["reason"] is None


# Job 1 fails and job 2 trains. At the second look another terminal runs the sweep again, whose job 3 trains on.
BESIDE = """
if [ $SECOND ]; then echo '2|RUNNING|None|n1|N/A|0|'; echo '3|COMPLETED|None|n1|N/A|0|'; exit; fi
echo >> {here}/looks
echo '1|FAILED|None|n1|N/A|0|'
if [ $(wc -l < {here}/looks) = 1 ]; then echo '2|RUNNING|None|n1|N/A|0|'; exit; fi
SECOND=1 {python} -m zeroexp --rerun {here}/outputs/mine > {here}/second 2>&1
echo '2|COMPLETED|None|n1|N/A|0|'
"""


def test_what_failed_is_run_again_while_its_sweep_follows_the_rest(slurm, tmp_path):
    ids = tmp_path / "ids"
    slurm(
        sbatch=f"echo >> {ids}; echo Submitted batch job $(wc -l < {ids})",
        squeue=BESIDE.format(here=tmp_path, python=sys.executable),
        sacct="true",
    )
    done = zeroexp(tmp_path, "-m", "cluster=slurm", "train.seed=0,1", "study.name=mine", *ONE)
    assert "run again" not in done.stderr and done.returncode == 1, done.stderr
    assert ids.read_text() == "\n" * 3, (tmp_path / "second").read_text()
    assert sorted(slurm_id(job) or "" for job in jobs(tmp_path).values()) == ["2", "3"]
    assert not (tmp_path / "outputs/mine/owner.json").exists()


# At the first look another process, which lives on, has taken the sweep.
TAKEN = """
if [ ! -e {here}/other ]; then
    {python} -c "{take}" > /dev/null 2>&1 &
    echo $! > {here}/other
    while [ ! -e {here}/outputs/mine/owner.json ]; do sleep 0.05; done
fi
echo '1|COMPLETED|None|n1|N/A|0|'
echo '2|COMPLETED|None|n1|N/A|0|'
"""
TAKE = """
import time; from pathlib import Path; from zeroexp.tracking import sweep_owner
sweep_owner.take_ownership(Path('outputs/mine')); time.sleep(4)
"""


@pytest.mark.slow
def test_a_sweeper_that_learns_goes_on_behind_another_command_that_submits(slurm, tmp_path):
    """As a --rerun of what has failed in an earlier batch."""
    ids = tmp_path / "ids"
    slurm(
        sbatch=f"echo >> {ids}; echo Submitted batch job $(wc -l < {ids})",
        squeue=TAKEN.format(here=tmp_path, python=sys.executable, take=TAKE),
    )
    words = ["hydra/sweeper=halving", "hydra.sweeper.rates=[0.1,0.2]", "study.name=mine"]
    told = zeroexp(tmp_path, "-m", "cluster=slurm", *words, *ONE)
    assert "(this command waits)" in told.stderr
    assert [slurm_id(job) for _, job in sorted(jobs(tmp_path).items())] == ["1", "2"]


SAYS = "echo 'sbatch: error: Batch job submission failed: {}' >&2; exit 1"


@pytest.mark.parametrize(
    ("sbatch", "squeue", "status", "is_remembered"),
    [
        ("Socket timed out on send/recv operation", "exit 1", "failed", True),
        ("Socket timed out on send/recv operation", "true", "failed", False),
        ("Unable to contact slurm controller (connect failure)", "exit 1", "pending", False),
        ("AssocGrpSubmitJobsLimit", "exit 1", "pending", False),
    ],
    ids=["perhaps queued", "not queued", "held", "held by the account"],
)
def test_a_job_that_slurm_may_have_queued_is_looked_for_later(
    slurm, monkeypatch, tmp_path, sbatch, squeue, status, is_remembered
):
    """A controller that is away has queued nothing, and takes the job once it is back."""
    monkeypatch.setattr("zeroexp.cluster.submit.SECONDS_BETWEEN_LOOKS", 0.0)
    slurm(sbatch=SAYS.format(sbatch), squeue=squeue)
    job = make_job(tmp_path / "run", ClusterConfig(kind="slurm", device="cpu"))
    job.enter("pending")
    submit_all([job])
    assert job.status == status and sbatch in job.state["reason"]
    assert (job.folder / SUBMITTING).exists() == is_remembered


@pytest.mark.parametrize("array", [False, True], ids=["jobs", "an array"])
def test_a_job_that_squeue_has_forgotten_is_found_by_the_id_that_it_wrote(
    slurm, monkeypatch, tmp_path, array
):
    """sbatch queues it and does not say so, it trains, and whoever looks next does so after MinJobAge."""
    monkeypatch.setattr("zeroexp.cluster.submit.SECONDS_BETWEEN_LOOKS", 0.0)
    element = "env SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID={} bash $file; "
    starts = element.format(0) + element.format(1) if array else "bash $file; "
    ids = tmp_path / "ids"
    write_json(tmp_path / "result", {"num_steps": 1})
    slurm(
        sbatch=f"echo >> {ids}; export SLURM_JOB_ID=$(wc -l < {ids}); for file; do :; done; {starts}"
        + SAYS.format("Socket timed out"),
        squeue=f"[ -e {tmp_path}/later ]",
        sacct="true",
        scontrol="true",
        srun=f'for run; do :; done; cp {tmp_path}/result "$run/summary.json"',
    )
    jobs = slurm_jobs(tmp_path, array=array)
    for job in jobs:
        (job.folder / "slurm").mkdir()
        (job.folder / "slurm" / JOB_ID).write_text("3")  # of the job before
    submit_all(jobs)
    assert [job.status for job in jobs] == ["failed", "failed"]
    (tmp_path / "later").touch()
    done = _run("zeroexp", "--rerun", str(tmp_path))
    assert "nothing there has failed" in done.stderr
    assert [job.status for job in jobs] == ["done", "done"]
    assert [slurm_id(job) for job in jobs] == (["7_0", "7_1"] if array else ["1", "2"])
