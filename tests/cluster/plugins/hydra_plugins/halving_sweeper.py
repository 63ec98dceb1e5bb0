"""A sweeper that learns, for a test: halves the learning rate as long as it wants, one launch per point."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

TARGET = {"_target_": "hydra_plugins.halving_sweeper.HalvingSweeper"}
ConfigStore.instance().store(group="hydra/sweeper", name="halving", node=TARGET)


class HalvingSweeper(Sweeper):
    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        rate, told = 0.04, []
        for number in range(3):
            words = [*arguments, f"optimizer.lr={rate}"]
            (result,) = self.launcher.launch([words], initial_job_idx=number)
            told.append((rate, result.return_value))
            rate /= 2
        Path("halving.json").write_text(json.dumps(told))
