"""What tells the points of a sweep apart, as the first columns of its table. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zeroexp.tracking.run import Run

ABSENT = "–"
LONGEST = 24  # characters of a value; the end of a path says more than its beginning


@dataclass(frozen=True)
class Column:
    name: str
    unit: str
    value: Callable[[Run], str]
    left: bool = False  # words are aligned left, numbers right

    def differs(self, runs: Sequence[Run]) -> bool:
        return len({self.value(run) for run in runs}) > 1

    def is_known(self, run: Run) -> bool:
        return self.value(run) != ABSENT


def point_columns(runs: Sequence[Run]) -> list[Column]:
    """Return strategy, implementation, the settings that tell points with equal ones apart, and ranks."""

    def setting(key: str) -> Column:
        name = column_name(key, keys)
        return Column(name, "", lambda run: setting_text(run.config.get(key, ABSENT)), left=True)

    keys = distinguishing_keys(runs)
    return [
        Column("strategy", "", lambda run: run.strategy, left=True),
        Column("implementation", "", lambda run: run.implementation, left=True),
        *map(setting, keys),
        Column("ranks", "", lambda run: str(run.world_size)),
    ]


def distinguishing_keys(runs: Sequence[Run]) -> list[str]:
    """Return the settings that differ between runs with equal strategy, implementation and world size.

    If the choice of a group (model, data) differs, it replaces all settings that follow from it.
    """
    alike: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        alike.setdefault((run.label, run.world_size), []).append(run)
    groups = list(alike.values())
    keys = dict.fromkeys(key for run in runs for key in run.config)
    differ = [key for key in keys if any(len({r.config.get(key) for r in g}) > 1 for g in groups)]
    return [
        key
        for key in differ
        if (choice := _choice(key)) == key
        or choice not in differ
        or not all(_follows(key, choice, group) for group in groups)
    ]


def column_name(key: str, keys: Sequence[str]) -> str:
    """Shorten model.name to model and data.seq_len to seq_len; keep the full key if two short names are equal."""
    short = [_short(other) for other in keys]
    return _short(key) if short.count(_short(key)) == 1 else key


def setting_text(value: str) -> str:
    if "." in value or "e" in value:
        with contextlib.suppress(ValueError):
            return format(float(value), ".6g")
    return value if len(value) <= LONGEST else "…" + value[1 - LONGEST :]


def _choice(key: str) -> str:
    """Return the key of the choice that sets this setting; the precision group sets a strategy's dtypes."""
    group = key.partition(".")[0]
    if group == "strategy" and key.endswith(".dtype"):
        group = "precision"
    return f"{group}.name"


def _follows(key: str, choice: str, runs: Sequence[Run]) -> bool:
    pairs = {(run.config.get(choice), run.config.get(key)) for run in runs}
    return len(pairs) == len({option for option, _ in pairs})


def _short(key: str) -> str:
    return key.removesuffix(".name").rpartition(".")[2]
