"""Live lines on a terminal, plain lines in a pipe. The terminal is a small real one: it does what the codes say."""

from __future__ import annotations

import io
import re
from pathlib import Path

from tests.run_folders import record, write_run
from zeroexp.checkpoint.folders import LOG
from zeroexp.cluster.follow import ShownRun
from zeroexp.cluster.job import Job
from zeroexp.report.sweep_progress import MAX_RUNNING_LINES, SweepProgress, duration
from zeroexp.tracking.files import RecordWriter


class Clock:
    """Time passes when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """Understands what progress uses: newline, cursor up, erase to the end of the line or screen."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        lines, row = [""], 0
        for count, what, text in re.findall(r"\x1b\[(\d*)([AKJ])|([^\x1b\n]+|\n)", self.getvalue()):
            if what == "A":
                row -= int(count)
            elif what == "J":
                del lines[row + 1 :]
                lines[row] = ""
            elif text == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif text:
                lines[row] = text
        return [line for line in lines if line]


def test_a_pipe_gets_one_plain_line_per_event() -> None:
    pipe, clock = io.StringIO(), Clock()
    with SweepProgress(2, pipe, clock) as progress:
        progress.start(1, "zero3-buffer", num_steps=3)
        for step in range(3):
            clock.now += 1.0
            progress.step(1, record(step, loss=2.5, step_seconds=0.25, num_tokens=1000))
        progress.end(1, "done")
        progress.end(2, "skipped", "use zero1", name="zero1_allreduce-torch")
        progress.end(2, "failed", "ValueError: no\nmore of it", name="zero3-torch")
    assert pipe.getvalue().splitlines() == [
        "[1/2] zero3-buffer: started",
        "[1/2] zero3-buffer | step 1/3 warm-up | loss 2.5000 | 250 ms | 4,000 tokens/s",
        "[1/2] zero3-buffer | step 3/3 warm-up | loss 2.5000 | 250 ms | 4,000 tokens/s",
        "[1/2] zero3-buffer: done in 3.0 s",
        "[2/2] zero1_allreduce-torch: skipped: use zero1",
        "[2/2] zero3-torch: failed: ValueError: no",
    ]
    assert "\x1b" not in pipe.getvalue()


def shown_of(steps: range) -> list[str]:
    """Lines of steps of a hundred, each of which takes a second."""
    pipe, clock = io.StringIO(), Clock()
    progress = SweepProgress(1, pipe, clock)
    progress.start(1, "run", num_steps=100)
    for step in steps:
        clock.now += 1.0
        progress.step(1, record(step))
    return [line for line in pipe.getvalue().splitlines() if "step" in line]


def test_a_long_run_in_a_pipe_shows_a_step_every_few_seconds_with_time_left() -> None:
    shown = shown_of(range(50))
    steps = [int(re.search(r"step (\d+)/", line)[1]) for line in shown]
    assert steps == [*range(1, 51, 5)]
    assert shown[-1].endswith("54 s left")  # step 46 of 100, a second each


def test_a_run_that_goes_on_counts_the_steps_that_it_has_seen() -> None:
    first, last = shown_of(range(50, 56))
    assert "step 51/100" in first and "left" not in first
    assert "step 56/100" in last and last.endswith("44 s left")


def test_steps_from_before_it_was_followed_took_none_of_the_time(tmp_path: Path) -> None:
    """Also of a run that was away, whose records are cut and read again."""
    folder = write_run(tmp_path / "run", status="running", num_steps=10)
    pipe, clock = io.StringIO(), Clock()
    shown = ShownRun(1, Job(folder), SweepProgress(1, pipe, clock), lambda _: None)
    shown.start()
    shown.show_steps()
    for from_step, seconds in ((10, 5.0), (6, 100.0), (7, 8.0)):
        clock.now += seconds
        with RecordWriter(folder, from_step=from_step) as writer:
            writer.write(record(from_step))
        shown.show_steps()
    # Of 23 steps 12 are left of 5 s, then 15 of 8 s.
    left = re.findall(r"\d[\w ]+ left", pipe.getvalue())
    assert left == ["1 min 00 s left", "2 min 00 s left"]


def test_a_torn_line_about_a_save_ends_no_sweep(tmp_path: Path) -> None:
    """A full disk tears it, and training goes on."""
    folder = write_run(tmp_path / "run", status="running", num_steps=0)
    pipe = io.StringIO()
    shown = ShownRun(1, Job(folder), SweepProgress(1, pipe), lambda _: None)
    (folder / LOG).write_text('{"step": 1, "err{"step": 2, "error": null}\n{"error": "no room"}\n')
    shown.show_steps()
    assert "no room" in pipe.getvalue()


def test_what_drifts_is_named_every_three_hundred_steps_while_the_run_goes_on() -> None:
    pipe = io.StringIO()
    progress = SweepProgress(1, pipe, Clock())
    progress.start(1, "run", num_steps=1000)
    for step in range(603):
        objects = 1000 + 10 * min(step, 303) if step % 10 == 0 else None
        progress.step(1, record(step, step_seconds=0.25, num_objects=objects))
    named = [line for line in pipe.getvalue().splitlines() if "objects" in line]
    assert named == ["[1/1] run: live objects rise by 10 a step"]


def test_a_terminal_shows_the_running_points_and_keeps_what_ended() -> None:
    terminal, clock = Terminal(), Clock()
    with SweepProgress(3, terminal, clock) as progress:
        progress.start(1, "one", num_steps=4)
        progress.start(2, "two", num_steps=4)
        clock.now = 2.0
        progress.step(1, record(0, loss=3.25))
        one, two, sweep = terminal.screen()[2:]
        assert one.startswith("[1/3] one | step 1/4 warm-up | loss 3.2500 |")
        assert two == "[2/3] two | starting"
        assert sweep == "0/3 points ended"
        clock.now = 10.0
        progress.end(1, "failed", "rank 1: boom")
        assert terminal.screen()[2] == "[1/3] one: failed in 10 s: rank 1: boom"
        assert terminal.screen()[-1] == "1/3 points ended | 1 failed"
        progress.note("another attempt")
    assert terminal.screen() == [
        "[1/3] one: started",
        "[2/3] two: started",
        "[1/3] one: failed in 10 s: rank 1: boom",
        "another attempt",
    ]


def test_a_frame_is_one_write_that_never_clears_before_it_draws() -> None:
    writes: list[str] = []

    class Recorder(Terminal):
        def write(self, text: str, /) -> int:
            writes.append(text)
            return super().write(text)

    clock = Clock()
    progress = SweepProgress(1, Recorder(), clock)
    progress.start(1, "run", num_steps=9)
    del writes[:]
    clock.now = 1.0
    progress.step(1, record(0))
    progress.step(1, record(1))  # at the same moment: no frame of its own
    assert len(writes) == 1
    up, rest = writes[0][: len("\x1b[2A")], writes[0][len("\x1b[2A") :]
    assert up == "\x1b[2A"
    assert all(line.endswith("\x1b[K") for line in rest.split("\n")[:-1])
    assert rest.endswith("\n\x1b[J")


def test_lines_never_wrap_and_many_running_points_are_counted(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    progress = SweepProgress(20, terminal, Clock())
    for number in range(1, 13):
        progress.start(number, "a-name-that-is-longer-than-forty-columns-are", num_steps=4)
    frame = terminal.screen()[12:]
    assert len(frame) == MAX_RUNNING_LINES + 2
    assert all(len(line) < 40 for line in frame)
    assert frame[-2] == "... and 4 more running"


def test_durations_read_like_a_clock() -> None:
    texts = [duration(seconds) for seconds in (1.24, 47.3, 59.9, 185, 7800)]
    assert texts == ["1.2 s", "47 s", "1 min 00 s", "3 min 05 s", "2 h 10 min"]
