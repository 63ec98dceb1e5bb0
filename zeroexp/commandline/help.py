"""Help: one screen for the command line, and one for each key and group, from the files that define them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, get_type_hints

from zeroexp.check.rules_of_one_key import choices_of_keys
from zeroexp.check.witnesses import WITNESSES
from zeroexp.config import plugins
from zeroexp.config.keys import KEYS, Config, ConfigError, default_of
from zeroexp.config.optimizer import OPTIMIZERS
from zeroexp.registry.did_you_mean import suggest_key

SCREEN = """\
zeroexp trains one model under every way of sharding its training state, and shows what each costs.

  zeroexp                                      one run, then its table
  zeroexp study=compare                        every stage, by hand and by torch
  zeroexp strategy=zero1,zero2 world_size=1,2  lists are swept, each with each
  zeroexp --rerun outputs/<sweep>              again what failed         --cfg job   every key and its value
{verbs}
Choose
{groups}
Set (zeroexp --help KEY says more, of every key)
{keys}
Exit codes: 0 all ran (undefined combinations are skipped with their reason), 1 a run failed or a claim does
not hold, 2 the configuration is wrong and nothing ran. --version; Hydra's own options: --hydra-help.
`eval "$(zeroexp -sc install=bash)"` lets the shell complete words."""

IMPORTANT = (
    *("world_size", "resume", "outputs", "data.seq_len", "data.global_batch_size", "data.path"),
    *("data.micro_batch_size", "model.weights", "strategy.implementation", "optimizer.lr"),
    *("train.steps", "checkpoint.every", "cluster.device", "tracking.uri"),
)
WIDTH = 108


def screen(conf: Path, verbs: str) -> str:
    """Return the help of the command line."""
    groups = [f"  {name:10} {_listed(_options(conf, name), 13)}" for name in _groups(conf)]
    keys = [f"  {key:24} {_short(key)}" for key in IMPORTANT]
    return SCREEN.format(verbs=verbs, groups="\n".join(groups), keys="\n".join(keys))


def about(key: str, conf: Path) -> str:
    """Return the help of one key or group. Raises ConfigError for an unknown one."""
    if key in _groups(conf):
        return "\n".join([f"{key}=<option>", *_about_options(conf, key), *_below(key)])
    if owners := [
        (word, value) for name, word, value in plugins.settings_of_plugins() if name == key
    ]:
        lines = [f"  a setting of {word}; default: {value}" for word, value in owners]
        return "\n".join([key, *lines])
    if key not in KEYS:
        if below := _below(key):
            return "\n".join([f"{key}: a group of keys", *below])
        remedy = suggest_key(key, [*KEYS, *_groups(conf)])
        raise ConfigError(f"--help {key}: no such key; {remedy}")
    default, bounds = default_of(KEYS[key]), KEYS[key].metadata
    lines = [f"{key}: {KEYS[key].type}", *_comment(key)]
    if choices := choices_of_keys().get(key):
        lines.append(f"one of {', '.join(choices)}")
    for bound, phrase in {"least": "at least", "above": "more than", "most": "at most"}.items():
        if bounds.get(bound) is not None:
            lines.append(f"{phrase} {bounds[bound]}")
    shown = "null" if default is None else default
    lines.append(f"default: {shown} (a group's file may set another)")
    if (meant := bounds.get("stands_for")) is not None:
        lines.append(f"null stands for {str(meant).lower()}")
    group, _, word = key.partition(".")
    readers = [name for name, kind in OPTIMIZERS.items() if word in kind.keys]
    if group == "optimizer" and readers:
        lines.append(f"read by {', '.join(readers)}")
    if key in WITNESSES:
        lines.append("shows in: {} ({})".format(*WITNESSES[key]))
    return "\n".join([lines[0], *(f"  {line}" for line in lines[1:]), *_below(key)])


def version() -> str:
    names = ("torch", "transformers", "hydra-core", "mlflow")
    used = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    return f"zeroexp {metadata.version('zeroexp')} ({used})"


def _groups(conf: Path) -> list[str]:
    return [item.name for item in fields(Config) if (conf / item.name).is_dir()]


def _options(conf: Path, group: str) -> list[str]:
    files = sorted(path.stem for path in (conf / group).glob("*.yaml"))
    return [*files, *(name for name in plugins.names_as_options(group) if name not in files)]


def _about_options(conf: Path, group: str) -> Iterator[str]:
    """The first comment of every option's file."""
    ours = [name for own in plugins.REGISTRIES.get(f"{group}.name", ()) for name in own.own]
    for name in _options(conf, group):
        if not (conf / group / f"{name}.yaml").exists():
            yield f"  {name:20} {'its own defaults' if name in ours else 'added by a plugin'}"
            continue
        lines = (conf / group / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        comment = next(
            (line[2:] for line in lines if line.startswith("# ") and "@" not in line), ""
        )
        yield f"  {name:20} {comment}"


def _below(key: str) -> list[str]:
    below = [name for name in KEYS if name.startswith(f"{key}.")]
    return ["", *(f"  {name:34} {_short(name)}" for name in below)] if below else []


def _short(key: str) -> str:
    comment = re.sub(r"[.;] .*", "", " ".join(_comment(key)))
    return _listed([comment or " | ".join(choices_of_keys().get(key, []))], 26)


def _listed(names: list[str], indent: int) -> str:
    """Names in one line, as many as fit."""
    text = ", ".join(names)
    most = WIDTH - indent
    return text if len(text) <= most else text[: most - 4].rpartition(" ")[0] + " ..."


def _comment(key: str) -> list[str]:
    """Return what the source of keys.py says beside or above a key."""
    group, _, name = key.rpartition(".")
    declared = rf"((?:^    # .*\n)*)^    {name}: .*?(?:  # (.*))?$"
    field = re.search(declared, _source_of(group), re.MULTILINE)
    assert field, key
    above, beside = field.groups()
    return [beside] if beside else re.findall(r"# (.*)", above)


@cache
def _source_of(group: str) -> str:
    """Return the source of the dataclass of a group, with those that it extends."""
    schema: Any = Config
    for part in filter(None, group.split(".")):
        schema = get_type_hints(schema)[part]
    return "".join(map(inspect.getsource, schema.__mro__[:-1]))
