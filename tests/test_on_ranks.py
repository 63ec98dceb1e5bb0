"""Ranks as forks of a process."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile

import pytest

from zeroexp.process.on_ranks import on_ranks


@pytest.mark.parametrize("name", ["a#b", "a?b"])
def test_ranks_meet_below_a_folder_of_any_name(tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    assert on_ranks(lambda world: world.size, 2, seconds=60) == [2, 2]
    assert [*tmp_path.iterdir()] == [tmp_path / name]


HANG = """
import os, time
from zeroexp.process.on_ranks import on_ranks
def hang(world):
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(600)
on_ranks(hang, 2)
"""


def test_ranks_end_with_the_process_that_forked_them():
    """Killed, it can end nobody itself: by CI, `docker stop` or the kernel, for want of memory."""
    command = [sys.executable, "-c", HANG]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ranks = [os.pidfd_open(int(process.stdout.readline())) for _ in range(2)]
        process.kill()
    for each in ranks:
        select.select([each], [], [])
        os.close(each)
