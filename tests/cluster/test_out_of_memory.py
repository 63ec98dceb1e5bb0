"""Want of memory is a result of the point, whoever tells: Python, torch, or the kernel, which kills without a word."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import rank_code
from tests.cluster.test_local import make_job as make_light_job
from tests.test_rank import make_job as make_training_job
from zeroexp.cluster.job import first_cause
from zeroexp.cluster.local import LocalCluster
from zeroexp.config.keys import Config
from zeroexp.tracking.out_of_memory import describe_shortage

HUNGRY = "tests.cluster.hungry_ranks:main"
GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.mark.parametrize(
    ("what", "exception", "asked"),
    [
        pytest.param("ask_python", "MemoryError", None, marks=pytest.mark.slow),
        ("ask_torch", "RuntimeError", 64 << 30),
    ],
)
def test_what_was_refused_is_told(local, tmp_path, what, exception, asked):
    outcome = local.run(make_light_job(tmp_path / what, main=HUNGRY))
    assert outcome.status == "out_of_memory"
    assert outcome.cause is not None
    assert (outcome.cause["rank"], outcome.cause["exception"]) == (1, exception)
    short = outcome.cause["out_of_memory"]
    assert short["asked_bytes"] == asked
    assert 50 << 20 < short["peak_bytes"] < 4 << 30, "torch is imported, and not much else"
    line = str(first_cause(outcome.cause))
    assert line.startswith(f"rank 1 on {os.uname().nodename}: {exception}: out of memory")
    assert ("asked for 64.00 GiB" in line) == (asked is not None)
    assert "had at most" in line


def test_a_model_that_does_not_fit_ends_the_run_as_such(local, tmp_path):
    job = make_training_job(tmp_path / "train", model__mlp={"width": 2048, "depth": 1})
    rank_code.choose(job.folder, HUNGRY)
    outcome = local.run(job)
    assert outcome.status == "out_of_memory", outcome.cause
    assert outcome.cause is not None
    assert outcome.cause["rank"] == 1
    assert re.search(
        r"out of memory: asked for [\d.]+ [MG]iB, had at most", outcome.cause["message"]
    )


@contextmanager
def limited_to(num_bytes: int) -> Iterator[Path]:
    group = GROUPS / f"zeroexp-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(num_bytes))
    except OSError as error:
        pytest.skip(f"no control group of memory (version 1) can be made here: {error}")
    try:
        yield group / "cgroup.procs"
    finally:
        while (
            group / "cgroup.procs"
        ).read_text():  # the dead leave a little after they were waited for
            time.sleep(0.01)
        group.rmdir()


@pytest.mark.slow
def test_the_kernel_kills_without_a_word(tmp_path: Path) -> None:
    # A server of its own, since it stays in the group.
    own = LocalCluster(Config().cluster, rank_main=HUNGRY)
    with limited_to(256 << 20) as group, own:
        own.run(make_light_job(tmp_path / "ask_python"))  # what it imports counts outside
        group.write_text(str(own.server))
        outcome = own.run(make_light_job(tmp_path / "fill_page_after_page"))
    assert outcome.status == "out_of_memory", outcome.cause
    assert outcome.cause is not None
    assert (outcome.cause["rank"], outcome.cause["exception"]) == (1, "SIGKILL")
    assert "out of memory: the kernel killed rank 1" in outcome.cause["message"]
    assert outcome.cause["out_of_memory"]["peak_bytes"] > 100 << 20


class OutOfMemoryError(RuntimeError):
    """By the name that torch gives to its own, which needs a GPU to be met."""


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"), 5 << 29),
        (RuntimeError("CUDA error: out of memory"), None),
        (RuntimeError("std::bad_alloc"), None),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), None),  # of mmap
    ],
)
def test_every_library_is_understood(error: Exception, asked: int | None) -> None:
    short = describe_shortage(error, 1 << 20)
    assert short is not None and short.asked_bytes == asked


@pytest.mark.parametrize("error", [ValueError("out of memory"), RuntimeError("shapes differ")])
def test_another_error_is_another_error(error: Exception) -> None:
    assert describe_shortage(error, None) is None
