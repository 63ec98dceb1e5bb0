"""A local folder, a cached snapshot or a download: the one place that asks whether the hub can be reached."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from zeroexp.config import ConfigError
from zeroexp.inputs import cache_root
from zeroexp.network import answers

MODEL_FILES = ["*.safetensors", "*.json"]


@functools.cache
def online() -> bool:
    """Whether the hub answers within seconds."""
    if constants.HF_HUB_OFFLINE:
        return False
    return answers(constants.ENDPOINT)


def has_dataset(name: str) -> bool:
    """Whether the hub, its library of data sets or zeroexp itself kept some of it here; all of it is not promised."""
    if (Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}").is_dir():
        return True
    library = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    if (library / name.replace("/", "___")).is_dir():
        return True
    packed = cache_root().glob("*/about.json")
    return any(json.loads(about.read_text()).get("hub_id") == name for about in packed)


def require_model(name: str) -> None:
    """Raises ConfigError where `model_folder` could not give this model."""
    if _model_here(name) is None and not online():
        raise ConfigError(
            f"model.weights={name}: no such folder, not in the hub's cache, and the hub can not be reached; "
            f"give a local folder, or fetch it first with a network"
        )


def model_folder(name: str) -> Path:
    """Folder with the weights, config and tokenizer that `model.weights=name` means.

    A local folder, else the hub's cache, else a download. Raises ConfigError when there is none of them.
    """
    if folder := _model_here(name):
        return folder
    require_model(name)
    try:
        return Path(snapshot_download(name, allow_patterns=MODEL_FILES))
    except (HfHubHTTPError, HFValidationError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"model.weights={name}: neither a folder nor a hub id that can be read ({reason})"
        ) from error


def _model_here(name: str) -> Path | None:
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return folder if any(folder.glob("*.safetensors")) else None
