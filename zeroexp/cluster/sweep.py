"""Run a sweep from composed points to an exit code, as Hydra's launcher asks.

Exit codes: 0 all defined points ran and a study's claims hold; 1 something failed; 2 (ConfigError, raised) refused
before anything ran. A single point is a sweep too, and a sweeper that learns (Optuna) runs many batches of points.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from zeroexp.check.sweep_points import (
    Composed,
    SweepPoint,
    point_of,
    require_defined,
    require_points,
    with_suited_batch,
)
from zeroexp.checkpoint.folders import kept
from zeroexp.cluster.fits_memory import plan_slurm_points, refuse_full_disks
from zeroexp.cluster.follow import cancel_unfinished, follow_waited, refresh, unfinished
from zeroexp.cluster.job import Job
from zeroexp.cluster.local_points import LocalPoints
from zeroexp.cluster.make_runs import make_runs, new_sweep
from zeroexp.cluster.slurm_state import require_slurm
from zeroexp.cluster.submit import is_held_back, slurm_id, submit_all
from zeroexp.config import plugins
from zeroexp.config.keys import Config, ConfigError, DamagedFile
from zeroexp.process.writable import require_writable
from zeroexp.report.exports import runs_as_json
from zeroexp.report.measured_points import MeasuredPoint, points_of
from zeroexp.report.reading import readable_runs
from zeroexp.report.results_table import print_lines, print_table
from zeroexp.report.sweep_progress import SweepProgress
from zeroexp.tracking import sweep_owner
from zeroexp.tracking.files import MAKING, read_summary, working_folder_of
from zeroexp.tracking.mlflow_labels import LINK
from zeroexp.tracking.mlflow_store import with_store
from zeroexp.tracking.mlflow_upload_thread import UploadsOfSweep
from zeroexp.tracking.run import FINE, UNFINISHED, run_folders


class Sweep:
    """Points come in batches (`run`) and are summed up at the end (`conclude`). A context manager."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """`arguments` are those of the command line, for the record."""
        self._arguments = arguments
        self._jobs: list[Job] = []
        self._folder: Path | None = None
        self._num_damaged = 0  # runs of a rerun whose files do not let them go on
        self._uploads = UploadsOfSweep()
        self._local = LocalPoints(self._uploads)
        self._exits = ExitStack()

    def __enter__(self) -> Sweep:
        return self

    def __exit__(self, *_: object) -> None:
        self._local.close()
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
        rounds = [
            (number, point, repeat)
            for repeat in range(max(point.config.repeats for point in points))
            for number, point in zip(numbers, points, strict=True)
            if repeat < point.config.repeats
            if repeat == 0 or not point.refusal  # what is refused is skipped once
        ]
        folder = self._folder or new_sweep(points[0].config)
        made = make_runs(folder, [each[1:] for each in rounds], self._arguments)
        self._folder, self._jobs = folder, [*self._jobs, *made]
        last = {number: job for (number, *_), job in zip(rounds, made, strict=True)}
        self._execute(made)
        return [_final_loss(last.get(number)) for number in range(len(batch))]

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
        refresh(jobs)  # while it is known that their owner has died
        sweep_owner.take_ownership(folder)
        if (folder / MAKING).exists():
            self._num_damaged += 1
            ended = "ended while its points were made, and those that are not here never ran"
            remedy = "start the sweep again for them"
            print(f"zeroexp: {folder}: it was {ended}; {remedy}", file=sys.stderr)
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
            job.put_back()
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
        points = points_of(runs)
        print_table(points)
        holds = True
        folder = self._jobs[0].folder.parent
        if any(run.summary for run in runs):
            from zeroexp.report import page  # plotly and scipy take a second to import

            holds = _print_conclusions(points)
            page.write_into(folder, points)
        self._uploads.conclude(folder)
        sweep = shlex.quote(os.path.relpath(folder))
        queued, held = len(unfinished(self._jobs)), sum(map(is_held_back, self._jobs))
        if queued or held:
            waits = f", and that zeroexp watch is to submit: {held}" if held else ""
            line = f"Points that Slurm has now: {queued}{waits}"
            print(f"\n{line}; to see what becomes of them:\n  zeroexp watch {sweep}")
        failed = sum(run.status not in (*FINE, *UNFINISHED) for run in runs)
        failed += len(self._jobs) - len(runs)
        if failed:
            ended = f"{failed} of {len(self._jobs)} points did not come to their end"
            print(f"\n{ended}; run them again with\n  zeroexp --rerun {sweep}")
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
            return self._local.try_points(configs)
        # torch, transformers and datasets take seconds to import, and a line with a wrong word needs none of them.
        from zeroexp.check.try_points import try_points

        return try_points(configs)

    def _execute(self, jobs: Sequence[Job]) -> None:
        """Queue Slurm's points first, so that they run beside those of this machine."""
        numbered = dict(enumerate(jobs, start=1))
        queued = {
            number: job
            for number, job in numbered.items()
            if job.config.cluster.kind == "slurm" and job.status != "skipped"
        }
        # Another command may put back, and submit, what has ended here: it has no id of ours.
        ids: dict[Path, str | None] = {}

        def ends(run: Path) -> None:
            ids[run] = ""
            self._send(Job(run))

        try:
            submit_all(queued.values())
            ids.update((job.folder, slurm_id(job)) for job in queued.values())
            kept_here = (job.config.cluster.kind == "local" or is_held_back(job) for job in jobs)
            if self._folder and not any(kept_here):
                sweep_owner.release_ownership(self._folder)  # so that --rerun may take it
            with SweepProgress(len(jobs)) as progress:
                for number in sorted(numbered.keys() - queued.keys()):
                    self._local.run(number, numbered[number], progress)
                for job in (each for each in queued.values() if each.config.cluster.wait):
                    self._uploads.of(job.folder)
                follow_waited(queued, progress, on_step=self._uploads.look, on_end=ends)
                self._local.run_spoilt_again(numbered, progress)
        except BaseException:
            self._local.close()  # ranks of what is cancelled train no further
            ours = [job for job in jobs if ids.get(job.folder) in (None, slurm_id(job))]
            stopped = cancel_unfinished(ours)
            for job in jobs:
                had = job in stopped and (job.folder / LINK).exists()
                if had or self._uploads.has_begun(job.folder):
                    self._send(job)
            raise

    def _send(self, job: Job) -> None:
        if job.config.cluster.wait:
            self._uploads.send(job.folder)


def _print_conclusions(points: Sequence[MeasuredPoint]) -> bool:
    """Print verdicts and claims, each once; return False if one is broken."""
    from zeroexp.report.conclusions import conclude  # as scipy

    conclusions = conclude(points)
    claims = [claim.line for claim in conclusions.claims]
    broken = [line for line in conclusions.broken if line not in claims]
    claims = conclusions.claim_lines or claims
    for lines in filter(None, (conclusions.verdicts, conclusions.doubts, broken, claims)):
        print()
        print_lines(lines)
    return not conclusions.broken


def _final_loss(job: Job | None) -> float | None:
    """Return the job's loss, on validation samples if it has any."""
    summary = read_summary(job.folder) if job else None
    if summary is None or summary.verdict:
        return None
    return summary.final_loss if summary.validation_loss is None else summary.validation_loss
