"""Rules about words that end in a batch file, where Slurm would refuse them after the submission, or read others."""

from __future__ import annotations

import re

from zeroexp.check.refusal import refuse_key, value_of
from zeroexp.config.keys import Config

NAME = re.compile(r"\w[\w.,+@:-]{0,199}")
FEATURES = re.compile(r"[\w(\[][\w.,+@:*&|()\[\]!-]{0,199}")  # man sbatch, --constraint
OPTION = re.compile(r"[a-zA-Z][\w-]*")


def check_names(config: Config) -> None:
    for name in ("partition", "account", "qos", "constraint"):
        key, pattern = f"cluster.slurm.{name}", FEATURES if name == "constraint" else NAME
        if (value := value_of(config, key)) is not None and not pattern.fullmatch(value):
            refuse_key(key, value[:100], "no name that Slurm could have", "use the site's, or null")


def check_sbatch_options(config: Config) -> None:
    for name, value in config.cluster.slurm.sbatch.items():
        key = f"cluster.slurm.sbatch.{name}"
        if not OPTION.fullmatch(str(name)) or isinstance(value, dict | list):
            remedy = "use +cluster.slurm.sbatch.reservation=mine"
            refuse_key(key, value, "no option of sbatch with one value", remedy)
        if "\n" in str(value):
            refuse_key(key, repr(value), "more than one line", "use one line")


RULES = (check_names, check_sbatch_options)
