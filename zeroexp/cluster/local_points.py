"""Points that this machine runs, one at a time: each is tried, run, and run again as `events` or noise asks for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from zeroexp.checkpoint.folders import complete_checkpoints
from zeroexp.cluster.follow import ShownRun
from zeroexp.cluster.job import Job, event_of, reason_of
from zeroexp.cluster.local import LocalCluster
from zeroexp.cluster.tell import tell
from zeroexp.config.keys import ClusterConfig, Config
from zeroexp.measure.machine_load import begin_load
from zeroexp.measure.record import RunSummary
from zeroexp.report.measured_points import points_of
from zeroexp.report.reading import readable_runs
from zeroexp.report.statistics import AGAIN, in_doubt
from zeroexp.report.sweep_progress import SweepProgress
from zeroexp.tracking.files import read_json, read_summary, write_json, write_summary
from zeroexp.tracking.mlflow_upload_thread import UploadsOfSweep


class LocalPoints:
    """The fork-servers of a sweep's points, one for each config of a cluster, until `close`."""

    def __init__(self, uploads: UploadsOfSweep) -> None:
        self._uploads = uploads
        self._clusters: dict[str, LocalCluster] = {}
        self._opened = ExitStack()
        # Config -> what a rehearsal says of its runs, or why there is none.
        self._rehearsed: dict[str, tuple[dict[str, float], str | None]] = {}
        self._rehearsal_seconds = 0.0  # spent on that so far

    def close(self) -> None:
        """End the servers with all their ranks."""
        self._opened.close()
        self._clusters.clear()

    def try_points(self, configs: Sequence[Config]) -> list[str | None]:
        """Return what check/try_points.py does, from where ranks will be forked, which imports once for both."""
        return self._cluster(configs[0].cluster).try_points(configs)

    def run(self, number: int, job: Job, progress: SweepProgress, num_retries: int = 0) -> None:
        """Run a point to its end, and again where `events` asks for that; num_retries: how often it was by now."""
        if job.status == "skipped":
            progress.end(number, "skipped", job.state["reason"], job.name)
            return
        config = job.config
        cluster = self._cluster(config.cluster)
        # Opened after the cluster has forked its fork-server, because opening them starts a thread.
        uploads = self._uploads.of(job.folder)
        shown = ShownRun(number, job, progress, self._uploads.look, skip=True)
        shown.start()
        job.enter("running")
        if uploads:
            uploads.begin(job.folder)
        other_cores = begin_load(cluster.server)
        outcome = cluster.run(job, shown.show_steps, progress.note)
        if (others := other_cores()) is not None:
            _add_to_environment(job, {"other_cores": others})
        job.enter(outcome.status, reason_of(outcome.status, job))
        progress.end(number, outcome.status, job.state["reason"])
        if outcome.status == "done" and (summary := read_summary(job.folder)):
            self._rehearse(job, config, summary, cluster)
        tell(job)
        self._uploads.send(job.folder)
        event = event_of(outcome)
        is_retried = event is not None and getattr(config.events, event) == "retry"
        if is_retried and num_retries < config.events.retries:
            job.put_back()
            progress.again()
            self.run(number, job, progress, num_retries + 1)

    def run_spoilt_again(self, numbered: Mapping[int, Job], progress: SweepProgress) -> None:
        """Run rounds once more in which others have spoilt a run, of points that are repeated for their times.

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
        rounds = {run.environment.get("repeat") for run in in_doubt(points_of(runs))}
        again = [run for run in runs if run.environment.get("repeat") in rounds]
        progress.again(len(again))
        for number in sorted(timed[run.folder] for run in again):
            numbered[number].put_back()
            _add_to_environment(numbered[number], {AGAIN: True})
            self.run(number, numbered[number], progress)

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
            self._clusters[key] = self._opened.enter_context(LocalCluster(config))
        return self._clusters[key]


def _add_to_environment(job: Job, facts: Mapping[str, Any]) -> None:
    file = job.folder / "environment.json"
    write_json(file, {**(read_json(file) or {}), **facts})
