"""Which settings tell the points of a sweep apart, and how they are shown. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from zeroexp.tracking.run import Run

LONGEST = 24  # characters of a value; the end of a path says more than its beginning


def distinguishing_keys(runs: Sequence[Run]) -> list[str]:
    """Settings in which two runs differ that agree in strategy, implementation and world size.

    Of a group (model, data) that differs by its choice, the choice stands for all that follows from it.
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
    """model.name -> model, data.seq_len -> seq_len, and in full where two would be called alike."""
    short = [_short(other) for other in keys]
    return _short(key) if short.count(_short(key)) == 1 else key


def shown(value: str) -> str:
    if "." in value or "e" in value:
        with contextlib.suppress(ValueError):
            return format(float(value), ".6g")
    return value if len(value) <= LONGEST else "…" + value[1 - LONGEST :]


def _choice(key: str) -> str:
    """Which option of which group brings this setting; the dtypes of a strategy are those of the precision."""
    group = key.partition(".")[0]
    if group == "strategy" and key.endswith(".dtype"):
        group = "precision"
    return f"{group}.name"


def _follows(key: str, choice: str, runs: Sequence[Run]) -> bool:
    pairs = {(run.config.get(choice), run.config.get(key)) for run in runs}
    return len(pairs) == len({option for option, _ in pairs})


def _short(key: str) -> str:
    return key.removesuffix(".name").rpartition(".")[2]
