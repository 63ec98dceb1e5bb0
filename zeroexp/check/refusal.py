"""Refuse a config in one line, key=value: what is wrong; what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, cast

from zeroexp.config.keys import KEYS, Config, ConfigError
from zeroexp.process.server_address import without_password
from zeroexp.registry.did_you_mean import suggest_key

# A key, or key=value where the config holds more than what is wrong; what is wrong; what to do.
Refusal = tuple[str, str, str]
# Yields what it refuses of a config; what comes after the first refusal need not make sense.
Rule = Callable[[Config], Iterator[Refusal]]


def rules_of(module: ModuleType) -> list[Rule]:
    """Return the rules of a file, in its order: the functions whose names begin with check_."""
    return [each for name, each in vars(module).items() if name.startswith("check_")]


def require(config: Config, rules: Iterable[Rule], error: type[ConfigError]) -> None:
    """Raise the error with the line of the first refusal of any rule."""
    for rule in rules:
        for key, problem, remedy in rule(config):
            named = key if "=" in key else f"{key}={as_typed(value_of(config, key))}"
            raise error(f"{named}: {problem}; {remedy}")


def value_of(config: Config, key: str, named_by: str = "") -> Any:
    """Return the value of a dotted key; a group's value is its name. Raises ConfigError for an unknown key.

    named_by: the key in whose value it stands.
    """
    value: Any = config
    for part in key.split("."):
        if isinstance(value, dict) and part in value:
            value = cast(dict[str, Any], value)[part]
        elif hasattr(value, part):
            value = getattr(value, part)
        else:
            shown = f"{named_by}: {key}" if named_by else key
            raise ConfigError(f"{shown}: no such key; {suggest_key(key, KEYS)}")
    return getattr(value, "name", value)


def as_typed(value: object) -> str:
    """Return the value as the user would type it on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def refuse_password(key: str, text: str) -> None:
    """Raise ConfigError, without showing the password, if `text` holds an address with one."""
    if without_password(text) != text:
        problem = "holds a password, which would stand in files, logs and the store"
        remedy = "give it in the environment: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        remedy += " for a server, MLFLOW_TRACKING_URI (and tracking.uri=null) for a database"
        raise ConfigError(f"{key}: {problem}; {remedy}")
