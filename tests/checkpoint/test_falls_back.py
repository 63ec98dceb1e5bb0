"""Whole runs whose newest checkpoints were damaged since: they go on from an older one, and say so once."""

from __future__ import annotations

import json
from pathlib import Path

from tests.checkpoint.test_runs import job_at, numbers, require_undamaged
from tests.test_rank import log_of
from zeroexp.checkpoint import folders
from zeroexp.checkpoint.manifest import MANIFEST, read_manifest
from zeroexp.cluster.job import Job
from zeroexp.tracking.files import read_records


def run_again(local, job: Job) -> list[str]:
    """After it failed; returns what its user is told."""
    told: list[str] = []
    job.enter("failed", "for another reason")
    job.set_aside()
    outcome = local.run(job, on_record=lambda record: None, on_event=told.append)
    assert outcome.status == "done", outcome.cause
    return told


def flip_a_bit(checkpoint: Path) -> None:
    piece = next(iter(read_manifest(checkpoint).tensors()))[1].pieces[0]
    content = bytearray((checkpoint / piece.file).read_bytes())
    content[piece.offset] ^= 1
    (checkpoint / piece.file).write_bytes(content)


def started_at(job: Job) -> list[str]:
    return [line.split(", ")[1] for line in log_of(job, 0).splitlines() if "loaded in" in line]


def test_a_run_goes_on_from_its_newest_whole_one(local, tmp_path):
    job = job_at(tmp_path / "run", 6, checkpoint__every=2, checkpoint__keep=3)
    assert local.run(job, on_record=print, on_event=print).status == "done"
    reference = numbers(read_records(job.folder))
    older, newer, newest = folders.complete_checkpoints(job.folder)
    flip_a_bit(newer)
    (newest / MANIFEST).write_text("{")

    told = run_again(local, job)
    assert [line.partition("; ")[0].partition(": ")[0] for line in told] == [
        str(newest / MANIFEST),
        str(newer / "rank0.bin"),
    ]
    assert all(f"; now damaged-{one.name}, " in told[n] for n, one in enumerate([newest, newer]))
    assert [line for line in log_of(job, 0).splitlines() if line in told] == told
    assert "\n".join(told) not in log_of(job, 1)
    assert started_at(job) == [f"{folders.step_of(older)} steps done"]
    assert numbers(read_records(job.folder)) == reference, "none missing, none twice, bit for bit"
    for checkpoint in (whole := folders.complete_checkpoints(job.folder)):
        require_undamaged(checkpoint)
    assert whole == [older, newer, newest], "saved again"

    for checkpoint in whole:
        flip_a_bit(checkpoint)
    told = run_again(local, job)
    assert [line.rpartition(", the run goes on ")[2] for line in told] == [
        *("from before it", "from before it", "from its beginning, since no other is left")
    ]
    assert started_at(job) == [], "from its beginning"
    assert numbers(read_records(job.folder)) == reference
    saves = (job.folder / folders.LOG).read_text().splitlines()
    assert sum(json.loads(line)["error"] is not None for line in saves) == 5
