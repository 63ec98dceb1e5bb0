"""Code that others add: the modules of `plugins=[...]`, the words they register, and those words' own settings.

A module is imported in the command before Hydra composes, so that its words are options too, and again by every rank.
It is looked for as Python does, then in the folder from which the command was given.
"""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from zeroexp.config.data_kinds import DATA
from zeroexp.config.engines import ENGINES
from zeroexp.config.families import MODELS
from zeroexp.config.keys import Config, ConfigError
from zeroexp.config.optimizer import OPTIMIZERS
from zeroexp.cut.layout import LAYOUTS
from zeroexp.cut.owners import OWNERS
from zeroexp.cut.stage import STAGES
from zeroexp.registry import MODULES_OF_OTHERS, Registry

NAMED = re.compile(r"[^\s\[\],'\"()]+")
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
# What each key of the config may name; two registries of one key share its words.
REGISTRIES: dict[str, tuple[Registry[Any], ...]] = {
    "model.family": (MODELS,),
    "data.kind": (DATA,),
    "strategy.name": (STAGES,),
    "strategy.implementation": (LAYOUTS, ENGINES),
    "strategy.owners": (OWNERS,),
    "optimizer.name": (OPTIMIZERS,),
}
# The groups of the config whose word of this key may have settings of its own.
WITH_SETTINGS = {
    "model": "family",
    "data": "kind",
    "strategy": "implementation",
    "optimizer": "name",
}
# The groups whose options a registered word is as well, with the key that it gives.
AS_OPTION = {"model": "family", "data": "kind", "strategy": "name", "optimizer": "name"}


def load(modules: Sequence[str], folder: Path | None = None) -> None:
    """Import plugins. folder: where the command was given. Raises ConfigError in one line."""
    folder = folder or Path.cwd()
    if modules:
        add_import_folder(folder)
    for name in modules:
        if not MODULE.fullmatch(name) or name.endswith(".py"):
            remedy = "write mine for mine.py, package.mine for mine.py in the folder package"
            raise ConfigError(f"plugins=[{name}]: no name of a module; {remedy}")
        MODULES_OF_OTHERS.add(name)
        try:
            importlib.import_module(name)
        except ConfigError as error:
            raise ConfigError(f"plugins=[{name}]: {error}") from error
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"plugins=[{name}]: {_describe_failure(name, error, folder)}"
            ) from error


def add_import_folder(folder: Path) -> None:
    """Let Python look for modules in this folder too, after all other places."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def blame_plugin(error: BaseException) -> str | None:
    """Return one line for an error that code of others has raised or let through; None for one of ours."""
    others = {name.partition(".")[0] for name in MODULES_OF_OTHERS}
    frames = [
        (frame.f_globals.get("__name__", ""), line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    for name, line in reversed(frames):
        if name.partition(".")[0] in others:
            message = " ".join(f"{type(error).__name__}: {error}".split())
            return f"module {name}: raised {message} at line {line}; repair it, or leave it out"
    return None


def _describe_failure(name: str, error: BaseException, folder: Path) -> str:
    missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
    if missing and (name == missing or name.startswith(f"{missing}.")):
        remedy = "install it, or give the command in the folder that holds it"
        return f"no module {missing} is installed or in {folder}; {remedy}"
    line = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(f"{type(error).__name__}: {error}".split())
    where = f"{Path(line.filename).name}, line {line.lineno}"
    return f"can not be imported ({message}, at {where}); repair it, or leave it out"


def modules_named_in(arguments: Sequence[str]) -> list[str]:
    """Return the modules that the command line names with `plugins=`. Raises ConfigError where it says that twice."""
    settings = [each for each in arguments if each.lstrip("+").partition("=")[0] == "plugins"]
    modules = [name for each in settings for name in NAMED.findall(each.partition("=")[2])]
    if len(settings) > 1:
        problem, remedy = "said twice, and Hydra takes the last", f"use plugins={','.join(modules)}"
        raise ConfigError(f"{settings[-1]}: {problem}; {remedy}")
    return modules


def plugins_as_list(word: str) -> str:
    """Return `plugins=a,b`, which Hydra would sweep, as the list that it means; every other word as it is."""
    key, equals, value = word.partition("=")
    plain = key.lstrip("+") == "plugins" and equals and re.fullmatch(r"[\w.,]+", value)
    return f"{key}=[{value}]" if plain else word


def with_settings(config: Config) -> Config:
    """Return the config with the defaults of its words' own settings."""
    changed: dict[str, Any] = {}
    for group, key in WITH_SETTINGS.items():
        section = getattr(config, group)
        defaults = settings_of_word(f"{group}.{key}", getattr(section, key))
        filled = {**deepcopy(dict(defaults)), **section.settings}
        changed[group] = replace(section, settings=filled)
    return replace(config, **changed)


def settings_of_word(key: str, word: str) -> Mapping[str, Any]:
    """Return the own settings of a word of this key, with their defaults."""
    for registry in REGISTRIES[key]:
        if word in registry:
            return getattr(registry[word], "settings", {})
    return {}


def settings_of_group(group: str) -> list[str]:
    """Return the own settings that any word of this group has."""
    key = f"{group}.{WITH_SETTINGS[group]}"
    words = (word for registry in REGISTRIES[key] for word in registry)
    return sorted({name for word in words for name in settings_of_word(key, word)})


def settings_of_plugins() -> Iterator[tuple[str, str, Any]]:
    """Yield (key, word, default) of every setting that a word of others has."""
    for group, key in WITH_SETTINGS.items():
        registries = REGISTRIES[f"{group}.{key}"]
        for word in (name for names in registries for name in names if name not in names.own):
            for name, default in settings_of_word(f"{group}.{key}", word).items():
                yield f"{group}.settings.{name}", f"{group}.{key}={word}", default


def names_as_options(group: str) -> list[str]:
    """Return the words that are options of a group of the config without a YAML: those of others, and our names."""
    if group not in AS_OPTION:
        return []
    (registry,) = REGISTRIES[f"{group}.{AS_OPTION[group]}"]
    return [name for name in registry if AS_OPTION[group] == "name" or name not in registry.own]


def options_named_in(arguments: Sequence[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (group, name, values) of every option on the command line that a registered word is by itself."""
    for argument in arguments:
        group, _, value = argument.lstrip("+").partition("=")
        for name in set(re.findall(r"\w+", value)) & set(names_as_options(group)):
            yield group, name, _option(group, name)


def _option(group: str, name: str) -> dict[str, Any]:
    (registry,) = REGISTRIES[f"{group}.{AS_OPTION[group]}"]
    value = registry[name]
    if group == "strategy":
        rows = (value.parameters, value.gradients, value.optimizer)
        dtypes = ("compute", "reduce", "master")
        kinds = ("parameters", "gradients", "optimizer")
        return {"name": name} | {
            kind: {"placement": row.value, "dtype": f"${{precision.{dtype}}}"}
            for kind, row, dtype in zip(kinds, rows, dtypes, strict=True)
        }
    made = {"name": name, AS_OPTION[group]: name, "settings": deepcopy(dict(value.settings))}
    return made | ({} if group == "optimizer" else {"task": value.tasks[0]})
