"""The newest attempt at a run writes; what an earlier one still says is refused, and what it said is explained."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from tests.run_folders import record, records, summaries
from zeroexp.cluster.job import Job
from zeroexp.measure.summary import summarise
from zeroexp.tracking import attempt, failure
from zeroexp.tracking.disk_full import RESERVE, reserve, write_with_reserve
from zeroexp.tracking.files import RecordWriter, read_records, read_summary, write_summary


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In its second attempt, seen from a process of the first that is still there."""
    monkeypatch.setenv(attempt.NUMBER, "0")  # removed afterwards
    attempt.begin(tmp_path, 1)
    with RecordWriter(tmp_path) as writer:
        writer.write(record(0))
    attempt.begin(tmp_path, 2)
    os.environ[attempt.NUMBER] = "1"
    return tmp_path


def test_what_ended_without_a_word_is_said_by_the_next(run: Path) -> None:
    first, second = attempt.read(run)
    assert (first["number"], first["reason"]) == (1, attempt.WITHOUT_A_WORD)
    assert second["number"] == 2 and "reason" not in second
    assert attempt.newest(run) == 2


def test_who_watched_an_attempt_explains_it_unless_it_did_so_itself(tmp_path, monkeypatch):
    monkeypatch.setenv(attempt.NUMBER, "0")  # removed afterwards
    attempt.explain(tmp_path, "it never began")
    assert attempt.read(tmp_path) == []
    attempt.begin(tmp_path, 1)
    attempt.end(tmp_path, "time limit")
    attempt.explain(tmp_path, "failed")
    attempt.begin(tmp_path, 2)
    attempt.explain(tmp_path, "rank 1 hangs")
    attempt.begin(tmp_path, 3)
    reasons = [each.get("reason") for each in attempt.read(tmp_path)]
    assert reasons == ["time limit", "rank 1 hangs", None]


def test_an_earlier_attempt_writes_nothing(run: Path) -> None:
    ranks = [records("zero3", 2, rank, 5) for rank in (0, 1)]
    with pytest.raises(attempt.Superseded, match=r"attempt 2 of .* has begun; this is 1"):
        RecordWriter(run)
    with pytest.raises(attempt.Superseded):
        write_summary(run, summarise(ranks[0], summaries(ranks)))
    with pytest.raises(attempt.Superseded):
        attempt.end(run, "time limit")
    with pytest.raises(attempt.Superseded):
        attempt.begin(run, 1)
    failure.write_raised(run, 0, ValueError("Connection closed by peer"))
    assert [each.step for each in read_records(run)] == [0]
    assert read_summary(run) is None and Job(run).failure is None
    assert "reason" not in attempt.read(run)[1]


def test_a_writer_of_an_earlier_attempt_reaches_no_line(run: Path) -> None:
    """Also in the moment between its look at the number and its write: the file is another one then."""
    with (run / "records.jsonl").open("a") as left_over:
        os.environ[attempt.NUMBER] = "2"
        with RecordWriter(run, from_step=1) as writer:
            left_over.write("not a record\n")
            left_over.flush()
            writer.write(record(1))
    assert [each.step for each in read_records(run)] == [0, 1]


def test_a_failure_counts_until_the_next_attempt(run: Path) -> None:
    os.environ[attempt.NUMBER] = "2"
    failure.write_raised(run, 1, ValueError("first"))
    # A rank of this very attempt was faster than the task that begins it.
    failure.remove_older_failure(run)
    assert json.loads((run / failure.FAILURE).read_text())["attempt"] == 2
    attempt.begin(run, 3)
    failure.remove_older_failure(run)
    assert Job(run).failure is None


def test_the_first_failure_of_an_attempt_replaces_that_of_an_earlier_one(run: Path) -> None:
    """A rank may fail before the task of rank 0 has begun the attempt and removed it."""
    os.environ[attempt.NUMBER] = "2"
    failure.write_raised(run, 1, ValueError("of the second"))
    os.environ[attempt.NUMBER] = "3"
    for each in ("of the third", "another of the third"):
        failure.write_raised(run, 1, ValueError(each))
    assert (Job(run).failure or {})["message"] == "of the third"


def test_a_limit_that_was_reached_is_told_with_its_remedy(run: Path) -> None:
    os.environ[attempt.NUMBER] = "2"
    failure.write_raised(run, 1, OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    assert "Too many open files; raise the limit" in (Job(run).failure or {})["message"]


def test_last_words_find_room(tmp_path: Path) -> None:
    """The disk is full as long as the reserve is there."""
    reserve(tmp_path)
    said: list[str] = []

    def say() -> None:
        if (tmp_path / RESERVE).exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        said.append("it is full")

    write_with_reserve(tmp_path, say)
    assert said == ["it is full"]
