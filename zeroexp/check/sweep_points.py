"""Make the points of a sweep from composed configs: filter by study, check each point."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from zeroexp.check import check as check_run
from zeroexp.check import require_values
from zeroexp.check.refusal import value_of
from zeroexp.check.rules_of_one_key import INCLUDE
from zeroexp.checkpoint.resume import resolve_resume
from zeroexp.config import plugins
from zeroexp.config.keys import (
    LONGEST_NAME_BYTES,
    Config,
    ConfigError,
    DataConfig,
    UndefinedCombination,
    from_mapping,
    resolve,
)
from zeroexp.models.published_config import adopt_published_config

BATCH = "data.global_batch_size"
IN_EVERY_NAME = ("strategy", "strategy.implementation", "world_size")
TOO_LONG_FOR_A_NAME = ("resume",)
MOST_RANKS = 1 << 16


# One point from Hydra: its overrides, its composed config, and the files of .hydra/ by name.
Composed = tuple[Sequence[str], Mapping[str, Any], Mapping[str, str]]


@dataclass(frozen=True)
class SweepPoint:
    name: str  # the folder's name; equal names get a number
    config: Config  # resolved
    refusal: str | None  # the reason if the point is skipped
    hydra: Mapping[str, str] = field(default_factory=dict[str, str])  # files for users of Hydra
    rows: frozenset[int] = frozenset()  # those of study.include that it fits, from 1


def keys_of(words: Sequence[str]) -> set[str]:
    """Return the keys that words of a command line set."""
    return {word.lstrip("+").partition("=")[0] for word in words}


def fitting_batch(batch: int, multiple: int) -> int:
    """Return the largest multiple that is no larger than the batch; else the smallest there is."""
    return max(1, batch // multiple) * multiple


def with_suited_batch(batch: Sequence[Composed], line: Sequence[str]) -> Sequence[Composed]:
    """Let a global batch that nobody chose suit the ranks of every point, and say so.

    All points get the same one, since their losses and times are compared. `line`: the words of the user.
    """
    chosen = BATCH in keys_of(line) or any(BATCH in keys_of(words) for words, *_ in batch)
    default = DataConfig().global_batch_size
    sizes = [size for _, values, _ in batch if (size := _samples_at_once(values))]
    of_points = {values["data"]["global_batch_size"] for _, values, _ in batch}
    if chosen or of_points != {default} or all(default % size == 0 for size in sizes):
        return batch
    fitting = fitting_batch(default, math.lcm(*sizes))
    problem = f"the default {default} does not suit these ranks"
    print(f"zeroexp: {BATCH}={fitting} in every point: {problem}", file=sys.stderr)
    return [
        (words, {**values, "data": {**values["data"], "global_batch_size": fitting}}, files)
        for words, values, files in batch
    ]


def _samples_at_once(values: Mapping[str, Any]) -> int:
    """Return how many samples all ranks take at once; 0 for what is refused later."""
    counts = values["world_size"], values["data"]["micro_batch_size"]
    are_fine = all(isinstance(count, int) and 0 < count <= MOST_RANKS for count in counts)
    return math.prod(counts) if are_fine else 0


def point_of(
    overrides: Sequence[str],
    values: Mapping[str, Any],
    check: Callable[[Config], None] = check_run,
) -> SweepPoint | None:
    """Return the point of one set of overrides; None outside of its study.

    `values` is the composed config. Raises ConfigError if a key or word is wrong by itself.
    """
    config = from_mapping(Config, values)
    require_values(config)
    plugins.load(config.plugins)
    config = plugins.with_settings(adopt_published_config(config))
    rows = _rows_of_study(config)
    outside = config.study.include and not rows
    return None if outside else replace(_point(overrides, config, check), rows=rows)


def require_points(points: Sequence[SweepPoint], study: str | None) -> None:
    """Raise ConfigError if the study has left out every point; say which of its rows fit none."""
    if not points:
        if study is None:
            problem = f"{INCLUDE}: none of its rows fits a point of this sweep"
            raise ConfigError(f"{problem}; change a row, or leave it out")
        remedy = f"leave what it compares to the study, or extend {INCLUDE}"
        raise ConfigError(f"study={study}: none of its points is in this sweep; {remedy}")
    every = range(1, len(points[0].config.study.include) + 1)
    if idle := set(every).difference(*(point.rows for point in points)):
        named = ", ".join(map(str, sorted(idle)))
        print(f"zeroexp: {INCLUDE}: no point of this sweep fits row {named} of it", file=sys.stderr)


def require_defined(points: Sequence[SweepPoint]) -> None:
    """Raise ConfigError, the reason of the first, if every point is skipped."""
    if all(point.refusal for point in points):
        raise ConfigError(points[0].refusal)


def _rows_of_study(config: Config) -> frozenset[int]:
    """Return which of its study's rows the config matches, from 1."""
    return frozenset(
        number
        for number, row in enumerate(config.study.include, 1)
        if all(value_of(config, key, INCLUDE) in values for key, values in row.items())
    )


def _point(overrides: Sequence[str], config: Config, check: Callable[[Config], None]) -> SweepPoint:
    refusal = None
    try:
        check(config)
        config = replace(config, resume=resolve_resume(config))
    except UndefinedCombination as error:
        refusal = str(error)
    except OSError as error:
        shown = str(config.resume)[:100]
        remedy = "use latest, a run's folder, or one of its checkpoints"
        raise ConfigError(
            f"resume={shown}: can not be read ({error.strerror}); {remedy}"
        ) from error
    return SweepPoint(_name(overrides, config), resolve(config), refusal)


def _name(overrides: Sequence[str], config: Config) -> str:
    """Return zero3-buffer-n2 plus the swept values: zero3-buffer-n2-tiny-lr0.01."""
    strategy = config.strategy
    parts = [strategy.name, strategy.implementation, f"n{config.world_size}"]
    words = (override.lstrip("+").partition("=") for override in overrides)
    swept = {key: value for key, _, value in words}
    if swept.get("strategy") not in (None, strategy.name):  # an option of the user's own
        parts.append(swept["strategy"])
    last = Counter(key.rpartition(".")[2] for key in swept)
    for key, value in swept.items():
        value = re.sub(r"^'([\w.+-]+)'$", r"\1", value)
        if key not in (*IN_EVERY_NAME, *TOO_LONG_FOR_A_NAME):
            *groups, word = key.split(".")
            told = ".".join((*groups[-1:], word)) if last[word] > 1 else word  # of lr and outer.lr
            parts.append(told + value if groups else value)
    name = "-".join(re.sub(r"[^\w.]+", "_", part) for part in parts)
    if len(name.encode()) <= LONGEST_NAME_BYTES:
        return name
    return f"{name[:40]}-{sha256(name.encode()).hexdigest()[:8]}"
