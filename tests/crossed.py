"""Cases of a test, listed or crossed: some run before every change, and the rest in `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def every_nth(number: int, names: str, cases: Iterable[Any], **words: Any) -> pytest.MarkDecorator:
    """Like pytest.mark.parametrize for the names of "a, b": of each `number` cases the first is quick, others slow."""
    argnames = names.split(", ")
    marked = [
        pytest.param(
            *(case if len(argnames) > 1 else (case,)),
            marks=pytest.mark.slow if index % number else (),
        )
        for index, case in enumerate(cases)
    ]
    return pytest.mark.parametrize(argnames, marked, **words)


def crossed(names: str, *values: Iterable[Any], quick: Callable[..., bool]) -> pytest.MarkDecorator:
    """Like pytest.mark.parametrize for each name of "a, b" with its values; `quick(a, b)` says which are not slow."""
    combinations = [
        pytest.param(*each, marks=() if quick(*each) else pytest.mark.slow)
        for each in itertools.product(*values)
    ]
    return pytest.mark.parametrize(names.split(", "), combinations)
