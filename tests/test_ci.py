""".ci/run in a small tree: which failures end it, and that running out of time is none."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = ("bash", "cat", "dirname", "env", "grep", "mktemp", "rm", "timeout")
MAKE = """#!/usr/bin/env bash
[ "$1" = test ] || exit 0
.venv/bin/python -m pytest -q -m "not slow and not slurm" && exit 0
echo "make: *** [Makefile:1: test] Error $?" >&2
exit 2
"""
# A test that is named so in FAIL fails: the first time, or each time.
TESTS = """
import os
from pathlib import Path
import pytest

def outcome(name):
    Path("runs").open("a").write(name + "\\n")
    fails = dict(each.split("=") for each in os.environ["FAIL"].split())
    first = Path("runs").read_text().split().count(name) == 1
    assert not (fails.get(name) == "always" or (fails.get(name) == "once" and first))

def test_plain(): outcome("plain")

@pytest.mark.daemon
def test_daemon(): outcome("daemon")

@pytest.mark.slurm
@pytest.mark.daemon
def test_slurm(): outcome("slurm")

@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_slow(number): outcome("slow")
"""
CONFTEST = """
from how_a_run_goes import Run

def pytest_configure(config):
    config.pluginmanager.register(Run())
"""


def run_in(folder: Path, fail: str = "", *, is_over: bool = False) -> tuple[int, str]:
    """Its exit code and output in a tree whose Makefile and tests are these. `is_over`: the time of each part is."""
    for name in (".ci", "bin", ".venv/bin", "tests/plan"):
        (folder / name).mkdir(parents=True)
    for tool in TOOLS:  # no apt-get
        (folder / "bin" / tool).symlink_to(shutil.which(tool) or tool)
    programs = {
        "bin/make": MAKE,
        "bin/date": f"#!/usr/bin/env bash\necho {0 if is_over else 10**10}\n",
        ".venv/bin/python": f'#!/usr/bin/env bash\nexec {sys.executable} "$@"\n',
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    shutil.copy(ROOT / ".ci/run", folder / ".ci")
    shutil.copy(ROOT / "tests/how_a_run_goes.py", folder / "tests")
    (folder / "tests/test_some.py").write_text(TESTS)
    (folder / "tests/conftest.py").write_text(CONFTEST)
    for name in ("planned_peak", "gradient_sums", "calibrate"):
        (folder / f"tests/plan/test_{name}.py").touch()
    (folder / "tests/plan/test_calibrate.py").write_text("def test_scratch(): ...\n")
    marks = "".join(f"    {mark}\n" for mark in ("slow", "slurm", "browser", "daemon", "wide"))
    (folder / "pytest.ini").write_text(f"[pytest]\naddopts = -p no:xdist\nmarkers =\n{marks}")
    done = subprocess.run(
        ["bash", folder / ".ci/run"],
        env={"PATH": str(folder / "bin"), "FAIL": fail},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def test_a_daemon_that_fails_once_passes(tmp_path):
    code, told = run_in(tmp_path, "daemon=once slurm=once")
    assert code == 0 and told.count("once more, what failed") == 2, told


@pytest.mark.parametrize("fail", ["plain=once", "daemon=always"])
def test_what_fails_ends_it(tmp_path, fail):
    code, told = run_in(tmp_path, fail)
    assert code == 1, told
    assert "slurm" not in (tmp_path / "runs").read_text(), "nothing runs behind it"


@pytest.mark.slow
@pytest.mark.parametrize("fail", ["slow=once", "slurm=always", "daemon=once plain=once"])
def test_what_fails_later_ends_it_too(tmp_path, fail):
    code, told = run_in(tmp_path, fail)
    assert code == 1, told


def test_time_that_is_over_ends_no_test_and_is_no_failure(tmp_path):
    """The first slow test is let to its end, and no other begins."""
    code, told = run_in(tmp_path, is_over=True)
    assert code == 0, told
    assert "not all tests that are slow" in told and "2 tests have not run to their end" in told
    assert (tmp_path / "runs").read_text().split().count("slow") == 1


@pytest.mark.slow
def test_a_failure_before_the_time_is_over_counts(tmp_path):
    code, told = run_in(tmp_path, "slow=once", is_over=True)
    assert code == 1 and "2 tests have not run to their end" in told, told
