"""Rules about words that end in a batch file, where Slurm would refuse them after the submission, or read others."""

from __future__ import annotations

import re

from zeroexp.check.refusal import value_of, wrong
from zeroexp.config import Config

NAME = re.compile(r"\w[\w.,+@:-]{0,199}")
FEATURES = re.compile(r"[\w(\[][\w.,+@:*&|()\[\]!-]{0,199}")  # man sbatch, --constraint
OPTION = re.compile(r"[a-zA-Z][\w-]*")


def names(config: Config) -> None:
    for name in ("partition", "account", "qos", "constraint"):
        key, pattern = f"cluster.slurm.{name}", FEATURES if name == "constraint" else NAME
        if (value := value_of(config, key)) is not None and not pattern.fullmatch(value):
            wrong(key, value[:100], "no name that Slurm could have", "use the site's, or null")


def options(config: Config) -> None:
    for name, value in config.cluster.slurm.sbatch.items():
        key = f"cluster.slurm.sbatch.{name}"
        if not OPTION.fullmatch(str(name)) or isinstance(value, dict | list):
            remedy = "use +cluster.slurm.sbatch.reservation=mine"
            wrong(key, value, "no option of sbatch with one value", remedy)
        if "\n" in str(value):
            wrong(key, repr(value), "more than one line", "use one line")


RULES = (names, options)
