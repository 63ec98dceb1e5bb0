"""Run a sweep from composed points to an exit code, as Hydra's launcher asks.

Exit codes: 0 all defined points ran and a study's claims hold; 1 something failed; 2 (ConfigError, raised) refused
before anything ran. A single point is a sweep too, and a sweeper that learns (Optuna) runs many batches of points.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from zeroexp.check.sweep_points import (
    Composed,
    SweepPoint,
    point_of,
    require_defined,
    require_points,
    with_suited_batch,
)
from zeroexp.checkpoint.folders import complete_checkpoints, kept, pin
from zeroexp.cluster.environment import describe_environment
from zeroexp.cluster.fits_memory import plan_slurm_points, refuse_full_disks
from zeroexp.cluster.follow import ShownRun, cancel_unfinished, follow_waited, refresh, unfinished
from zeroexp.cluster.job import Job, event_of, reason_of
from zeroexp.cluster.local import LocalCluster
from zeroexp.cluster.machine_load import begin_load
from zeroexp.cluster.slurm_state import require_slurm
from zeroexp.cluster.submit import is_held_back, slurm_id, submit_all
from zeroexp.cluster.tell import tell
from zeroexp.config import plugins
from zeroexp.config.keys import ClusterConfig, Config, ConfigError, DamagedFile, save
from zeroexp.measure.record import RunSummary
from zeroexp.process.writable import require_writable
from zeroexp.report.exports import runs_as_json
from zeroexp.report.measured_points import MeasuredPoint
from zeroexp.report.measured_points import points_of as runs_as_points
from zeroexp.report.reading import readable_runs
from zeroexp.report.results_table import print_lines, print_table
from zeroexp.report.statistics import AGAIN, in_doubt
from zeroexp.report.sweep_progress import SweepProgress
from zeroexp.tracking import sweep_owner
from zeroexp.tracking.disk_full import reserve
from zeroexp.tracking.files import (
    read_json,
    read_summary,
    working_folder_of,
    write_json,
    write_summary,
)
from zeroexp.tracking.mlflow_labels import LINK
from zeroexp.tracking.mlflow_store import with_store
from zeroexp.tracking.mlflow_uploads import UploadsOfSweep
from zeroexp.tracking.run import FINE, UNFINISHED, run_folders

MAKING = ".making"  # in a sweep's folder while those of its points are made
HYDRA = ".hydra"  # its folder in every run, as its users expect
ENDED = "ended"  # in place of the id of a job


class Sweep:
    """Points come in batches (`run`) and are summed up at the end (`conclude`). A context manager."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """`arguments` are those of the command line, for the record."""
        self._arguments = arguments
        self._jobs: list[Job] = []
        self._folder: Path | None = None
        self._num_damaged = 0  # runs of a rerun whose files do not let them go on
        self._uploads = UploadsOfSweep()
        self._clusters: dict[str, LocalCluster] = {}
        # Config -> what a rehearsal says of its runs, or why there is none.
        self._rehearsed: dict[str, tuple[dict[str, float], str | None]] = {}
        self._rehearsal_seconds = 0.0  # spent on that so far
        self._exits = ExitStack()

    def __enter__(self) -> Sweep:
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()
        if self._folder:
            sweep_owner.release_ownership(self._folder)

    # ---- what the launcher calls

    def run(self, batch: Sequence[Composed]) -> list[float | None]:
        """Run points; return the loss that `_final_loss` takes of each, or None.

        Raises ConfigError, before anything runs, if a word is wrong or no point is left to run.
        """
        if not batch:
            remedy = "a range, glob or choice on the command line is empty; add to it"
            raise ConfigError(f"no point to run: {remedy}")
        batch = with_suited_batch(batch, self._arguments)
        numbered = [
            (number, replace(point, hydra=files))
            for number, (overrides, values, files) in enumerate(batch)
            if (point := point_of(overrides, values))  # a study leaves some out
        ]
        numbers, points = [n for n, _ in numbered], [point for _, point in numbered]
        resumed = (point.config.resume for point in points if not point.refusal)
        for source in set(filter(None, resumed)):  # until each run has a pin of its own
            self._exits.enter_context(kept(Path(source)))
        self._refuse(points, batch[0][1]["study"]["name"])
        points = refuse_full_disks(plan_slurm_points(self._tried(points)))
        if not self._jobs:
            require_defined(points)
        jobs: list[list[Job]] = [[] for _ in batch]
        num_before = len(self._jobs)
        rounds = [
            (number, point, repeat)
            for repeat in range(max(point.config.repeats for point in points))
            for number, point in zip(numbers, points, strict=True)
            if repeat < point.config.repeats
            if repeat == 0 or not point.refusal  # what is refused is skipped once
        ]
        with self._all_or_none(points[0]):
            for number, point, repeat in rounds:
                jobs[number].append(self._admit(point, repeat))
        self._execute(self._jobs[num_before:])
        return [_final_loss(one) for one in jobs]

    def rerun_unfinished(self, folder: Path) -> None:
        """Run again, in their folders, the unfinished points of an earlier sweep.

        Raises ConfigError if another process may run or submit points of it, or if no point is unfinished.
        """
        require_writable(f"--rerun {folder}", folder, "run it as who started the sweep")
        every = [Job(run) for run in run_folders(folder)]
        if not (every or (folder / MAKING).exists()):
            remedy = "give the folder of a sweep, outputs/<sweep>"
            raise ConfigError(f"--rerun {folder}: no run in there; {remedy}")
        jobs = [job for job in every if self._can_be_read(job)]
        jobs.sort(key=lambda job: job.state.get("pending_at", 0.0))
        if (folder / MAKING).exists():
            self._num_damaged += 1
            ended = "ended while its points were made, and those that are not here never ran"
            remedy = "start the sweep again for them"
            print(f"zeroexp: {folder}: it was {ended}; {remedy}", file=sys.stderr)
        refresh(jobs)  # while it is known that their owner has died
        sweep_owner.take_ownership(folder)
        self._folder = folder
        going_on = unfinished(jobs).values()  # jobs that go on in Slurm
        again = [job for job in jobs if job.status not in FINE and job not in going_on]
        if not again and not self._num_damaged:
            problem = "nothing there has failed; there is nothing to run again"
            raise ConfigError(f"--rerun {folder}: {problem}")
        for job in again:
            plugins.load(job.config.plugins, working_folder_of(job.folder))
        self._jobs = jobs
        for job in again:
            put_back(job)
        self._execute(again)

    def _can_be_read(self, job: Job) -> bool:
        """Whether what a run needs to be run again can be read; a line names what can not."""
        try:
            _ = job.config, slurm_id(job), working_folder_of(job.folder)
        except DamagedFile as error:
            self._num_damaged += 1
            print(f"zeroexp: {job.name} is not run again: {error}", file=sys.stderr)
            return False
        return True

    @property
    def has_failures(self) -> bool:
        return any(job.status not in (*FINE, *UNFINISHED) for job in self._jobs)

    def conclude(self) -> int:
        """Print the sweep's results; return the exit code. Print nothing if no point was run (--cfg, --info)."""
        if not self._jobs:
            return int(self._num_damaged > 0)
        runs = readable_runs(job.folder for job in self._jobs)
        points = runs_as_points(runs)
        print_table(points)
        holds = True
        if any(run.summary for run in runs):
            holds = self._print_conclusions(points)
        self._uploads.conclude(self._jobs[0].folder.parent)
        self._print_queued()
        failed = sum(run.status not in (*FINE, *UNFINISHED) for run in runs)
        failed += len(self._jobs) - len(runs)
        if failed and self._folder:
            folder = shlex.quote(os.path.relpath(self._folder))
            ended = f"{failed} of {len(self._jobs)} points did not come to their end"
            print(f"\n{ended}; run them again with\n  zeroexp --rerun {folder}")
        return int(failed > 0 or self._num_damaged > 0 or not holds)

    def as_json(self) -> str:
        """Return the results as `zeroexp report --json` does; null if no point was run."""
        return (
            runs_as_json(readable_runs(job.folder for job in self._jobs)) if self._jobs else "null"
        )

    # ---- the steps of a batch

    def _refuse(self, points: Sequence[SweepPoint], study: str | None) -> None:
        """Check the sweep as a whole; `zeroexp.check` has checked each point by itself."""
        require_points(points, study)
        if not self._jobs:
            require_defined(points)
        for outputs in {point.config.outputs for point in points}:
            require_writable(f"outputs={outputs}", outputs, "choose a folder that is yours")
        for point in points:
            with_store(point.config)
            if point.config.cluster.kind == "slurm" and not point.config.cluster.dry_run:
                require_slurm()

    def _tried(self, points: Sequence[SweepPoint]) -> list[SweepPoint]:
        """Return the points, those skipped that can not be carried out. Raises ConfigError for a mistake."""
        groups: dict[str, list[int]] = {}  # places of the points that one server tries
        for place, point in enumerate(points):
            if not point.refusal:
                groups.setdefault(repr(point.config.cluster), []).append(place)
        tried = list(points)
        for places in groups.values():
            refusals = self._try([points[place].config for place in places])
            for place, refusal in zip(places, refusals, strict=True):
                tried[place] = replace(points[place], refusal=refusal)
        return tried

    def _try(self, configs: Sequence[Config]) -> list[str | None]:
        """Try points of one cluster: of this machine where its ranks will be forked, which imports once for both."""
        if configs[0].cluster.kind == "local":
            return self._cluster(configs[0].cluster).try_points(configs)
        # torch, transformers and datasets take seconds to import, and a line with a wrong word needs none of them.
        from zeroexp.check.try_points import try_points

        return try_points(configs)

    @contextmanager
    def _all_or_none(self, first: SweepPoint) -> Generator[None]:
        """Make the folders of a batch in here. Whatever ends this early leaves none of them.

        A kill leaves some, with the file MAKING, by which `rerun_unfinished` knows that there were to be more.
        """
        jobs, begun = self._jobs, self._folder
        num_before = len(jobs)
        if self._folder is None:
            name = first.config.study.name or time.strftime("%Y-%m-%d_%H-%M-%S")
            self._folder = _new_folder(Path(first.config.outputs).resolve(), name)
        sweep_owner.take_ownership(self._folder)
        making = self._folder / MAKING
        making.touch()
        try:
            yield
        except BaseException:
            for job in jobs[num_before:]:
                shutil.rmtree(job.folder)
            del jobs[num_before:]
            if begun is None:
                sweep_owner.release_ownership(self._folder)
                shutil.rmtree(self._folder)
                self._folder = None
            raise
        finally:
            making.unlink(missing_ok=True)

    def _admit(self, point: SweepPoint, repeat: int) -> Job:
        """Make the folder of the point's run in round `repeat` with all that is known before it runs."""
        assert self._folder is not None
        name = point.name if repeat == 0 else f"{point.name}-r{repeat + 1}"
        job = Job(_new_folder(self._folder, name))
        self._jobs.append(job)
        reserve(job.folder)
        save(with_store(point.config), job.folder / "config.yaml")
        for name, text in point.hydra.items():
            (job.folder / HYDRA).mkdir(exist_ok=True)
            (job.folder / HYDRA / name).write_text(text, encoding="utf-8")
        device = point.config.cluster.device
        environment = {**describe_environment(self._arguments, device), "repeat": repeat}
        write_json(job.folder / "environment.json", environment)
        job.enter("pending")
        if point.refusal:
            job.enter("skipped", point.refusal)
        elif point.config.resume:
            pin(Path(point.config.resume), job.folder)
        return job

    def _execute(self, jobs: Sequence[Job]) -> None:
        """Queue Slurm's points first, so that they run beside those of this machine."""
        numbered = dict(enumerate(jobs, start=1))
        queued = {
            number: job
            for number, job in numbered.items()
            if job.config.cluster.kind == "slurm" and job.status != "skipped"
        }
        # Another command may put back, and submit, what has ended here.
        ids: dict[Job, str | None] = {}

        def ends(job: Job) -> None:
            ids[job] = ENDED
            self._send(job)

        try:
            submit_all(queued.values())
            ids.update((job, slurm_id(job)) for job in queued.values())
            if self._folder and not any(map(_needs_owner, jobs)):
                sweep_owner.release_ownership(self._folder)  # so that --rerun may take it
            with SweepProgress(len(jobs)) as progress:
                for number in sorted(numbered.keys() - queued.keys()):
                    self._run_one(number, numbered[number], progress)
                for job in (each for each in queued.values() if each.config.cluster.wait):
                    self._uploads.of(job.folder)
                follow_waited(queued, progress, on_step=self._look, on_end=ends)
                self._run_spoilt_again(numbered, progress)
        except BaseException:
            self._exits.close()  # ranks of what is cancelled train no further
            self._clusters.clear()
            ours = [job for job in jobs if ids.get(job) in (None, slurm_id(job))]
            stopped = cancel_unfinished(ours)
            for job in jobs:
                had = job in stopped and (job.folder / LINK).exists()
                if had or self._uploads.has_begun(job.folder):
                    self._send(job)
            raise

    def _run_spoilt_again(self, numbered: Mapping[int, Job], progress: SweepProgress) -> None:
        """Run rounds once more in which others have spoilt a run, of points that this machine repeats for their times.

        Whole rounds, in their order, since times are compared within one. A run with a checkpoint stays as it is: it
        would go on from there.
        """
        timed = {
            job.folder: number
            for number, job in numbered.items()
            if job.status == "done" and job.config.cluster.kind == "local"
            if job.config.repeats > 1 and not complete_checkpoints(job.folder)
        }
        runs = readable_runs(timed)
        rounds = {run.environment.get("repeat") for run in in_doubt(runs_as_points(runs))}
        again = [run for run in runs if run.environment.get("repeat") in rounds]
        progress.again(len(again))
        for run in sorted(again, key=lambda run: timed[run.folder]):
            number = timed[run.folder]
            put_back(numbered[number])
            _add_to_environment(run.folder, {AGAIN: True})
            self._run_one(number, numbered[number], progress)

    def _run_one(
        self, number: int, job: Job, progress: SweepProgress, num_retries: int = 0
    ) -> None:
        """Run a point to its end, and again where `events` asks for that; num_retries: how often it was by now."""
        if job.status == "skipped":
            progress.end(number, "skipped", job.state["reason"], job.name)
            return
        config = job.config
        cluster = self._cluster(config.cluster)
        # Opened after the cluster has forked its fork-server, because opening them starts a thread.
        uploads = self._uploads.of(job.folder)
        shown = ShownRun(number, job, progress, self._look, skip=True)
        shown.start()
        job.enter("running")
        if uploads:
            uploads.begin(job.folder)
        other_cores = begin_load(cluster.server)
        outcome = cluster.run(job, shown.show_steps, progress.note)
        if (others := other_cores()) is not None:
            _add_to_environment(job.folder, {"other_cores": others})
        job.enter(outcome.status, reason_of(outcome.status, job))
        progress.end(number, outcome.status, job.state["reason"])
        if outcome.status == "done" and (summary := read_summary(job.folder)):
            self._rehearse(job, config, summary, cluster)
        tell(job)
        self._send(job)
        event = event_of(outcome)
        is_retried = event is not None and getattr(config.events, event) == "retry"
        if is_retried and num_retries < config.events.retries:
            put_back(job)
            progress.again()
            self._run_one(number, job, progress, num_retries + 1)

    def _rehearse(
        self, job: Job, config: Config, summary: RunSummary, cluster: LocalCluster
    ) -> None:
        """Have a rehearsal of the run put beside what it measured, as long as cluster.rehearse_s lasts for the sweep.

        Repeats share one rehearsal.
        """
        limit, must_hold = config.cluster.rehearse_s, config.study.plan_must_hold
        if not limit and not must_hold:
            return
        begun = time.monotonic()
        left = config.cluster.timeout_s if must_hold else limit - self._rehearsal_seconds
        key = repr(config)
        if key not in self._rehearsed:
            if left > 0 and cluster.rehearse(job, left):
                summary = read_summary(job.folder) or summary
            else:
                reason = f"its rehearsal did not end within cluster.rehearse_s={limit} of the sweep"
                summary = replace(summary, not_rehearsed=reason)
            self._rehearsed[key] = (summary.rehearsed, summary.not_rehearsed)
        rehearsed, reason = self._rehearsed[key]
        write_summary(job.folder, replace(summary, rehearsed=rehearsed, not_rehearsed=reason))
        self._rehearsal_seconds += time.monotonic() - begun

    def _cluster(self, config: ClusterConfig) -> LocalCluster:
        """Return the config's cluster, which is opened at its first point and kept: a fork-server imports only once."""
        key = repr(config)
        if key not in self._clusters:
            self._clusters[key] = self._exits.enter_context(LocalCluster(config))
        return self._clusters[key]

    def _look(self, job: Job) -> None:
        self._uploads.look(job.folder)

    def _send(self, job: Job) -> None:
        if job.config.cluster.wait:
            self._uploads.send(job.folder)

    # ---- the end

    def _print_queued(self) -> None:
        queued, held = len(unfinished(self._jobs)), sum(map(is_held_back, self._jobs))
        if (queued or held) and self._folder:
            waits = f", and that zeroexp watch is to submit: {held}" if held else ""
            print(f"\nPoints that Slurm has now: {queued}{waits}; to see what becomes of them:")
            print(f"  zeroexp watch {shlex.quote(os.path.relpath(self._folder))}")

    def _print_conclusions(self, points: Sequence[MeasuredPoint]) -> bool:
        """Print verdicts and claims, each once, and write the page; return False if one is broken."""
        from zeroexp.report import page  # plotly and scipy take a second to import
        from zeroexp.report.conclusions import conclude

        conclusions = conclude(points)
        claims = [claim.line for claim in conclusions.claims]
        broken = [line for line in conclusions.broken if line not in claims]
        claims = conclusions.claim_lines or claims
        for lines in filter(None, (conclusions.verdicts, conclusions.doubts, broken, claims)):
            print()
            print_lines(lines)
        if self._folder:
            page.write_into(self._folder, points)
        return not conclusions.broken


def put_back(job: Job) -> None:
    """Make room for another attempt at the run, which keeps its place among the others."""
    since = job.state.get("pending_at")
    if lost := job.set_aside():
        again = "goes on from an older checkpoint, if there is one"
        print(f"zeroexp: {job.name} {again}: {lost.line}", file=sys.stderr)
    job.enter("pending", since=since)
    if job.config.resume:
        pin(Path(job.config.resume), job.folder)


def _needs_owner(job: Job) -> bool:
    """Tell whether a process runs the point, or is to submit it."""
    return job.config.cluster.kind == "local" or is_held_back(job)


def _add_to_environment(folder: Path, facts: Mapping[str, Any]) -> None:
    file = folder / "environment.json"
    write_json(file, {**(read_json(file) or {}), **facts})


def _new_folder(parent: Path, name: str) -> Path:
    """Make <parent>/<name>, or the first free <name>-<number>; no other process gets the same folder."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def _final_loss(jobs: Sequence[Job]) -> float | None:
    """Return the last job's loss, on validation samples if it has any."""
    summary = read_summary(jobs[-1].folder) if jobs else None
    if summary is None or summary.verdict:
        return None
    return summary.final_loss if summary.validation_loss is None else summary.validation_loss
