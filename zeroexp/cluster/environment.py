"""Record the influences on a run's numbers besides its config: versions, code, machine, command line."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import socket
import subprocess
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zeroexp.plan.machines import processor_name

LIBRARIES = ("zeroexp", "torch", "transformers", "datasets", "hydra-core", "mlflow")


def describe_environment(arguments: Sequence[str], device: str) -> dict[str, Any]:
    """Return the content of environment.json; `device` is the requested one (auto, cpu, cuda)."""
    return {
        "command": shlex.join(["zeroexp", *arguments]),
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "device": device,
        "machine": {
            "platform": platform.platform(),
            "processor": processor_name(),
            "num_cpus": os.cpu_count(),
        },
        "git": _git(),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _versions() -> dict[str, str]:
    versions: dict[str, str] = dict.fromkeys(LIBRARIES, "not installed")  # as zeroexp of a checkout
    for library in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            versions[library] = version(library)
    return versions


@cache
def _git() -> dict[str, Any] | None:
    """Return the commit of the running code, and whether files differ from it; None outside of a checkout."""
    if _ask_git("ls-files", "--error-unmatch", __file__) is None:
        return None
    dirty = bool(_ask_git("status", "--porcelain"))
    return {"commit": _ask_git("rev-parse", "HEAD"), "dirty": dirty}


def _ask_git(*words: str) -> str | None:
    """Return git's output; None if the command fails or git is missing."""
    code = Path(__file__).resolve().parents[2]
    try:
        answer = subprocess.run(
            ["git", "-C", code, *words], capture_output=True, encoding="utf-8", errors="replace"
        )
    except FileNotFoundError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
