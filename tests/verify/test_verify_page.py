"""docs/verify.md: its loop, its mistakes and its answers; and loops that can not be run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.silent_loops import BUGS
from tests.verify.test_verify import answers
from zeroexp.process import safe_output
from zeroexp.verify.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/verify.md").read_text()
(CODE,) = re.findall(r"^```python\n# loop.py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
# What the page does to its loop, and the exit code
MISTAKES = {
    "right": (CODE, 0),
    "not divided": (CODE.replace(" / len(batches)\n", "\n"), 1),
}


def verify(folder: Path, text: str, *words: str) -> tuple[int, str, str]:
    (folder / "loop.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "zeroexp", "verify", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
    )
    return done.returncode, done.stdout, done.stderr


def lines(text: str) -> list[str]:
    """The lines, without what rounding and the version of torch make of them."""
    return [
        re.sub(r"\d+%|\d\.\d+e-\d+|torch \S+|PyTorch \S+", "", line).strip()
        for line in text.splitlines()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_the_page_shows_what_it_says(tmp_path: Path, name: str) -> None:
    text, code = MISTAKES[name]
    assert (text != CODE) == (code == 1)
    returned, printed, errors = verify(tmp_path, text, "loop.py:my_loop")
    assert (returned, errors) == (code, "")
    assert "\n".join(lines(printed)) in "\n".join(lines(PAGE))


def test_programs_read_the_same(tmp_path: Path) -> None:
    text, _ = MISTAKES["not divided"]
    code, printed, _ = verify(tmp_path, text, "loop.py:my_loop", "--json", "--worlds", "2")
    (world,) = json.loads(printed)
    found = world["difference"]
    assert code == 1 and world["world_size"] == 2
    assert (found["cause"]["kind"], found["tensor"], found["step"]) == ("scale", "0.weight", 0)
    assert found["bound"] < 1e-4 < 1.9 < found["distance"] < 2.1  # three times as long


# Functions behind the page's loop, and what is said of them
CANNOT = {
    "nothing": "no such function; name one that returns a Loop",
    "build_model": "returns Sequential; return a zeroexp.verify.Loop",
    "without_step": "train returns no step; return step, or (model, step)",
    "divides": "rank 0 of 1: loop.py:{line}: ZeroDivisionError: division by zero",
    "with_dropout": "1: dropout 0.5 draws differently on each rank; build it with 0",
    "sleeps": "rank 0 of 1: not done after 3 s; see whether ranks issue different collectives",
    "ends": "rank 0 of 1: ended with exit code 3",
}
BEHIND = """
import os, time
from dataclasses import replace
without_step = lambda: replace(my_loop(), train=lambda model: None)
divides = lambda: replace(my_loop(), train=lambda model: lambda batches: 1 / 0)
with_dropout = lambda: replace(my_loop(), model=nn.Sequential(nn.Linear(1, 1), nn.Dropout()))
sleeps = lambda: replace(my_loop(), train=lambda model: time.sleep(99))
ends = lambda: replace(my_loop(), train=lambda model: os._exit(3))
"""


def test_what_can_not_be_run_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "loop.py"
    file.write_text(CODE + BEHIND)
    line = file.read_text().splitlines().index(BEHIND.splitlines()[4]) + 1
    asked = [(name, 1, 3.0 if name == "sleeps" else 300.0) for name in CANNOT]
    for said, (word, told) in zip(CANNOT.values(), answers(file, asked), strict=True):
        assert word == "refused" and said.format(line=line) in told and "\n" not in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["other.py:my_loop"],
            "other.py:my_loop: no such file, or no function; give FILE:FUNCTION",
        ),
        ([__file__], f"{__file__}: no such file, or no function; give FILE:FUNCTION"),
        (
            [f"{__file__}:x", "--worlds", "x"],
            "--worlds x: no numbers of ranks; give some, as 1,2,4",
        ),
        ([f"{__file__}:x", "--steps", "0"], "--steps 0: none; give at least 1"),
    ],
)
def test_a_wrong_word_is_refused(
    monkeypatch: Any, capsys: Any, words: list[str], said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["zeroexp verify", *words])
    monkeypatch.setattr(safe_output, "keep_going", lambda: None)  # pytest has its own
    assert main() == 2
    assert capsys.readouterr().err == f"zeroexp: {said}\n"


def test_the_page_of_bugs_has_each_published_one_with_its_thread_and_kind() -> None:
    rows = (ROOT / "docs/silent_bugs.md").read_text().splitlines()
    for bug in (each for each in BUGS.values() if each.thread):
        (row,) = [each for each in rows if each.startswith(f"| {bug.was} |")]
        assert f"| `{bug.kind}`: " in row and f"[{bug.thread}]({bug.url})" in row
