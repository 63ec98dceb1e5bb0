"""`zeroexp` runs one experiment or a sweep: Hydra composes the points, zeroexp.cluster.sweep runs them."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

if (__name__ == "__main__" or sys.argv[0].endswith("/zeroexp")) and signal.getsignal(
    signal.SIGINT
) is signal.default_int_handler:
    # Imports take a second, and Ctrl-C in them should end this in silence; `main` listens to it in its own way.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import hydra
from hydra.core.config_store import ConfigStore

from zeroexp.check.sweep_points import Composed
from zeroexp.cluster.sweep import Sweep
from zeroexp.commandline import commands, help
from zeroexp.commandline.check_arguments import (
    flags_last,
    only_shows,
    quoted_override,
    refuse_arguments,
)
from zeroexp.commandline.mistakes import MISTAKES, explain, first_line
from zeroexp.config import plugins
from zeroexp.config.keys import Config, ConfigError
from zeroexp.process import safe_output, signals
from zeroexp.process.json_output import WORD, answer
from zeroexp.process.server_address import without_password
from zeroexp.tracking import failure

FAILED, REFUSED, INTERRUPTED = 1, 2, 130
NOT_UNDERSTOOD = "Hydra does not understand the line; write key=value and group=option"
OURS_WITH_VALUE = ("--rerun=", "--help=")
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
ONLY_LINUX = "ranks need Linux (pidfds, memfds, /proc); use a Linux machine, a container or a virtual machine"
# Hydra 1.3 asks for the version whose behaviour is meant, and later ones warn of the question.
BEHAVIOUR: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
# Hydra 1.4 wants to be told that what is stored may be there, as that of a plugin from an earlier line of a process.
REPLACES: dict[str, Any] = {} if BEHAVIOUR else {"replace": True}


def main() -> int:
    """Run the command line and return its exit code.

    0: all went well; 1: something failed; 2: the configuration was refused; 130: the user interrupted.
    """
    module, wants = commands.module_of(sys.argv[1:]), WORD in sys.argv[1:]
    code = commands.run(module, sys.argv[1:]) if module else answer(_sweep_or_explain)
    # A sweep whose log is lost has run all the same; an answer that is lost is none.
    return int(safe_output.has_lost_output() and (bool(module) or wants)) if code == 0 else code


def _sweep_or_explain(told: list[str] | None) -> int:
    """Run the line's sweep and return its exit code; `told`, where JSON is asked for, gets the results."""
    arguments = sys.argv[2:] if sys.argv[1:2] == ["run"] else sys.argv[1:]
    if sys.platform != "linux":
        print(f"zeroexp: {sys.platform}: {ONLY_LINUX}", file=sys.stderr)
        return REFUSED
    signals.handle_ctrl_c()
    with Sweep(arguments) as sweep:
        code = _code_of(sweep, arguments)
        if told is not None:
            told.append(sweep.as_json())
        return code


def _code_of(sweep: Sweep, arguments: list[str]) -> int:
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
    except BaseException as error:  # a plugin may raise anything
        if problem := plugins.blame_plugin(error):
            print(f"zeroexp: {problem}", file=sys.stderr)
            return REFUSED
        if not (problem := _explain_disk(error)):
            raise
        print(f"zeroexp: {problem}", file=sys.stderr)
        return FAILED


def _explain_disk(error: BaseException) -> str | None:
    if not isinstance(error, OSError) or error.errno not in OF_THE_DISK:
        return None
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}; make room, or choose another folder with outputs=..."


def _run(sweep: Sweep, arguments: list[str]) -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        problem = "the folder that you are in has been removed"
        raise ConfigError(f"{problem}; change to one that exists") from error
    plugins.load(plugins.modules_named_in(arguments))
    split = (a.split("=", 1) if a.startswith(OURS_WITH_VALUE) else [a] for a in arguments)
    arguments = [part for parts in split for part in parts]
    if answer := _help_or_version(arguments):
        print(answer)
    elif "--rerun" in arguments:
        if len(arguments) != 2 or arguments[0] != "--rerun":
            raise ConfigError("--rerun: needs one folder and nothing else; --rerun outputs/<sweep>")
        if not arguments[1] or not Path(arguments[1]).is_dir():  # "" would be the folder one is in
            raise ConfigError(f"--rerun {arguments[1]}: no such folder; use one that exists")
        sweep.rerun_unfinished(Path(arguments[-1]).resolve())
    else:
        compose(sweep, arguments)


def _help_or_version(arguments: Sequence[str]) -> str | None:
    """Return the help or version that the line asks for; None if it asks for neither."""
    if "--version" in arguments:
        return help.version()
    for flag in ("--help", "-h"):
        if flag in arguments:
            keys = arguments[arguments.index(flag) + 1 :]
            keys = [key for key in keys if not key.startswith("plugins=")]
            return "\n\n".join(
                help.about(key.partition("=")[0], _conf()) for key in keys
            ) or help.screen(_conf(), commands.listed())
    return None


class TakesPoints(Protocol):
    """`compose` hands the points of a command line to one of these: a sweep that runs them, or a plan."""

    @property
    def has_failures(self) -> bool: ...
    def run(self, batch: Sequence[Composed], /) -> list[Any]: ...


def store_schema() -> None:
    """Make the schema of conf/config.yaml known to Hydra, once in a process of many lines, as of tests."""
    store = ConfigStore.instance()
    if "schema.yaml" not in store.repo:
        store.store(name="schema", node=Config)


def compose(
    taker: TakesPoints, arguments: list[str], *, further: Sequence[str] = (), writes: bool = True
) -> None:
    """Have Hydra compose every point and hand them to `taker.run` through our launcher.

    further: arguments that no user may give. writes: False: the folders that a sweep needs are neither made nor tried.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors, and `explain` prints them
    store_schema()
    # Every run is a sweep (hydra.mode in conf/config.yaml); Hydra would refuse -m in the middle.
    arguments = [each for each in arguments if each not in ("-m", "--multirun")]
    arguments = [quoted_override(plugins.plugins_as_list(each)) for each in arguments]
    refuse_arguments(arguments)
    shows = only_shows(arguments)
    _know_plugins(arguments, os.environ.get("COMP_LINE", "").split() if shows else [])
    # Hydra reads hydra.mode last; without --multirun it would blame commas where another argument is wrong.
    ordered = flags_last([*arguments, *further])
    sys.argv[1:] = ordered if shows else ["--multirun", *ordered]

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
    _refuse_without_threads()
    start = hydra.main(config_path=str(_conf()), config_name="config", **BEHAVIOUR)
    try:
        with _printed_without_passwords() if shows else contextlib.nullcontext():
            start(run_points)()
    except Exception as error:
        is_own, is_told = error in raised, isinstance(error, (*MISTAKES, OSError))
        if (is_own and not is_told) or (is_told and not taker.has_failures):
            raise
        if not taker.has_failures:
            problem = f"{' '.join(arguments)}: {NOT_UNDERSTOOD} ({first_line(error)})"
            raise ConfigError(problem) from error
        # A later batch is refused, or the sweeper had no result to learn from; the table shows which points failed.
        print(f"zeroexp: {'' if is_own else 'hydra/sweeper: '}{first_line(error)}", file=sys.stderr)


def _refuse_without_threads() -> None:
    """Raise ConfigError where not even one thread or process can be started (`ulimit -u`)."""
    try:
        thread = threading.Thread(target=int)
        thread.start()
    except RuntimeError as error:
        remedy = failure.REMEDIES[errno.EAGAIN]
        raise ConfigError(f"no thread can be started: {error}; {remedy}") from error
    thread.join()


def _know_plugins(arguments: Sequence[str], completed: Sequence[str]) -> None:
    """Import the line's plugins, and store the options that they add for Hydra.

    completed: the line that a shell completes; it is offered every option, and nothing in it is refused.
    """
    if completed:
        with contextlib.suppress(ConfigError):
            plugins.load(plugins.modules_named_in(completed))
        arguments = [f"{g}={','.join(plugins.names_as_options(g))}" for g in plugins.AS_OPTION]
    else:
        plugins.load(plugins.modules_named_in(arguments))
    # Hydra merges a YAML file of the same name over what is stored (docs/extending.md), and warns that this ends.
    warnings.filterwarnings(
        "ignore", r"\s*'.*' is validated against ConfigStore schema", UserWarning
    )
    for group, name, values in plugins.options_named_in(arguments):
        if not (_conf() / group / f"{name}.yaml").exists():
            ConfigStore.instance().store(group=group, name=name, node=values, **REPLACES)


@contextlib.contextmanager
def _printed_without_passwords() -> Iterator[None]:
    """Print at the end what the block printed: a file or the environment may put a password into the config."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        print(without_password(printed.getvalue()), end="")


def _conf() -> Path:
    """Return the folder of YAML files: it lies inside an installed package, and beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


if __name__ == "__main__":
    sys.exit(main())
