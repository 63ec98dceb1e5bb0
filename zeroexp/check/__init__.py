"""What is refused before any rank starts, in one line with key, value and remedy.

`single` are rules about one key, whose breach ends a whole sweep (ConfigError); `strategy`, `data` and `fit` are rules
about several, whose breach skips the point (UndefinedCombination); `inputs` looks for what the points that are left
will read. No torch.
"""

from __future__ import annotations

from zeroexp.check import data, fit, single, strategy
from zeroexp.config import Config


def check(config: Config) -> None:
    """Raises ConfigError, or its kind UndefinedCombination, for the first rule the config breaks."""
    for rule in (*single.RULES, *strategy.RULES, *data.RULES, *fit.RULES):
        rule(config)
