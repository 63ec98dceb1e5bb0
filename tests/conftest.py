"""What every test may ask for: `ranks(function, *args, world_size=2)`, see tests/ranks.py, and `local`, a cluster.

Also how a run goes: `make test` has three processes that share the tests; whoever stops a run is told what it missed.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import date
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

# Before torch is imported anywhere: two ranks on two cores each compute with one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

from tests import rank_code
from tests.mlflow_server import MlflowServer
from tests.ranks import Ranks
from tests.run_folders import log_study
from tests.warm import Warm, start_servers_with
from zeroexp.cluster.local import LocalCluster
from zeroexp.config.keys import Config
from zeroexp.measure.memory import compile_allocator
from zeroexp.tracking.mlflow_store import SQLITE, Store

torch.set_num_threads(1)

# A script's background, or nohup, lets these be ignored, and every process that a test starts would inherit that.
for name in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(name) is signal.SIG_IGN:
        signal.signal(name, signal.default_int_handler if name is signal.SIGINT else signal.SIG_DFL)

# A slow machine is no failure, and a failure prints what draws it again. Where CI is set, hypothesis has a profile of
# its own, without chance.
hypothesis.settings.register_profile("here", deadline=None, print_blob=True)
if "CI" not in os.environ:
    hypothesis.settings.load_profile("here")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One for all tests, with a server that imports nothing any more. What its ranks do: tests/rank_code.py."""
    cache, compiled = tmp_path_factory.mktemp("cache"), compile_allocator()
    if isinstance(compiled, Path):  # else each worker compiles for five seconds of a core
        shutil.copytree(compiled.parent, cache / compiled.parent.name)
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ZEROEXP_CACHE", str(cache))
            start_servers_with(patch, Warm)
            own = LocalCluster(Config().cluster, rank_main=rank_code.MAIN)
            cluster = stack.enter_context(own)
        yield cluster


@pytest.fixture(scope="session")
def mlflow(
    tmp_path_factory: pytest.TempPathFactory, empty_store: Path
) -> Iterator[tuple[MlflowServer, dict[str, str]]]:
    """One server for all tests, since it starts for ten seconds of a core; its store holds a study."""
    folder = tmp_path_factory.mktemp("mlflow")
    shutil.copy(empty_store, folder)
    links = log_study(folder)
    with MlflowServer(folder) as server:
        yield server, links


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sqlite store of MLflow without runs, to be copied; one for all workers, since its tables take seconds."""
    own = tmp_path_factory.getbasetemp()
    store = Store(None, "x", own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)
    with warnings.catch_warnings(action="ignore"), store.opened():
        return Path(store.uri.removeprefix(SQLITE))


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Every test finds the words of the one before it, though commands that run in this process set some."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


# ---- how a run goes


BEGIN = "ZEROEXP_TESTS_BEGIN"  # a date, as 2026-11-24: which seventh of the tests comes first


class Run:
    """Knows which tests were to run and which have: in the one process that tells of it."""

    def __init__(self) -> None:
        self._chosen: list[str] = []
        self._ended: set[str] = set()

    @pytest.hookimpl(trylast=True)  # of those that were chosen by their marks
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """A run that its time ends, as CI's, has so run all of them within a week."""
        if day := os.environ.get(BEGIN):
            first = date.fromisoformat(day).toordinal() % 7 * len(items) // 7
            items[:] = items[first:] + items[:first]

    def pytest_report_collectionfinish(self, items: list[pytest.Item]) -> str | None:
        day = os.environ.get(BEGIN)
        return (
            f"as of {day} these come first: {items[0].location[0]} and on"
            if day and items
            else None
        )

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._chosen = self._chosen or [item.nodeid for item in session.items]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._chosen = ids

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._ended.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        missed = Counter(name.split("::")[0] for name in self._chosen if name not in self._ended)
        if missed:
            terminalreporter.section(f"{missed.total()} tests have not run to their end")
            for file, number in missed.items():
                terminalreporter.write_line(f"{number:5} of {file}")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a server of MLflow is slow, since it starts for ten seconds of a core."""
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "mlflow" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
        if marks & {"slurm", "browser"} or "mlflow" in getattr(item, "fixturenames", ()):
            item.add_marker("daemon")


def stop(number: int, frame: object) -> None:
    """`timeout` and CI end a run so, some twice: it then says what it knows, as after Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    raise KeyboardInterrupt


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGTERM, stop)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Run())


def pytest_collection_finish() -> None:
    """What is there now stays: collections of garbage need not look at it again.

    The server that forks ranks and commands starts here, since what it imports it looks for in the folder in which it
    starts. In the folder of a test it would find nothing and say nothing, and each rank would import all for itself.
    """
    multiprocessing.set_forkserver_preload(["tests.preloaded"])  # also for the ranks of benchmarks
    forkserver.ensure_running()
    gc.collect()
    gc.freeze()
