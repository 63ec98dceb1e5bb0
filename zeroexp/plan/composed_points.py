"""The points of a plan's command line, refused as those of a run would be: without torch, which planning them needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from zeroexp.check import check
from zeroexp.check.sweep_points import (
    BATCH,
    MOST_RANKS,
    Composed,
    SweepPoint,
    fitting_batch,
    keys_of,
    point_of,
    require_defined,
    require_points,
)
from zeroexp.config.keys import ConfigError

on_paper = partial(check, on_paper=True)


class ComposedPoints:
    """The points that Hydra composes; `zeroexp.__main__.compose` hands them to `run`."""

    has_failures = False

    def __init__(self, words: Sequence[str]) -> None:
        """`words` are those of the command line: a batch size that stands there is not changed."""
        self.named = keys_of(words)  # the keys that the line or its study sets
        self.points: list[SweepPoint] = []
        self.notes: list[str] = []
        self._keeps_batch = BATCH in self.named

    def run(self, batch: Sequence[Composed]) -> list[None]:
        """Take (overrides, composed config) pairs. Raises ConfigError if a word is wrong or nothing is left to plan."""
        if not batch:
            raise ConfigError("no point to plan: a range, glob or choice is empty; add to it")
        for words, *_ in batch:
            self.named |= keys_of(words)
        each = [point_of(words, self._batched(values), on_paper) for words, values, _ in batch]
        points = [point for point in each if point]
        require_points(points, batch[0][1]["study"]["name"])
        require_defined(points)
        self.points += points
        return [None for _ in batch]

    def _batched(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let the global batch grow to whole microbatches of every rank, unless the words name it."""
        data, ranks = values["data"], values["world_size"]
        if ranks > MOST_RANKS:
            problem = "every rank is planned, so that this takes minutes and memory"
            raise ConfigError(f"world_size={ranks}: {problem}; use at most {MOST_RANKS}")
        batch, multiple = data["global_batch_size"], data["micro_batch_size"] * ranks
        if self._keeps_batch or min(ranks, multiple) <= 0 or batch % multiple == 0:
            return values
        fitting = fitting_batch(batch, multiple)
        note = f"{BATCH}={batch} is not divisible by {ranks} ranks: planned with {fitting}"
        if note not in self.notes:
            self.notes.append(note)
        return {**values, "data": {**data, "global_batch_size": fitting}}
