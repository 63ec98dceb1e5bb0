"""Lines that nobody wrote end as any line must: a sample of `python -m tests.fuzz`, the same on every machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.warm import Warm

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_drawn_lines_are_accepted_or_refused_in_one_line():
    command = [sys.executable, "-m", "tests.fuzz", "--lines", "25", "--seed", "1"]
    fuzz = Warm(command, env=dict(os.environ), cwd=ROOT)
    told, errors = fuzz.communicate(timeout=800)
    assert fuzz.returncode == 0, told + errors
    assert told.rstrip().splitlines()[-1].startswith("25 lines: ")
