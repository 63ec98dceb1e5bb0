"""What a user's mistake raises: one line that names key, value and remedy, and is shown without a traceback."""

from __future__ import annotations

from pathlib import Path


class ConfigError(ValueError):
    """A user's mistake: it ends a whole sweep before anything runs."""


class UndefinedCombination(ConfigError):
    """A point whose values are each valid but mean nothing together; a sweep skips it."""


class DamagedFile(ConfigError):
    """A file of a run that no writer of ours left so: a power cut leaves empty files, and zeros in others."""

    def __init__(self, path: Path, what: str, remedy: str = "restore or remove it") -> None:
        super().__init__(f"{path}: damaged, as by a power cut ({what}); {remedy}")
        self.line = f"{path}: damaged, as by a power cut ({what})"
