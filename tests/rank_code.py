"""What ranks of the tests' one local cluster do: the function that their job's folder names, or a whole real run.

The server imports the function's module with the first job that names it.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from types import ModuleType

from zeroexp.cluster.local import RANK_MAIN
from zeroexp.config.keys import Config
from zeroexp.run import rank

MAIN = f"{__name__}:main"
_FILE = "code_of_ranks"


def choose(folder: Path, function: str) -> None:
    """The ranks of this job call `function`, given as module:name."""
    (folder / _FILE).write_text(function)


def prepare(folder: Path) -> None:
    """In the server."""
    _module(folder)[0].prepare(folder)


def import_for(config: Config) -> None:
    """In the server, before it tries points."""
    rank.import_for(config)


def main(folder: Path, *, device: str) -> None:
    """In every rank."""
    module, name = _module(folder)
    getattr(module, name)(folder, device=device)


def add_rehearsal(folder: Path, *, device: str) -> None:
    """In a fork of the server, when the ranks have ended: longer than any test waits."""
    time.sleep(1000)


def _module(folder: Path) -> tuple[ModuleType, str]:
    file = folder / _FILE
    function = file.read_text() if file.exists() else RANK_MAIN
    module, _, name = function.partition(":")
    return importlib.import_module(module), name
