"""The folder of what can be made anew: packed data, and the helper that counts allocations, compiled."""

from __future__ import annotations

import os
from pathlib import Path

from zeroexp.config.keys import ConfigError


def cache_root() -> Path:
    """Return $ZEROEXP_CACHE, else zeroexp/ in the user's cache folder. Raises ConfigError for a user without a home."""
    if folder := os.environ.get("ZEROEXP_CACHE"):
        return Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zeroexp"
    except RuntimeError as error:
        problem = "not set, and this user has no home"
        raise ConfigError(f"ZEROEXP_CACHE: {problem}; set it to a folder that is yours") from error
