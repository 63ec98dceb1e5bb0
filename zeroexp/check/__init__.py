"""Refuse wrong configurations before any rank starts, in one line with key, value and remedy.

`single` and `slurm` hold rules about one key, whose breach ends a whole sweep (ConfigError). `strategy`, `data`, `fit`
and `unused` hold rules about several keys, whose breach skips the point (UndefinedCombination). `inputs` checks that
the remaining points can read their inputs. No torch.
"""

from __future__ import annotations

from zeroexp.check import (
    rules_batch,
    rules_data,
    rules_of_one_key,
    rules_slurm,
    rules_strategy,
    unused,
)
from zeroexp.config.keys import Config


def require_values(config: Config) -> None:
    """Raise ConfigError for a missing value, before anything reads the config."""
    rules_of_one_key.check_all_given(config)


def check(config: Config, *, on_paper: bool = False) -> None:
    """Raise ConfigError, or its subclass UndefinedCombination, for the first rule that the config breaks.

    on_paper: nothing runs, so this machine does not have to be able to.
    """
    machine = () if on_paper else rules_batch.RULES_OF_MACHINE
    several = (
        *rules_strategy.RULES,
        *rules_data.RULES,
        *rules_batch.RULES,
        *unused.RULES,
        *machine,
    )
    for rule in (*rules_of_one_key.RULES, *rules_slurm.RULES, *several):
        rule(config)
