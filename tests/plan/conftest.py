"""`planned` calls the command, `plans_of` plans a line without it; `counted` skips where no allocations are counted."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import pytest

from tests.composing import compose_once, values_of
from zeroexp.measure.memory import count_cpu_allocations
from zeroexp.plan import __main__ as plan
from zeroexp.plan.composed_points import ComposedPoints
from zeroexp.plan.plan_points import Plans


@pytest.fixture
def in_an_empty_folder(monkeypatch, tmp_path) -> None:
    compose_once(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def planned(
    in_an_empty_folder, monkeypatch, tmp_path, capsys
) -> Callable[[str], tuple[int, str, str]]:
    """Calls the command in an empty folder: (exit code, output, errors)."""

    def call(line: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["zeroexp.plan", *line.split()])
        code = plan.main()
        told = capsys.readouterr()
        assert list(tmp_path.iterdir()) == [], "a plan leaves no file"
        return code, told.out, told.err

    return call


@pytest.fixture
def plans_of(in_an_empty_folder) -> Callable[[str], Plans]:
    """Plans a line, in which lists are swept: what Hydra composes of it takes most of a command's time."""

    def plan_line(line: str) -> Plans:
        words = [word for word in line.split() if word != plan.REHEARSE]
        composed = ComposedPoints(words)
        pairs = (word.partition("=") for word in words)
        swept = ([f"{key}={value}" for value in values.split(",")] for key, _, values in pairs)
        points = list(itertools.product(*swept))
        composed.run([([w for w in p if w not in words], values_of(*p), {}) for p in points])
        gives_time = plan.REHEARSE in line
        rehearses = gives_time and plan.ADVISE not in line
        return Plans(composed, rehearses=rehearses, gives_time=gives_time)

    return plan_line


@pytest.fixture
def counted() -> None:
    if reason := count_cpu_allocations():
        pytest.skip(reason)
