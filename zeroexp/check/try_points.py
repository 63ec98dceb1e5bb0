"""Try points before a rank starts: their models, their data, and the code of others that they name."""

from __future__ import annotations

from collections.abc import Sequence

from zeroexp.check.try_data import check_data
from zeroexp.check.try_model import check_model
from zeroexp.check.try_strategy import refused_strategy
from zeroexp.config.keys import Config


def try_points(configs: Sequence[Config]) -> list[str | None]:
    """Return for each point why it is skipped, or None. Raises ConfigError for one that ends the sweep."""
    refusals: list[str | None] = []
    for config in configs:
        check_model(config)
        check_data(config)
        refusals.append(refused_strategy(config))
    return refusals
