"""Make the folders of a sweep and of its runs, those of a batch all or none."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from zeroexp.check.sweep_points import SweepPoint
from zeroexp.checkpoint.folders import pin
from zeroexp.cluster.environment import describe_environment
from zeroexp.cluster.job import Job
from zeroexp.config.keys import Config, save
from zeroexp.tracking import sweep_owner
from zeroexp.tracking.disk_full import reserve
from zeroexp.tracking.files import MAKING
from zeroexp.tracking.json_files import write_json
from zeroexp.tracking.mlflow_store import with_store

HYDRA = ".hydra"  # its folder in every run, as its users expect


def new_sweep(first: Config) -> Path:
    name = first.study.name or time.strftime("%Y-%m-%d_%H-%M-%S")
    return _new_folder(Path(first.outputs).resolve(), name)


def make_runs(
    sweep: Path, points: Iterable[tuple[SweepPoint, int]], arguments: Sequence[str]
) -> list[Job]:
    """Make the runs of points and their rounds; what ends this early leaves none of them, nor a sweep without runs.

    A kill leaves some, with the file MAKING, by which `--rerun` knows that there were to be more.
    """
    is_new, jobs = not any(sweep.iterdir()), list[Job]()
    sweep_owner.wait_for_ownership(sweep)  # a --rerun beside a later batch may submit now
    making = sweep / MAKING
    making.touch()
    try:
        for point, repeat in points:
            name = point.name if repeat == 0 else f"{point.name}-r{repeat + 1}"
            jobs.append(Job(_new_folder(sweep, name)))
            _fill(jobs[-1], point, repeat, arguments)
    except BaseException:
        for job in jobs:
            shutil.rmtree(job.folder)
        if is_new:
            sweep_owner.release_ownership(sweep)
            shutil.rmtree(sweep)
        raise
    finally:
        making.unlink(missing_ok=True)
    return jobs


def _fill(job: Job, point: SweepPoint, repeat: int, arguments: Sequence[str]) -> None:
    """Write all that is known of the run before it runs; arguments: those of the command line."""
    reserve(job.folder)
    save(with_store(point.config), job.folder / "config.yaml")
    for name, text in point.hydra.items():
        (job.folder / HYDRA).mkdir(exist_ok=True)
        (job.folder / HYDRA / name).write_text(text, encoding="utf-8")
    environment = describe_environment(arguments, point.config.cluster.device)
    write_json(job.folder / "environment.json", {**environment, "repeat": repeat})
    job.enter("pending")
    if point.refusal:
        job.enter("skipped", point.refusal)
    elif point.config.resume:
        pin(Path(point.config.resume), job.folder)


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
