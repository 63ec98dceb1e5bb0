"""`zeroexp <verb>`: one command for every module of zeroexp that has one. A line without a verb is a run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# Verb -> the module that `python -m` runs, and what it does. The verb of a run, `run`, may be left out.
VERBS = {
    "plan": ("zeroexp.plan.__main__", "what every rank will hold and send, without running"),
    "report": ("zeroexp.report.__main__", "tables, verdicts and figures of sweeps"),
    "watch": ("zeroexp.watch", "follow or cancel a sweep on Slurm"),
    "sync": ("zeroexp.sync", "send the files of runs to MLflow"),
    "export": (
        "zeroexp.export",
        "a checkpoint for transformers, FSDP2 or DeepSpeed; a trace for Chakra",
    ),
    "import": ("zeroexp.foreign.__main__", "a checkpoint of FSDP2 or DeepSpeed, to go on from"),
    "calibrate": (
        "zeroexp.calibrate.__main__",
        "measure this machine, for the seconds that plans tell",
    ),
    "verify": ("zeroexp.verify.__main__", "whether a training loop of yours is right"),
}


def listed() -> str:
    """Return the verbs for the screen of help, in one line each."""
    rows = [f"  zeroexp {verb:9} {purpose}" for verb, (_, purpose) in VERBS.items()]
    return "\n".join([*rows, "  each has --help"])


def module_of(arguments: Sequence[str]) -> str | None:
    """Return the module of the verb that the line begins with; None for a run."""
    verb = arguments[0] if arguments else ""
    return VERBS[verb][0] if verb in VERBS else None


def run(module: str, arguments: Sequence[str]) -> int:
    """Run a verb's module with the arguments behind the verb, and return its exit code."""
    sys.argv = [f"zeroexp {arguments[0]}", *arguments[1:]]
    return importlib.import_module(module).main()
