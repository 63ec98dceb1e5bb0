"""Refuse a point in one line, key=value: what is wrong; what to do."""

from __future__ import annotations

from typing import Any, NoReturn, cast

from zeroexp.config.keys import Config, ConfigError, UndefinedCombination
from zeroexp.process.reachable import without_password


def value_of(config: Config, key: str) -> Any:
    """Return the value of a dotted key; a group's value is its name. Raises ConfigError for an unknown key."""
    value: Any = config
    for part in key.split("."):
        if isinstance(value, dict) and part in value:
            value = cast(dict[str, Any], value)[part]
        elif hasattr(value, part):
            value = getattr(value, part)
        else:
            raise ConfigError(f"{key}: no such key; `zeroexp --cfg job` shows them all")
    return getattr(value, "name", value)


def refuse_key(key: str, value: object, problem: str, remedy: str) -> NoReturn:
    """Refuse a key that is wrong by itself: this ends a whole sweep before anything runs."""
    raise ConfigError(f"{key}={as_typed(value)}: {problem}; {remedy}")


def refuse_combination(config: Config, key: str, problem: str, remedy: str) -> NoReturn:
    """Refuse keys that are valid alone but mean nothing together: a sweep skips the point."""
    raise UndefinedCombination(f"{key}={as_typed(value_of(config, key))}: {problem}; {remedy}")


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
