"""Refuse wrong configurations before any rank starts, in one line with key, value and remedy.

refusal.py             one line: key=value: problem; remedy; and which functions of a file are rules
rules_of_one_key.py    rules whose breach ends a whole sweep (ConfigError)
rules_strategy.py, rules_data.py, rules_cluster.py, rules_machine.py, without_effect.py
                       rules about several keys, whose breach skips the point (UndefinedCombination)
witnesses.py           where each key of training shows
sweep_points.py        the points of a sweep, each checked by these rules
try_points.py          in one process, before a rank starts: try_model.py builds the model without memory,
                       try_data.py packs the data, try_strategy.py runs code of others once
"""

from __future__ import annotations

from zeroexp.check import (
    rules_cluster,
    rules_data,
    rules_machine,
    rules_of_one_key,
    rules_strategy,
    without_effect,
)
from zeroexp.check.refusal import require, rules_of
from zeroexp.config.keys import Config, ConfigError, UndefinedCombination


def require_values(config: Config) -> None:
    """Raise ConfigError for a missing value, before anything reads the config."""
    require(config, [rules_of_one_key.check_all_given], ConfigError)


def check(config: Config, *, on_paper: bool = False) -> None:
    """Raise ConfigError, or its subclass UndefinedCombination, for the first rule that the config breaks.

    on_paper: nothing runs, so this machine does not have to be able to.
    """
    require(config, rules_of(rules_of_one_key), ConfigError)
    of_machine = () if on_paper else (rules_machine,)
    for module in (rules_strategy, rules_data, rules_cluster, *of_machine, without_effect):
        require(config, rules_of(module), UndefinedCombination)
