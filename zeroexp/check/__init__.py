"""Refuse wrong configurations before any rank starts, in one line with key, value and remedy.

refusal.py             one line: key=value: problem; remedy
rules_of_one_key.py    rules whose breach ends a whole sweep (ConfigError)
rules_strategy.py, rules_data.py, rules_batch.py, without_effect.py
                       rules about several keys, whose breach skips the point (UndefinedCombination)
sweep_points.py        the points of a sweep, each checked by these rules
readable.py            can the points read their files, and find their names on the hub?
try_model.py, try_data.py, try_strategy.py
                       the model is built without memory, the data are packed, code of others runs once
"""

from __future__ import annotations

from zeroexp.check import (
    rules_batch,
    rules_data,
    rules_of_one_key,
    rules_strategy,
    without_effect,
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
        *without_effect.RULES,
        *machine,
    )
    for rule in (*rules_of_one_key.RULES, *several):
        rule(config)
