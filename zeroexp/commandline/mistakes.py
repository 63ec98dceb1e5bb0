"""Explain a user's mistake, which our checks, Hydra or OmegaConf raised, in one line: key=value: problem; remedy."""

from __future__ import annotations

import re

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from zeroexp.config.keys import Config, ConfigError, fields_of
from zeroexp.config.plugins import WITH_SETTINGS, names_as_options, settings_of_group
from zeroexp.process.server_address import without_password
from zeroexp.registry.did_you_mean import suggest_key, suggest_nearest, suggest_word

MISTAKES = (ConfigError, HydraException, OmegaConfBaseException, YAMLError)

# Other projects define the keys below these, so a user may add keys that our schema does not know.
FREE = ("model.hf_config.", "model.mlp.", "model.moe.", "optimizer.kinds.", "cluster.slurm.sbatch.")
FREE = (*FREE, *(f"{group}.settings." for group in WITH_SETTINGS))

# Part of OmegaConf's message -> the remedy we print, with what was given for VALUE; the first match counts.
HINTS = {
    "to Integer": "use a whole number",
    "to Float": "use a number",
    "valid bool": "use true or false",
    "is not Optional": "give it a value",
    "is not a ListConfig": "use a list, as [VALUE]",
    "with ListConfig": "give the other of the two: a list as [a,b], a table as {key: value}",
    "to string": "use a text",
    "'typing.List[": "use lists in it, as {key: [1,2]}",
    "is not a subclass": "set one of its keys, or choose a group's option",
    "": "zeroexp/config/keys.py tells its type",
}

# How messages of Hydra's composer, and of Hydra 1.4, begin.
_OF_WHICH_WORD = re.compile(r"\A(Error when parsing index: |Error parsing override ).*\n")
# A file of a study whose keys are read as keys below study, and the first of them.
_BELOW_STUDY = re.compile(r"In '(study/\S+)': (?:.*\nKey '|Could not override '\w+@study\.)(\w+)'")
_KEY_OF_TABLE = re.compile(r"""(?<=[{,])\s*(['"]?)([^'"{}:,]+)\1\s*:""")  # as 'a.*': in {'a.*':1}


def explain(error: Exception) -> str:
    """Return the line for the user, without the passwords of any address in it."""
    return " ".join(without_password(_explain(error)).split("\n")).strip()


def _without_tokens(reason: str) -> str:
    """Say where Hydra's parser stopped, without the names of its tokens."""
    if reason.startswith("missing EQUAL"):
        return "it has no ="
    if stopped := re.search(r"input '(.+?)'( expecting |\Z)", reason):
        at = stopped[1]
        return "it ends too early" if at == "<EOF>" else f"Hydra can not read {at}"
    return reason


def first_line(error: BaseException) -> str:
    return without_password(str(error).partition("\n")[0])


def _explain(error: Exception) -> str:
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_option(error)
    if isinstance(error, OverrideParseException):
        reason = _OF_WHICH_WORD.sub("", str(error)).partition("\n")[0]
        if "LexerNoViableAlt" in reason:
            reason = "a character in it has a meaning of its own for Hydra"
            return f"{error.override}: {reason}; put the value in quotes: 'key=\"value\"'"
        spelled = _KEY_OF_TABLE.sub(_without_quotes, word := str(error.override))
        if spelled != word:
            reason = "Hydra takes no quotes around a key, and brackets behind a backslash alone"
            return f"{word}: {reason}; use '{spelled}'"
        remedy = "write key=value, lists as key=[1,2], brackets in a text as 'key=\"a[1]\"'"
        return f"{word}: {_without_tokens(reason)}; {remedy}"
    text = str(error)
    # Our own text must not be parsed as Hydra's.
    if isinstance(error, ConfigError):
        return text
    if (match := _BELOW_STUDY.search(text)) and match[2] in ("hydra", *vars(Config())):
        return (
            f"{match[1]}.yaml: {match[2]} is no key of a study; begin it with # @package _global_"
        )
    if match := re.search(r"use \+(\S+?)=(.*)", text):
        return _unknown_key(match[1], match[2])
    if match := re.search(r"full_key: (\S+)", f"{text}\n{error.__cause__}"):
        return _wrong_value(match[1], text, error.__cause__ or error)
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def _without_quotes(key: re.Match[str]) -> str:
    return re.sub(r"(?<!\\)([\[\]])", r"\\\1", key[2]) + ":"


def _unknown_option(error: MissingConfigException) -> str:
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    if not group:
        return f"--config-name {option}: no such file in conf/; leave it out, or give its folder by --config-dir"
    if group.startswith(("model/", "data/")):  # an id of the hub has a slash
        group, name = f"{group}/{option}".split("/", 1)
        return f"{group}={name}: unknown option; use {group}=hf {group}.path={name}"
    options = [name for name in error.options or () if not name.startswith("_")]
    options += [name for name in names_as_options(group) if name not in options]
    return f"{group}={option}: unknown option; {suggest_word(group, option, options)}"


def _unknown_key(key: str, value: str) -> str:
    group, _, setting = key.partition(".settings.")
    if setting and group in WITH_SETTINGS and setting not in (known := settings_of_group(group)):
        problem = f"no word of {group}.{WITH_SETTINGS[group]} has such a setting"
        remedy = suggest_nearest(setting, known) if known else "leave it out"
        return f"{key}={value}: {problem}; {remedy}"
    if f"{key}.".startswith(FREE):
        # Two pluses work beside a word that has it and one that lacks it.
        plus = "++" if setting else "+"
        return f"{key}={value}: not there so far; use {plus}{key}={value} to add it"
    return f"{key}={value}: unknown key; {suggest_key(key, (name for name, _ in fields_of()))}"


def _wrong_value(key: str, text: str, cause: BaseException) -> str:
    """Explain Hydra's `Error merging override key=value`; its cause holds what OmegaConf says of the value."""
    if file := re.search(r"In '(\S+)'(?s:.*) not in '", text):
        remedy = suggest_key(key, (name for name, _ in fields_of()))
        return f"{file[1]}.yaml: {key}: unknown key; {remedy}"
    override = re.search(r"override \+*(\S+=.*)", text)
    reason = first_line(cause) if override else "; ".join(text.splitlines()[:2])
    remedy = next((hint for word, hint in HINTS.items() if word in reason), HINTS[""])
    given = override[1] if override else key
    return f"{given}: {reason}; {remedy.replace('VALUE', given.partition('=')[2] or '…')}"
