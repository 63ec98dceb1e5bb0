"""`python -m zeroexp` runs one experiment or a sweep: Hydra composes the points, zeroexp.cluster.sweep runs them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol, get_type_hints

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from zeroexp import interruption, output
from zeroexp.check.refusal import nearest, refuse_password
from zeroexp.cluster.sweep import Sweep
from zeroexp.config import Config, ConfigError

REFUSED, INTERRUPTED = 2, 130
ONLY_LINUX = "ranks need Linux (pidfds, memfds, /proc); use a Linux machine, a container or a virtual machine"
# Hydra 1.3 asks for the version whose behaviour is meant, and later ones warn of the question.
BEHAVIOUR: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
MISTAKES = (ConfigError, HydraException, OmegaConfBaseException, YAMLError)

# Other projects define the keys below these, so a user may add keys that our schema does not know.
FREE = ("model.hf_config.", "model.mlp.", "model.moe.", "cluster.slurm.sbatch.")

# ONLY_SHOW are flags of Hydra that print something and run nothing; REFUSED_FLAGS can not work with our sweeps.
ONLY_SHOW = ("--cfg", "-c", "--info", "-i", "--help", "-h", "--hydra-help", "--version")
REFUSED_FLAGS = {
    "--experimental-rerun": "use --rerun outputs/<sweep>",
    "--shell-completion": "leave it out",
    "-sc": "leave it out",
    "--run": "leave it out: every run is a sweep, of one point too",
    "-r": "leave it out: every run is a sweep, of one point too",
}

# Part of OmegaConf's message -> the remedy we print; the first match counts.
HINTS = {
    "to Integer": "use a whole number",
    "to Float": "use a number",
    "valid bool": "use true or false",
    "not in '": "`python -m zeroexp --cfg job` shows all keys",
    "is not a subclass": "set one of its keys, or choose a group's option",
    "": "zeroexp/config.py tells its type",
}


def main() -> int:
    """Run the command line and return its exit code.

    0: all went well; 1: something failed; 2: the configuration was refused; 130: the user interrupted.
    """
    arguments = sys.argv[1:]
    output.keep_going()
    if sys.platform != "linux":
        print(f"zeroexp: {sys.platform}: {ONLY_LINUX}", file=sys.stderr)
        return REFUSED
    interruption.listen()
    with Sweep(arguments) as sweep:
        try:
            _run(sweep, arguments)
            return sweep.conclude()
        except MISTAKES as error:
            print(f"zeroexp: {explain(error)}", file=sys.stderr)
            sweep.conclude()  # a sweeper that learns may have run points already
            return REFUSED
        except KeyboardInterrupt:
            sweep.conclude()
            return INTERRUPTED


def _run(sweep: Sweep, arguments: list[str]) -> None:
    if "--rerun" in arguments:
        if len(arguments) != 2 or not Path(arguments[-1]).is_dir():
            raise ConfigError("--rerun: needs one folder and nothing else; --rerun outputs/<sweep>")
        sweep.rerun(Path(arguments[-1]).resolve())
    else:
        compose(sweep, arguments)


class TakesPoints(Protocol):
    """What `compose` hands the points of a command line to: a sweep that runs them, or a plan."""

    @property
    def has_failures(self) -> bool: ...
    def run(self, batch: Sequence[tuple[Sequence[str], Mapping[str, Any]]], /) -> list[Any]: ...


def compose(taker: TakesPoints, arguments: list[str], *, writes: bool = True) -> None:
    """Have Hydra compose every point and hand them to `taker.run` through our launcher.

    writes: False: the folders that a sweep needs are neither made nor tried.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors, and `explain` prints them
    ConfigStore.instance().store(name="schema", node=Config)
    # Every run is a sweep (hydra.mode in conf/config.yaml); Hydra would refuse -m in the middle.
    words = [word for word in arguments if word not in ("-m", "--multirun")]
    _refuse_flags(words)
    # Hydra reads hydra.mode after all words; without --multirun it would blame commas where another word is wrong.
    sys.argv[1:] = (
        words
        if any(word.partition("=")[0] in ONLY_SHOW for word in words)
        else ["--multirun", *words]
    )

    raised: list[Exception] = []  # our own errors, which pass through Hydra

    def run_points(points: Any) -> Any:  # no method: Hydra asks for the function's module
        try:
            if not isinstance(points, list):
                raise ConfigError("hydra.mode, hydra/launcher: not to be changed; leave them out")
            return taker.run(points)
        except Exception as error:
            raised.append(error)
            raise

    run_points.writes = writes
    try:
        hydra.main(config_path=str(_conf()), config_name="config", **BEHAVIOUR)(run_points)()
    except Exception as error:
        if error in raised or not taker.has_failures:
            raise
        # The sweeper had no result to learn from; the table will show which points failed.
        print(f"zeroexp: hydra/sweeper: {_first_line(error)}", file=sys.stderr)


def _refuse_flags(words: list[str]) -> None:
    """Refuse passwords, which Hydra would write down, flags that would end in a traceback, and empty groups."""
    for word in words:
        refuse_password("tracking.uri" if "tracking.uri" in word else "a word", word)
    for flag, remedy in REFUSED_FLAGS.items():
        if flag in words:
            raise ConfigError(f"{flag}: not available; {remedy}")
    if "--resolve" in words and not any(word.partition("=")[0] in ONLY_SHOW for word in words):
        raise ConfigError("--resolve: has no effect alone; use --cfg job --resolve")
    groups = [item.name for item in fields(Config) if (_conf() / item.name).is_dir()]
    for word in words:
        key, equals, value = word.lstrip("+").partition("=")
        if equals and key in groups and value in ("null", "None", ""):
            options = sorted(path.stem for path in (_conf() / key).glob("*.yaml"))
            raise ConfigError(f"{word}: no option; use one of {', '.join(options)}")


def _conf() -> Path:
    """Return the folder of YAML files: it lies inside an installed package, and beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


# ---- explain a user's mistake in one line: key=value: what is wrong; what to do


def explain(error: Exception) -> str:
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_option(error)
    if isinstance(error, OverrideParseException):
        return f"{error.override}: {_first_line(error)}; write key=value, lists as key=[1,2]"
    text = str(error)
    if isinstance(error, ConfigError):  # our own text must not be parsed as Hydra's
        return text
    if match := re.search(r"use \+(\S+?)=(.*)", text):
        return _unknown_key(match[1], match[2])
    if match := re.search(r"full_key: (\S+)", f"{text}\n{error.__cause__}"):
        return _wrong_value(match[1], text, error.__cause__ or error)
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def _unknown_option(error: MissingConfigException) -> str:
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    options = [name for name in error.options or () if not name.startswith("_")]
    return f"{group}={option}: unknown option; {nearest(option, options)}"


def _unknown_key(key: str, value: str) -> str:
    if key.startswith(FREE):
        return f"{key}={value}: not there so far; use +{key}={value} to add it"
    close = get_close_matches(key, list(_keys(Config)), n=3, cutoff=0.6)
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{key}={value}: unknown key; {meant}`python -m zeroexp --cfg job` shows them all"


def _wrong_value(key: str, text: str, cause: BaseException) -> str:
    """Explain Hydra's `Error merging override key=value`; its cause holds what OmegaConf says of the value."""
    override = re.search(r"override \+*(\S+=.*)", text)
    said = _first_line(cause) if override else "; ".join(text.splitlines()[:2])
    remedy = next((hint for word, hint in HINTS.items() if word in said), HINTS[""])
    return f"{override[1] if override else key}: {said}; {remedy}"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _keys(schema: type, parent: str = "") -> Iterator[str]:
    """Yield every dotted key of the config, groups included."""
    hints = get_type_hints(schema)
    for item in fields(schema):
        yield parent + item.name
        if is_dataclass(hints[item.name]):
            yield from _keys(hints[item.name], f"{parent}{item.name}.")


if __name__ == "__main__":
    sys.exit(main())
