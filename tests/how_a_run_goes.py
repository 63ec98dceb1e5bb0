"""Which tests of a run were to run and which have, and until when tests begin: in the one process that tells of it."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any

import pytest

BEGIN_UNTIL = "TESTS_BEGIN_UNTIL"  # seconds since the epoch; .ci/run sets it
TIME_IS_OVER = 124  # exit code, as that of `timeout`


class Run:
    def __init__(self) -> None:
        self._chosen: list[str] = []
        self._ended: set[str] = set()
        self._until = float(os.environ.get(BEGIN_UNTIL, "inf"))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._session = session
        self._chosen = self._chosen or [item.nodeid for item in session.items]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._chosen = ids

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        self._is_last = nextitem is None

    def pytest_runtest_logfinish(self) -> None:
        if time.time() > self._until and not self._is_last:
            self._session.shouldstop = "no more tests begin: their time is over"

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.shouldstop and time.time() > self._until:
            session.exitstatus = TIME_IS_OVER  # the summary is that of tests that were stopped

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._ended.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        missed = Counter(name.split("::")[0] for name in self._chosen if name not in self._ended)
        if missed:
            terminalreporter.section(f"{missed.total()} tests have not run to their end")
            for file, number in missed.items():
                terminalreporter.write_line(f"{number:5} of {file}")
