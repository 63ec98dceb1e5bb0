"""The observer of engines/sharded.py: each event (zero/observer.py) goes to the parts that hear it, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from zeroexp.zero.observer import Observer
from zeroexp.zero_safety.call_order import CallOrder
from zeroexp.zero_safety.changed_parameters import ChangedParameters
from zeroexp.zero_safety.engine_arguments import RefusedArguments
from zeroexp.zero_safety.kept_views import KeptViews
from zeroexp.zero_safety.method_guards import OwnMethods
from zeroexp.zero_safety.parameter_guards import ParameterGuards
from zeroexp.zero_safety.piece_guards import OwnPieces
from zeroexp.zero_safety.replicas_differ import Replicas

PARTS: tuple[type[Observer], ...] = (
    RefusedArguments,
    ChangedParameters,  # before the order of calls, which notes a microbatch that begins
    CallOrder,
    KeptViews,
    ParameterGuards,
    OwnPieces,
    OwnMethods,
    Replicas,
)
EVENTS = [name for name in vars(Observer) if not name.startswith("_")]
CONTEXTS = ("gathered", "updating")


class Refusals(Observer):
    """An observer that raises where code around the engine would silently train another model."""

    def __init__(self) -> None:
        parts = [part() for part in PARTS]
        for event in EVENTS:
            hear = [getattr(part, event) for part in parts if event in vars(type(part))]
            tell = _enter_all if event in CONTEXTS else _tell_all
            setattr(self, event, hear[0] if len(hear) == 1 else partial(tell, hear))


def _tell_all(hear: Sequence[Callable[..., None]], *words: Any, **named: Any) -> None:
    for each in hear:
        each(*words, **named)


@contextmanager
def _enter_all(
    enter: Sequence[Callable[..., AbstractContextManager[None]]], **named: Any
) -> Iterator[None]:
    with ExitStack() as stack:
        for each in enter:
            stack.enter_context(each(**named))
        yield
