"""A registry holds the code that one word of the config may name: ours, and what other packages and modules add.

Others add in a module that `plugins=[module]` names, and edit no file of ours:

    STAGES.add("mine", Stage(...))

A word has one meaning: whoever registers it a second time is refused, and both are named. Nothing here imports torch.

The functions of what is registered are compared with how we call them: else one that takes an argument too few would be
found by a rank, or by the report of a run that is over.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pkgutil import resolve_name
from typing import Any, ClassVar, Generic, TypeVar

from zeroexp.registry.did_you_mean import suggest_word
from zeroexp.registry.errors import ConfigError

Value = TypeVar("Value")
NAME = re.compile(r"[A-Za-z]\w*")
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
        """Return which function of the value can not be called as we do, and why; None if all can."""
        for name, num_arguments in self._arguments(value).items():
            function = getattr(value, name) if name else value
            if function is not None and (problem := _wrong_call(function, num_arguments)):
                shown = getattr(function, "__name__", None) or repr(function)[:80]
                return f"{name or 'the function'}={shown}: {problem}"
        return None


class Later:
    """A function named as module:function, which is imported when it is first called, since its module needs torch."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, *arguments: Any, **words: Any) -> Any:
        return resolve_name(self._path)(*arguments, **words)


def _wrong_call(function: Any, num_arguments: int) -> str | None:
    """Return why this can not be called with so many arguments; None if it can, or if it does not tell."""
    if not callable(function):
        return "no function; give one"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function in C may have none
        return None
    try:
        signature.bind(*[None] * num_arguments)
    except TypeError as error:
        return f"can not be called with {num_arguments} arguments ({error}); docs/extending.md says which"
    return None
