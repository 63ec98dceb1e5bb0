"""Plan the points of a command line: the same points, names and refusals as a run of it would have."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from zeroexp.check import check
from zeroexp.check.rules_batch import num_gpus
from zeroexp.check.sweep_points import (
    Composed,
    Point,
    points_of,
    require_defined,
    require_points,
)
from zeroexp.check.try_model import check_model
from zeroexp.check.try_strategy import refused_strategy
from zeroexp.config.keys import Config, ConfigError, UndefinedCombination
from zeroexp.models.module import BuiltModel
from zeroexp.plan.form_of_config import build_on_meta
from zeroexp.plan.machines import device_of
from zeroexp.plan.outcome import PlannedPoint, plan_point
from zeroexp.plan.peak import with_rehearsal
from zeroexp.plan.search import remedies

on_paper = partial(check, on_paper=True)
BATCH = "data.global_batch_size"
MOST_RANKS = 1 << 16


class Plans:
    """The points of a command line, planned one by one; `zeroexp.__main__.compose` hands them to `run`."""

    has_failures = False

    def __init__(self, words: Sequence[str], *, rehearses: bool = False) -> None:
        """`words` are those of the command line: a batch size that stands there is not changed.

        rehearses: whether each point is rehearsed too.
        """
        self.rehearses = rehearses
        self.named = _keys_of(words)  # the keys that the line or its study sets
        self._keeps_batch = BATCH in self.named
        self.entries: list[PlannedPoint | Point] = []  # a point that is not planned says why
        self.notes: list[str] = []
        self._models: list[tuple[Config, BuiltModel]] = []

    def run(self, batch: Sequence[Composed]) -> list[None]:
        """Plan (overrides, composed config) pairs. Raises ConfigError if a word is wrong or nothing is left to plan."""
        if not batch:
            raise ConfigError("no point to plan: a range, glob or choice is empty; add to it")
        for words, *_ in batch:
            self.named |= _keys_of(words)
        points = [p for words, values, _ in batch for p in self._points(words, values)]
        require_points(points, batch[0][1]["study"]["name"])
        require_defined(points)
        defined = [point.config for point in points if not point.refusal]
        for config in defined:
            check_model(replace(config, model=replace(config.model, weights=None)))
        points = [
            point if point.refusal else replace(point, refusal=refused_strategy(point.config))
            for point in points
        ]
        require_defined(points)
        auto = device_of(defined, num_gpus(), os.cpu_count() or 1)
        self.entries += [self._plan(point, auto) for point in points]
        return [None for _ in batch]

    def _points(self, words: Sequence[str], values: Mapping[str, Any]) -> list[Point]:
        sizes = [values["world_size"]]
        if sizes == ["all"]:
            sizes = values["cluster"]["world_sizes"] or sizes
        each = [self._batched({**values, "world_size": size}) for size in sizes]
        return [point for one in each for point in points_of(words, one, on_paper)]

    def _batched(self, values: dict[str, Any]) -> dict[str, Any]:
        """Let the global batch grow to whole microbatches of every rank, unless the words name it."""
        data, ranks = values["data"], values["world_size"]
        micro, batch = data["micro_batch_size"], data["global_batch_size"]
        if isinstance(ranks, int) and ranks > MOST_RANKS:
            problem = "every rank is planned, so that this takes minutes and memory"
            raise ConfigError(f"world_size={ranks}: {problem}; use at most {MOST_RANKS}")
        if self._keeps_batch or not (isinstance(ranks, int) and ranks > 0 and micro > 0):
            return values
        if batch % (micro * ranks) == 0:
            return values
        fitting = max(1, batch // (micro * ranks)) * micro * ranks
        note = f"{BATCH}={batch} is not divisible by {ranks} ranks: planned with {fitting}"
        if note not in self.notes:
            self.notes.append(note)
        return {**values, "data": {**data, "global_batch_size": fitting}}

    @property
    def planned(self) -> list[PlannedPoint]:
        return [each for each in self.entries if isinstance(each, PlannedPoint)]

    def _plan(self, point: Point, auto: str) -> PlannedPoint | Point:
        if point.refusal:
            return point
        config = point.config
        device = auto if config.cluster.device == "auto" else config.cluster.device
        try:
            planned = plan_point(config, self._model(config), device, point.name)
        except UndefinedCombination as error:
            return replace(point, refusal=str(error))
        if self.rehearses:
            planned = with_rehearsal(planned)
        outcome = planned.outcome
        if outcome.fits is False and outcome.rehearsed is None:
            words = remedies(planned, self.named)
            planned = planned._replace(outcome=replace(outcome, remedies=words))
        return planned

    def _model(self, config: Config) -> BuiltModel:
        """Return the point's model; points of one model share it."""
        for known, model in self._models:
            if (known.model, known.data.vocab_size) == (config.model, config.data.vocab_size):
                return model
        self._models.append((config, build_on_meta(config)))
        return self._models[-1][1]


def _keys_of(words: Sequence[str]) -> set[str]:
    return {word.lstrip("+").partition("=")[0] for word in words}
