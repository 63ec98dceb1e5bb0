"""What a process writes, killed or not, is what readers see."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
from pathlib import Path, PosixPath

import pytest

from tests.run_folders import record, records, summaries, write_run
from zeroexp.config.keys import DamagedFile
from zeroexp.measure.summary import summarise
from zeroexp.report.reading import readable_runs
from zeroexp.tracking.files import (
    RECORDS,
    SUMMARY,
    RecordWriter,
    Tail,
    drop_records,
    read_json,
    read_records,
    read_summary,
    read_timed_records,
    write_json,
    write_summary,
)
from zeroexp.tracking.run import flatten


def test_a_loss_that_is_not_a_number_comes_back_as_such(tmp_path: Path) -> None:
    with RecordWriter(tmp_path) as writer:
        writer.write(record(0, loss=math.nan, grad_norm=math.inf))
    (back,) = read_records(tmp_path)
    assert math.isnan(back.loss)
    assert back.grad_norm == math.inf

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    row = json.loads((tmp_path / "records.jsonl").read_text(), parse_constant=refuse)
    assert (row["loss"], row["grad_norm"]) == ("NaN", "Infinity")


def _write_until_killed(folder: Path) -> None:
    with RecordWriter(folder) as writer:
        for step in range(3):
            writer.write(record(step))
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_writer_loses_no_finished_line_nor_when_it_was_written(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=_write_until_killed, args=(tmp_path,)
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    times, written = zip(*read_timed_records(tmp_path), strict=True)
    assert list(written) == [record(step) for step in range(3)]
    assert list(times) == sorted(times)
    assert times[0] == pytest.approx((tmp_path / RECORDS).stat().st_mtime, abs=5.0)


def test_a_torn_line_is_dropped_and_a_resumed_run_replaces_what_it_repeats(tmp_path: Path) -> None:
    with RecordWriter(tmp_path) as writer:
        for step in range(4):
            writer.write(record(step, loss=1.0))
    path = tmp_path / RECORDS
    path.write_bytes(path.read_bytes()[:-20])  # killed in the middle of step 3's line
    assert [r.step for r in read_records(tmp_path)] == [0, 1, 2]
    with RecordWriter(tmp_path) as writer:  # resumed from a checkpoint after step 1
        for step in (2, 3):
            writer.write(record(step, loss=2.0))
    assert [(r.step, r.loss) for r in read_records(tmp_path)] == [
        (0, 1.0),
        (1, 1.0),
        (2, 2.0),
        (3, 2.0),
    ]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_no_records_and_no_summary_before_there_are_any(tmp_path: Path) -> None:
    assert read_records(tmp_path) == []
    assert read_summary(tmp_path) is None
    assert read_json(tmp_path / "state.json") is None


@pytest.mark.parametrize("peak_known", [True, False])
def test_summary_comes_back_as_it_went(tmp_path: Path, peak_known: bool) -> None:
    ranks = [records("zero2", 2, rank, 6) for rank in range(2)]
    summary = summarise(ranks[0], summaries(ranks))
    if not peak_known:
        summary.memory.peak = None
    write_summary(tmp_path, summary)
    assert read_summary(tmp_path) == summary


def test_json_is_replaced_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / SUMMARY
    write_json(path, {"version": 1})
    with path.open() as reader:  # a reader that opened the old file keeps it
        write_json(path, {"version": 2})
        assert json.load(reader) == {"version": 1}
    assert read_json(path) == {"version": 2}
    assert [p.name for p in tmp_path.iterdir()] == [SUMMARY]


def test_flatten_names_by_dots_and_keeps_lists_and_emptiness() -> None:
    nested = {
        "a": {"b": {"c": 1}, "none": None},
        "list": [1, 2],
        "empty": {},
        "word": "x",
        "yes": True,
    }
    assert flatten(nested) == {
        "a.b.c": "1",
        "a.none": "null",
        "list": "[1, 2]",
        "empty": "{}",
        "word": "x",
        "yes": "true",
    }


def test_no_checkpoint_goes_on_behind_a_hole(tmp_path: Path) -> None:
    """A power cut leaves zeros at the end, which are dropped as a cut line is, unless a checkpoint rests on them."""
    with RecordWriter(tmp_path) as writer:
        for step in range(5):
            writer.write(record(step))
    path = tmp_path / RECORDS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], bytes(len(lines[4]))]))
    with pytest.raises(DamagedFile, match=r"records.jsonl: .*1 steps are missing from 4 on"):
        RecordWriter(tmp_path, from_step=5, rests_on=True)
    with RecordWriter(tmp_path, from_step=4, rests_on=True) as writer:
        writer.write(record(5))
    with pytest.raises(DamagedFile, match=r"1 steps are missing from 4 on"):
        read_records(tmp_path)


def test_a_follower_tells_a_file_put_in_its_place_from_the_beginning(tmp_path: Path) -> None:
    with RecordWriter(tmp_path) as writer:
        for step in range(3):
            writer.write(record(step))
    tail = Tail(tmp_path / RECORDS)
    assert len(tail.new_lines()) == 3 and tail.new_lines() == []
    drop_records(tmp_path, from_step=1)
    with RecordWriter(tmp_path) as writer:
        writer.write(record(1))
        assert [json.loads(line)["step"] for line in tail.new_lines()] == [0, 1]
        writer.write(record(2))
        assert [json.loads(line)["step"] for line in tail.new_lines()] == [2]


def test_what_another_host_writes_meanwhile_under_the_same_pid_is_left_alone(tmp_path):
    theirs = tmp_path / f".{SUMMARY}.{os.getpid()}"
    theirs.write_text("half of", encoding="utf-8")
    write_json(tmp_path / SUMMARY, {})
    assert theirs.read_text(encoding="utf-8") == "half of"


class SetAside(PosixPath):
    """A file that --rerun moves away as soon as one has seen that it is there."""

    def exists(self) -> bool:
        self.unlink()
        return True


def test_a_file_that_is_set_aside_while_it_is_followed_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / RECORDS).write_text("{}\n", encoding="utf-8")
    assert Tail(SetAside(tmp_path / RECORDS)).new_lines() == ["{}"]


def test_a_run_of_a_later_version_costs_a_line_and_itself_alone(tmp_path: Path, capsys) -> None:
    later, here = (write_run(tmp_path / name) for name in ("later", "here"))
    content = json.loads((later / "summary.json").read_text(encoding="utf-8"))
    (later / "summary.json").write_text(json.dumps({**content, "format": 99}), encoding="utf-8")
    assert [run.folder for run in readable_runs([later, here])] == [here]
    assert "later: left out, summary.json has format 99" in capsys.readouterr().err
