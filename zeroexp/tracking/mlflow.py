"""Send run folders to MLflow as runs and saved views of one experiment, through a store that `mlflow_store.py` opens.

Everything is made from the files of a run. So no measured rank calls anything here, sending again changes nothing, and
a store that was away can be filled later.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zeroexp.measure.record import StepRecord
from zeroexp.tracking import attempt, mlflow_labels, mlflow_metrics, mlflow_views
from zeroexp.tracking.files import RECORDS, read_json, read_timed_records, write_json
from zeroexp.tracking.mlflow_labels import LINK
from zeroexp.tracking.mlflow_store import Store
from zeroexp.tracking.run import PAGE, Run, read_run

PAGE_OF = "report_of"  # the tag of the run that holds it; `sweep` would show it among the points


@dataclass(frozen=True)
class LoggedRun:
    """The MLflow run that a folder became."""

    uri: str
    experiment_id: str
    run_id: str
    attempt: int  # of `beginning_of`
    closed: bool = False  # True: MLflow knows how the run ended

    @classmethod
    def read(cls, folder: Path) -> LoggedRun | None:
        """Read the link; None if it is missing or unreadable, and then the run is sent as a new one."""
        try:
            content = read_json(folder / LINK)
            return None if content is None else cls(**content)
        except (ValueError, TypeError):
            return None

    def write(self, folder: Path) -> None:
        write_json(folder / LINK, asdict(self))


def beginning_of(folder: Path) -> int:
    """Return how often the run began again from its start, which makes it another one in MLflow: the files of such an
    attempt lie in earlier/<number>, its steps too. A run that goes on from a checkpoint has kept its steps.
    """
    return len([*folder.glob(f"earlier/*/{RECORDS}")])


class MlflowTracker:
    """Sends the runs of one experiment, each step once."""

    def __init__(
        self, uri: str | None, experiment: str, outputs: Path | str = Path("outputs")
    ) -> None:
        """`uri` None means a sqlite file in `outputs`. Raises ConfigError for a store that MLflow refuses."""
        self.store = Store(uri, experiment, Path(outputs))
        self._sent: dict[tuple[str, int], set[int]] = {}  # steps by run id and attempt

    def log_run(self, folder: Path, status: str | None = None) -> str | None:
        """Send everything the folder holds; call this at any time, also while the run goes on.

        A run that goes on from its checkpoint goes on in its MLflow run. One that is repeated from its start becomes
        a new one, and the old one leaves the views of the sweep.

        `status` is one of state.json's words, by default the one in that file; a final status closes the run. Returns
        the id of the MLflow run, or None for a skipped point, which never was a run.
        """
        # From the reading on: another sender may tell the end meanwhile.
        with self.store.locked(folder / f".{LINK}.lock"):
            run, records = read_run(folder), read_timed_records(folder)
            status = status or run.status
            if status == "skipped":
                return None
            link = self._opened_link(run)
            ended = mlflow_labels.end_time(run, status, records)
            summary = mlflow_metrics.summary_entries(ended, run.summary) if run.summary else []
            self.log_steps(link.run_id, records, attempt.newest(folder))
            params, tags = mlflow_labels.run_params(run), mlflow_labels.run_tags(run, status)
            self.store.send(link.run_id, summary, params, tags)
            if (word := mlflow_labels.mlflow_status(status)) != mlflow_labels.RUNNING:
                self.store.send(link.run_id, mlflow_metrics.system_entries(folder))
                self._close(folder, link, word, ended)
            return link.run_id

    def log_page(self, sweep: Path) -> str | None:
        """Send the page of a sweep, as the artifact of a run of its own that no view of points shows.

        Return the address at which MLflow shows it; None without a page. Sent again, it replaces the old one.
        """
        page = sweep / PAGE
        if not page.exists():
            return None
        link = self._link_of(sweep)
        if link is None:
            tags, name = {PAGE_OF: sweep.name, "status": "done"}, f"{sweep.name}: report"
            link = replace(self._create(0, tags=tags, run_name=name), closed=True)
            link.write(sweep)
        with self.store.opened() as client:
            client.log_artifact(link.run_id, str(page))
            client.set_terminated(link.run_id, mlflow_labels.FINISHED)
        place = f"experiments/{link.experiment_id}/runs/{link.run_id}/artifacts/{PAGE}"
        return f"{self.store.address}/#/{place}"

    def log_steps(
        self, run_id: str, records: Sequence[tuple[float, StepRecord]], attempt_number: int = 0
    ) -> None:
        """Send those of the steps (Unix seconds of writing, record) that the store does not have.

        It is asked once for each attempt: one that goes on from a checkpoint repeats steps with other times, and may
        follow one whose steps another process sent.
        """
        key = run_id, attempt_number
        if key not in self._sent:
            self._sent[key] = self.store.steps_of(run_id, mlflow_metrics.LAST_OF_STEP)
        sent = self._sent[key]
        new = [(at, record) for at, record in records if record.step not in sent]
        self.store.send(
            run_id, [e for at, record in new for e in mlflow_metrics.step_entries(at, record)]
        )
        sent.update(record.step for _, record in new)

    def write_views(self, sweep: str) -> list[tuple[str, str]]:
        """Save the views of a sweep in the experiment; return (title, link) for each."""
        experiment_id, saved = self.store.experiment_id, mlflow_views.of_sweep(sweep)
        with self.store.opened() as client:
            tags = client.get_experiment(experiment_id).tags
            for view in saved:
                client.set_experiment_tag(experiment_id, view.tag, view.envelope(time.time()))
            for tag in mlflow_views.outdated_tags(tags, sweep):
                client.delete_experiment_tag(experiment_id, tag)
        return [(view.title, view.url(self.store.address, experiment_id)) for view in saved]

    def _link_of(self, folder: Path) -> LoggedRun | None:
        """Return the folder's link, if the store has its run."""
        link = LoggedRun.read(folder)
        return link if link and self.store.has_run(link.run_id) else None

    def _opened_link(self, run: Run) -> LoggedRun:
        """Return the link to a run that MLflow takes for running, once it stands in the folder."""
        beginning = beginning_of(run.folder)
        link = self._link_of(run.folder) or self._found(run, beginning)
        if link and link.attempt == beginning:
            if link.closed:
                with self.store.opened() as client:
                    client.update_run(link.run_id, status=mlflow_labels.RUNNING)
        else:
            if link:
                self.store.send(link.run_id, tags={"sweep": f"{run.sweep}/earlier"})
            link = self._create(
                beginning,
                start_time=_milliseconds(mlflow_labels.start_time(run)),
                tags=mlflow_labels.run_tags(run, "running"),
                run_name=run.name,
            )
        link = replace(link, closed=False)
        link.write(run.folder)
        return link

    def _found(self, run: Run, beginning: int) -> LoggedRun | None:
        """Return the run that this store has of a folder which has been sent to another store since."""
        experiment_id = self.store.experiment_id
        began = _milliseconds(mlflow_labels.start_time(run))
        with self.store.opened() as client:
            alike = client.search_runs([experiment_id], f"attributes.start_time = {began}")
        ids = [
            each.info.run_id
            for each in alike
            if (each.info.run_name, each.data.tags.get("sweep")) == (run.name, run.sweep)
        ]
        return LoggedRun(self.store.shown, experiment_id, ids[0], beginning, True) if ids else None

    def _create(self, beginning: int, **settings: Any) -> LoggedRun:
        """Make a run of MLflow, for which `settings` are arguments of its client's create_run."""
        experiment_id = self.store.experiment_id
        with self.store.opened() as client:
            made = client.create_run(experiment_id, **settings)
        return LoggedRun(self.store.shown, experiment_id, made.info.run_id, beginning)

    def _close(self, folder: Path, link: LoggedRun, status: str, ended: float) -> None:
        with self.store.opened() as client:
            for path in mlflow_labels.artifacts(folder):
                if path.is_dir():
                    client.log_artifacts(link.run_id, str(path), path.name)
                else:
                    client.log_artifact(link.run_id, str(path))
            client.set_terminated(link.run_id, status, _milliseconds(ended))
        replace(link, closed=True).write(folder)


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)
