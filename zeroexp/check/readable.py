"""Check what a point reads from outside, once per sweep and before a rank starts.

These checks are apart from the other rules, because they access disk and network. Ranks of this machine see what we
see. Slurm's nodes may see other folders and another network. For them, we refuse a folder only if it exists here and is
wrong, and a name on the hub only if it is not in our cache and our environment, which jobs inherit, forbids the
network.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

from zeroexp.config.keys import Config, ConfigError, DataConfig
from zeroexp.config.paths import data_files, is_hub_id

WEIGHTS = ("*.safetensors", "*.bin")


def check_inputs(config: Config) -> None:
    """Raise ConfigError for data or weights that the ranks could not read."""
    here, like_here = config.cluster.kind == "local", _reaches_what_we_reach(config)
    data, weights = config.data, config.model.weights
    if data.path and is_hub_id(data):
        if like_here:
            _check_on_hub(data.path)
    elif data.path:
        _require_readable(
            "data.path", data.path, lambda: _check_data(data.path, data.kind, data.split, here)
        )
    if weights:
        _require_readable(
            "model.weights", weights, lambda: _check_weights(weights, here, like_here)
        )


def _reaches_what_we_reach(config: Config) -> bool:
    """Do the ranks see the hub as we do? They do if they run here, or if they inherit our offline setting unchanged."""
    cluster = config.cluster
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    changed = cluster.slurm.setup or cluster.slurm.python
    return cluster.kind == "local" or (offline and not changed)


def _require_readable(key: str, value: str, look: Callable[[], None]) -> None:
    try:
        look()
    except OSError as error:
        remedy = "make it readable, or choose another"
        problem = f"can not be read ({error.strerror}: {error.filename})"
        raise ConfigError(f"{key}={value}: {problem}; {remedy}") from error


@cache
def _check_data(path: str, kind: str, split: str | None, here: bool) -> None:
    place = Path(path).expanduser()
    if here or place.exists():
        _open_folder(place)
        for file in data_files(DataConfig(path=path, kind=kind, split=split)):
            file.open("rb").close()


def _open_folder(path: Path) -> None:
    """Raise OSError for an unreadable folder: glob would silently find nothing in it."""
    if path.is_dir():
        os.scandir(path).close()


@cache
def _check_on_hub(name: str) -> None:
    # The hub's client takes half a second to import, and most points do not need it.
    from zeroexp.models import find_weights

    if not find_weights.dataset_exists(name) and not find_weights.is_online():
        problem = "no such file or folder, not in a cache, and the hub can not be reached"
        remedy = "use one that exists, or fetch it first with a network"
        raise ConfigError(f"data.path={name}: {problem}; {remedy}")


@cache
def _check_weights(weights: str, here: bool, like_here: bool) -> None:
    folder = Path(weights).expanduser()
    if folder.exists():
        _open_folder(folder)
        files = [file for pattern in WEIGHTS for file in sorted(folder.glob(pattern))]
        if not files:
            problem = f"no file in it ends in {' or '.join(name[1:] for name in WEIGHTS)}"
            remedy = "use a folder that holds a model"
            raise ConfigError(f"model.weights={weights}: {problem}; {remedy}")
        for file in files:
            file.open("rb").close()
    elif weights[0] in "./~":
        if here:
            remedy = "use one that exists, a hub id, or null"
            raise ConfigError(f"model.weights={weights}: no such folder; {remedy}")
    elif like_here:
        from zeroexp.models import find_weights

        find_weights.require_model(weights)
