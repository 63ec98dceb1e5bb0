"""Refuse arguments of the command line that Hydra would answer with a traceback, ignore, or write down."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from zeroexp.check.refusal import refuse_password
from zeroexp.config.keys import KEYS, ConfigError
from zeroexp.registry.did_you_mean import suggest_nearest

CONFIG_DIR = ("--config-dir", "-cd")  # a folder of more YAML files
# These flags of Hydra print something and run nothing.
ONLY_SHOW = ("--cfg", "-c", "--info", "-i", "--hydra-help", "--shell-completion", "-sc")
# Keys whose value is text, and the groups whose option has a name.
TEXT_KEYS = frozenset(key for key, item in KEYS.items() if item.type in ("str", "str | None"))
TEXT_KEYS |= {key.removesuffix(".name") for key in KEYS if key.endswith(".name")}
_SHOWN = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
# Flags that Hydra knows, each with the values it may have: () means none, None means any.
FLAGS: dict[str, Sequence[str] | None] = {
    **dict.fromkeys(("--cfg", "-c"), ("job", "hydra", "all")),
    **dict.fromkeys(("--info", "-i"), _SHOWN),
    **dict.fromkeys(("--package", "-p", "--config-name", "-cn", "--config-path", "-cp")),
    **dict.fromkeys((*CONFIG_DIR, "--rerun", "--shell-completion", "-sc")),
    **dict.fromkeys(("--hydra-help", "--resolve"), ()),
}
WITHOUT_VALUE = ("--info", "-i")  # they may have one
# One value or several, without quotes, brackets and functions; and what Hydra takes for another thing than text.
SIMPLE = re.compile(r"[\w.+,-]+")
NO_TEXT = re.compile(r"[-+]?[\d_.]+(e[-+]?[\d_]+)?|[-+]?(inf|nan)|true|false", re.IGNORECASE)
# The one function of Hydra's whose brackets hold patterns, and no list: strategy=glob([zero*,ddp]).
GLOB = re.compile(r"glob\([^()]*\)")
# Hydra's own settings that have an effect here. Folders are ours: outputs/<sweep>/<run>.
HYDRAS = ("hydra/sweeper", "hydra.sweeper", "hydra.searchpath")


def only_shows(arguments: Sequence[str]) -> bool:
    return any(argument.partition("=")[0] in ONLY_SHOW for argument in arguments)


def refuse_arguments(arguments: Sequence[str]) -> None:
    """Raise ConfigError for passwords, flags that can not work with our sweeps, and idle settings."""
    for argument in arguments:
        # How Python keeps bytes that are no text in this locale.
        if any("\udc80" <= letter <= "\udcff" for letter in argument):
            raise ConfigError(f"{argument}: not in the encoding of this locale; set LC_ALL=C.UTF-8")
        refuse_password("tracking.uri" if "tracking.uri" in argument else "a word", argument)
    if {"-sc", "--shell-completion"} & set(arguments) and len(arguments) > 2:
        raise ConfigError("-sc: stands alone; use zeroexp -sc install=bash")
    _refuse_flags(arguments)
    for argument in arguments:
        _refuse_idle(argument)
        _refuse_several_studies(argument)
        _refuse_merged_options(argument)


def quoted_override(argument: str) -> str:
    """Quote values of a key that is text where Hydra reads a number or a truth: 1.10 is no 1.1 in data.subset."""
    key, equals, value = argument.partition("=")
    if not equals or not SIMPLE.fullmatch(value) or key.lstrip("+") not in TEXT_KEYS:
        return argument
    parts = [f"'{one}'" if NO_TEXT.fullmatch(one) else one for one in value.split(",")]
    return f"{key}={','.join(parts)}"


def flags_last(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with flags behind the settings, since Hydra's parser takes settings in one place only."""
    flags, settings = _flags_and_settings(arguments)
    return [*settings, *(argument for flag in flags for argument in flag)]


def _flags_and_settings(arguments: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """Return the flags, each with its value where that is an argument of its own, and all other arguments."""
    flags: list[list[str]] = []
    settings: list[str] = []
    left = list(arguments)
    while left:
        argument = left.pop(0)
        if not argument.startswith("-"):
            settings.append(argument)
            continue
        flags.append([argument])
        name, equals, _ = argument.partition("=")
        if FLAGS.get(name) != () and not equals and left and not left[0].startswith("-"):
            flags[-1].append(left.pop(0))
    return flags, settings


def _refuse_flags(arguments: Sequence[str]) -> None:
    """Refuse flags that Hydra would answer with its usage, or that would do nothing here."""
    num_folders = 0
    for argument, *after in _flags_and_settings(arguments)[0]:
        flag, _, value = argument.partition("=")
        if flag not in FLAGS:
            raise ConfigError(f"{flag}: unknown flag; {suggest_nearest(flag, FLAGS)}")
        value, allowed = after[0] if after else value, FLAGS[flag]
        if not value and flag not in WITHOUT_VALUE and allowed != ():
            raise ConfigError(f"{flag}: no value; give it one")
        if flag in CONFIG_DIR and not os.path.isdir(value):
            home = value.startswith("~")  # behind =, some shells leave it
            remedy = f"use {flag} {os.path.expanduser(value)}" if home else "use one that exists"
            raise ConfigError(f"{flag} {value}: no such folder; {remedy}")
        num_folders += flag in CONFIG_DIR
        if num_folders > 1:
            remedy = f"add hydra.searchpath=[{value}] instead"
            raise ConfigError(f"{flag} {value}: Hydra reads one such folder, the last; {remedy}")
        if value and allowed is not None and value not in allowed:
            remedy = suggest_nearest(value, allowed) if allowed else "it takes none"
            raise ConfigError(f"{flag} {value}: unknown value; {remedy}")


def _refuse_several_studies(argument: str) -> None:
    """A study brings its own sweep, which Hydra expands for one study only."""
    key, _, value = argument.lstrip("+").partition("=")
    if key == "study" and any(sign in value for sign in ",(["):
        problem = "one study at a time, since each is a sweep of its own"
        raise ConfigError(f"{argument}: {problem}; use one command for each")


def _refuse_merged_options(argument: str) -> None:
    """Refuse a list of options of a group: Hydra merges them into one point, in which the last wins."""
    key, _, value = argument.lstrip("+").partition("=")
    listed = GLOB.sub("", value)
    if f"{key}.name" in KEYS and "[" in listed and "," in listed:
        options = value.replace("[", "").replace("]", "")
        raise ConfigError(f"{argument}: one option a point; sweep them as {key}={options}")


def _refuse_idle(argument: str) -> None:
    if argument.startswith("~"):
        raise ConfigError(
            f"{argument}: no key can be left out; set it to another value, or to null"
        )
    key = argument.lstrip("+").partition("=")[0]
    if key.startswith(("hydra.", "hydra/")) and not key.startswith(HYDRAS):
        problem = "no effect, since every run has the folder outputs/<sweep>/<run>"
        raise ConfigError(
            f"{argument}: {problem}; use outputs=..., study.name=..., or leave it out"
        )
