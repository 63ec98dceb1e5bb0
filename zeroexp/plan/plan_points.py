"""Plan the points of a command line: the same points, names and refusals as a run of it would have."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from zeroexp.check.rules_machine import num_gpus
from zeroexp.check.sweep_points import SweepPoint, require_defined
from zeroexp.check.try_model import check_model
from zeroexp.check.try_strategy import refused_strategy
from zeroexp.config.keys import Config, UndefinedCombination
from zeroexp.config.vocabulary import vocab_size_of_data
from zeroexp.models.module import BuiltModel
from zeroexp.plan.composed_points import ComposedPoints
from zeroexp.plan.form_of_config import build_on_meta
from zeroexp.plan.machines import device_of
from zeroexp.plan.outcome import PlannedPoint, plan_point
from zeroexp.plan.peak import with_rehearsal
from zeroexp.process import signals


class Plans:
    """The points of a command line, planned one by one."""

    def __init__(
        self, composed: ComposedPoints, *, rehearses: bool = False, gives_time: bool = False
    ) -> None:
        """rehearses: each point. gives_time: whoever rehearses others has all the time that it takes."""
        self.named, self.notes = composed.named, composed.notes
        self.rehearses, self.gives_time = rehearses, gives_time
        self._models: dict[str, BuiltModel] = {}
        # A point that is not planned says why.
        self.entries: list[PlannedPoint | SweepPoint] = self._plan_all(composed.points)

    def _plan_all(self, points: Sequence[SweepPoint]) -> list[PlannedPoint | SweepPoint]:
        defined = [point.config for point in points if not point.refusal]
        for config in defined:
            check_model(replace(config, model=replace(config.model, weights=None)))
        points = [
            point if point.refusal else replace(point, refusal=refused_strategy(point.config))
            for point in points
        ]
        if not points:
            return []
        require_defined(points)
        auto = device_of(defined, num_gpus(), os.cpu_count() or 1)
        entries = signals.until_interrupted(
            (self._plan(point, auto) for point in points), "points that were planned"
        )
        skipped = [each for each in entries if isinstance(each, SweepPoint)]
        if len(skipped) == len(entries):
            require_defined(skipped)
        return entries

    @property
    def planned(self) -> list[PlannedPoint]:
        return [each for each in self.entries if isinstance(each, PlannedPoint)]

    def _plan(self, point: SweepPoint, auto: str) -> PlannedPoint | SweepPoint:
        if point.refusal:
            return point
        config = point.config
        device = auto if config.cluster.device == "auto" else config.cluster.device
        try:
            planned = plan_point(config, self._model(config), device, point.name)
        except UndefinedCombination as error:
            return replace(point, refusal=str(error))
        return with_rehearsal(planned) if self.rehearses else planned

    def _model(self, config: Config) -> BuiltModel:
        """Return the point's model; points of one model and vocabulary share it."""
        words = vocab_size_of_data(config)
        key = repr((config.model, words))
        if key not in self._models:
            self._models[key] = build_on_meta(config, words)
        return self._models[key]
