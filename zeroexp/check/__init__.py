"""Refuse wrong configurations before any rank starts, in one line with key, value and remedy.

`single` holds rules about one key, whose breach ends a whole sweep (ConfigError). `strategy`, `data` and `fit` hold
rules about several keys, whose breach skips the point (UndefinedCombination). `inputs` checks that the remaining points
can read their inputs. No torch.
"""

from __future__ import annotations

from zeroexp.check import data, fit, single, strategy
from zeroexp.config import Config


def check(config: Config, *, on_paper: bool = False) -> None:
    """Raise ConfigError, or its subclass UndefinedCombination, for the first rule that the config breaks.

    on_paper: nothing runs, so this machine does not have to be able to.
    """
    machine = () if on_paper else fit.MACHINE
    for rule in (*single.RULES, *strategy.RULES, *data.RULES, *fit.RULES, *machine):
        rule(config)
