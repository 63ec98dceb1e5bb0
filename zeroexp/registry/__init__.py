"""A registry holds the code that one word of the config may name: ours, and what other packages and modules add.

Others add in a module that `plugins=[module]` names, and edit no file of ours:

    STAGES.add("mine", Stage(...))

A word has one meaning: whoever registers it a second time is refused, and both are named. Nothing here imports torch.

A registered dataclass is compared with its own annotations (`misfit`): else a forgotten comma in `tasks=("causal")`, or
a function that takes one argument too few, would be found by a rank, or by the report of a run that is over.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, ClassVar, Generic, TypeVar, cast

from zeroexp.registry.did_you_mean import suggest_word
from zeroexp.registry.errors import ConfigError

Value = TypeVar("Value")
NAME = re.compile(r"[A-Za-z]\w*")
PLAIN = (type(None), bool, int, float, str)
# The modules of others that have registered a word or were asked to: what they raise is told in one line.
MODULES_OF_OTHERS: set[str] = set()


class RegistryError(ConfigError):
    """A word that is registered wrongly or twice."""


class UnknownWord(RegistryError, KeyError):
    """A word that nobody has registered."""

    __str__ = ValueError.__str__  # KeyError quotes its message


class Registry(Mapping[str, Value], Generic[Value]):
    """Maps words to values. Registries of one key of the config share its words."""

    _all: ClassVar[list[Registry[Any]]] = []

    def __init__(
        self,
        key: str,
        own: Mapping[str, Value],
        *,
        needs: str,
        fits: Callable[[Any], bool] = callable,
        arguments: Callable[[Any], Mapping[str, int]] = lambda value: {},
    ) -> None:
        """`own` are our words. needs: what `fits` accepts, in words.

        arguments: how many each function of a value is called with, by field; "" is a value that is one itself.
        """
        self.key, self._needs, self._fits = key, needs, fits
        self._arguments = arguments
        self.own = tuple(own)  # in the order in which messages name them
        self._values, self._who = dict(own), dict.fromkeys(own, "zeroexp itself")
        Registry._all.append(self)

    def add(self, name: str, value: Value) -> Value:
        """Register a word and return its value. Raises RegistryError for a bad name or value, and for a word taken."""
        if self._values.get(name) is value:
            return value
        module = str(sys._getframe(1).f_globals.get("__name__"))
        MODULES_OF_OTHERS.add(module)
        who = f"module {module}"
        self._refuse_unfit(name, value, who)
        if taken := next((each._who[name] for each in self._sharing() if name in each), None):
            problem = f"registered by {taken} and by {who}"
            raise RegistryError(f"{self.key}={name}: {problem}; rename one of them")
        self._values[name], self._who[name] = value, who
        return value

    def remove(self, name: str) -> None:
        """Forget a word that `add` has registered, so that a notebook may add it again."""
        assert name not in self.own, f"{name} is a word of zeroexp itself"
        del self._values[name], self._who[name]

    def __getitem__(self, name: str) -> Value:
        """Return the value of the word. Raises UnknownWord."""
        if name not in self:
            words = [word for other in self._sharing() for word in other]
            remedy = suggest_word(self.key, name, words)
            raise UnknownWord(f"{self.key}={name}: unknown word; {remedy}")
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _sharing(self) -> list[Registry[Any]]:
        return [each for each in Registry._all if each.key == self.key]

    def _refuse_unfit(self, name: str, value: object, who: str) -> None:
        if not NAME.fullmatch(name):
            problem = f"no word that {who} could register"
            raise RegistryError(f"{self.key}={name}: {problem}; use letters, digits and _")
        if not self._fits(value):
            problem = f"{who} registers a {type(value).__name__} under this word"
            raise RegistryError(f"{self.key}={name}: {problem}; use {self._needs}")
        if problem := self._misfit(value):
            raise RegistryError(f"{self.key}={name}: {who} gives {problem}")

    def _misfit(self, value: Any) -> str | None:
        arguments = self._arguments(value)
        if is_dataclass(value):
            return misfit(value, arguments)
        problem = wrong_call(value, arguments[""]) if "" in arguments else None
        return problem and f"{value.__name__}(): {problem}"


class Later:
    """A function named as module:function, which is imported when it is first called, since its module needs torch."""

    def __init__(self, path: str) -> None:
        self._module, _, self._name = path.partition(":")

    def __call__(self, *arguments: Any, **words: Any) -> Any:
        return getattr(import_module(self._module), self._name)(*arguments, **words)


def misfit(value: Any, arguments: Mapping[str, int]) -> str | None:
    """Return what is wrong with a field of a dataclass and how to write it, or None.

    arguments: how many each function is called with.
    """
    for field in fields(value):
        given, kind = getattr(value, field.name), str(field.type)
        if given is None and kind.endswith("| None"):
            continue
        problem = _wrong(given, kind, arguments.get(field.name))
        if problem is None and given == () != field.default:
            problem = "empty; name one or more"
        if problem:
            return f"{field.name}={_shown(given)}: {problem}"
    return None


def wrong_call(function: Callable[..., Any], num_arguments: int) -> str | None:
    """Return why a function can not be called with so many arguments; None if it can, or if it does not tell."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function in C may have none
        return None
    try:
        signature.bind(*[None] * num_arguments)
    except TypeError as error:
        return f"can not be called with {num_arguments} arguments ({error}); docs/extending.md says which"
    return None


def _wrong(given: Any, kind: str, num_arguments: int | None) -> str | None:
    if kind.startswith("Callable"):
        if not callable(given):
            return "no function; give one"
        return None if num_arguments is None else wrong_call(given, num_arguments)
    if kind.startswith("tuple[str"):
        is_words = isinstance(given, tuple | list) and all(isinstance(one, str) for one in given)
        return None if is_words else "no tuple of words; write ('one',), with a comma"
    if kind.startswith("Mapping[str, Any]"):
        return None if is_plain(given, dict) else "no dict of plain values; use what YAML can hold"
    for name, expected in (("bool", bool), ("int", int), ("str", str)):
        if kind.removesuffix(" | None") == name and not isinstance(given, expected):
            return f"no {name}; give one"
    return None


def is_plain(value: object, kind: type = object) -> bool:
    """Tell whether a value of this kind consists of what a run's config.yaml can hold and give back."""
    if not isinstance(value, kind):
        return False
    if isinstance(value, Mapping):
        held = cast(Mapping[Any, Any], value)
        return all(isinstance(key, str) and is_plain(each) for key, each in held.items())
    if isinstance(value, list | tuple):
        return all(is_plain(each) for each in cast(list[Any], value))
    return type(value) in PLAIN and not (isinstance(value, float) and math.isnan(value))


def _shown(value: object) -> str:
    named = getattr(value, "__name__", None)
    return f"{named}()" if named and callable(value) else repr(value)[:80]
