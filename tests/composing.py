"""Composes configs as the command line does, without running anything."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra.types import RunMode
from omegaconf import OmegaConf
from pytest import MonkeyPatch

from zeroexp.__main__ import BEHAVIOUR, store_schema
from zeroexp.config.keys import Config, from_mapping

CONF = Path(__file__).resolve().parent.parent / "conf"


@cache
def composed(*overrides: str) -> Config:
    """The config of `python -m zeroexp <overrides>`, not yet resolved. Shared: change a copy."""
    store_schema()
    with initialize_config_dir(str(CONF), **BEHAVIOUR):
        values = OmegaConf.to_container(compose("config", list(overrides)), resolve=True)
    assert isinstance(values, dict)
    return from_mapping(Config, {str(key): value for key, value in values.items()})


def compose_once(patch: MonkeyPatch) -> None:
    """Hydra composes every line once more to read the mode that conf/ sets, and swallows all errors of that."""
    patch.setattr(Hydra, "get_mode", lambda *_, **__: RunMode.MULTIRUN)


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))
