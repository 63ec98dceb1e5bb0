"""Hydra finds launchers only in this package. Ours composes the points of a sweep and hands them to it.

`task_function` is what `zeroexp.__main__` gave to Hydra. Usually that is the body of one job; here it is the body of
the whole sweep, since only the sweep knows which points are defined and which may run side by side.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

TARGET = {"_target_": "hydra_plugins.zeroexp_launcher.ZeroexpLauncher"}
ConfigStore.instance().store(group="hydra/launcher", name="zeroexp", node=TARGET)


class ZeroexpLauncher(Launcher):
    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.run_points, self.config = task_function, config
        self._loader = hydra_context.config_loader
        self._keep_what_is_composed()
        # These checks come before a sweeper writes. The imports are local because Hydra loads this file for every app.
        from zeroexp.check.refusal import refuse_password
        from zeroexp.config.keys import FOLDER, ConfigError
        from zeroexp.process.writable import require_writable

        refuse_password("tracking.uri", str(OmegaConf.select(config, "tracking.uri")))
        batch = OmegaConf.select(config, "hydra.sweeper.max_batch_size")
        key = f"hydra.sweeper.max_batch_size={batch}"
        if batch is not None and batch < 1:
            raise ConfigError(f"{key}: too small; use at least 1, or leave it null")
        if batch is not None and OmegaConf.select(config, "study.include"):
            raise ConfigError(f"{key}: a study is one batch; leave it out")
        writes = getattr(task_function, "writes", True)  # a plan does not
        for key in ("outputs", "hydra.sweep.dir") if writes else ():
            folder = OmegaConf.select(config, key)
            if folder is None:
                raise ConfigError(f"{key}=???: no value; give it one")
            if key == "outputs" and not re.fullmatch(FOLDER[0], str(folder)):
                raise ConfigError(f"{key}={folder}: {FOLDER[1]}; {FOLDER[2]}")
            require_writable(f"{key}={folder}", folder, "choose a folder that is yours")

    def _keep_what_is_composed(self) -> None:
        """Keep the points that a sweeper composes to see whether it can: composing is most of what a line takes."""
        load, composed = self._loader.load_sweep_config, dict[tuple[str, ...], DictConfig]()

        def load_and_keep(master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
            composed[tuple(sweep_overrides)] = made = load(master_config, sweep_overrides)
            return made

        self._loader.load_sweep_config, self._composed = load_and_keep, composed

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Return one result per point for the sweeper: its final loss, or None if it has none."""
        losses = self.run_points([self._compose(list(overrides)) for overrides in job_overrides])
        return [JobReturn(status=JobStatus.COMPLETED, _return_value=loss) for loss in losses]

    def _compose(self, overrides: list[str]) -> tuple[list[str], Any, dict[str, str]]:
        """Return the overrides that distinguish this point within the sweep, its config as plain values, and the files
        that Hydra writes of a job.
        """
        if tuple(overrides) not in self._composed:
            self._loader.load_sweep_config(self.config, overrides)
        composed = self._composed.pop(tuple(overrides))
        keys = [str(key) for key in composed if key != "hydra"]
        ours = OmegaConf.masked_copy(composed, keys)
        values = OmegaConf.to_container(ours, resolve=True)
        files = {
            "config.yaml": OmegaConf.to_yaml(ours),
            "hydra.yaml": OmegaConf.to_yaml(OmegaConf.masked_copy(composed, ["hydra"])),
            "overrides.yaml": OmegaConf.to_yaml(overrides),
        }
        line = OverridesParser.create().parse_overrides(list(self.config.hydra.overrides.task))
        # Of a key that is given twice the last word counts.
        last = {word.get_key_element(): word.is_sweep_override() for word in line}
        fixed = {key for key, is_swept in last.items() if not is_swept}
        return [word for word in overrides if word.partition("=")[0] not in fixed], values, files
