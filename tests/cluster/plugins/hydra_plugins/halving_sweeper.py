"""A sweeper that launches one point after another, for tests: it writes what it is given of each learning rate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

TARGET = {"_target_": "hydra_plugins.halving_sweeper.HalvingSweeper", "rates": [0.04, 0.02, 0.01]}
ConfigStore.instance().store(group="hydra/sweeper", name="halving", node=TARGET)


class HalvingSweeper(Sweeper):
    def __init__(self, rates: Sequence[float]) -> None:
        self.rates = list(rates)

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        told = []
        for number, rate in enumerate(self.rates):
            words = [*arguments, f"optimizer.lr={rate}"]
            (result,) = self.launcher.launch([words], initial_job_idx=number)
            told.append((rate, result.return_value))
        Path("halving.json").write_text(json.dumps(told), encoding="utf-8")
