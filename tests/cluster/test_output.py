"""Output that nobody takes (full disk, closed descriptor, a reader that leaves): work and exit codes stay the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cluster.test_sweep import LIGHT, ROOT, statuses


def run(folder: Path, redirected: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", f'"$@" {redirected}', "bash", sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_a_sweep_and_its_report_end_for_no_output(tmp_path):
    done = run(tmp_path, ">/dev/full 2>&-", "-m", "zeroexp", *LIGHT, "world_size=1")
    assert done.returncode == 0
    assert list(statuses(tmp_path).values()) == ["done"]
    (sweep,) = tmp_path.glob("outputs/*-*")
    many = [str(sweep)] * 200  # more than a pipe holds
    first = run(tmp_path, "| head -1", "-m", "zeroexp.report", *many)
    assert (first.returncode, first.stdout, first.stderr) == (0, f"{sweep}\n", "")
