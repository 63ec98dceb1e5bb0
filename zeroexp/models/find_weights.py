"""Folder of a model's weights: a local one, a cached snapshot or a download.

Only this file asks whether the hub can be reached.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from zeroexp.config.keys import ConfigError
from zeroexp.process.reachable import server_answers

MODEL_FILES = ["*.safetensors", "*.json", "*.jinja"]


@cache
def is_online() -> bool:
    """Return whether the hub answers within seconds; False in the hub's offline mode."""
    if constants.HF_HUB_OFFLINE:
        return False
    return server_answers(constants.ENDPOINT)


def model_folder(name: str) -> Path:
    """Return the folder with the weights, config and tokenizer that `model.weights=name` means.

    It is a local folder, else the hub's cache, else a download. Raises ConfigError if there is none of them.
    """
    if folder := _model_here(name):
        return folder
    fetch = partial(snapshot_download, name, allow_patterns=MODEL_FILES)
    return _from_hub(f"model.weights={name}", fetch, needed="safetensors")


def config_folder(name: str) -> Path:
    """Return a folder with the config.json of this model on the hub: the cache's, or a download. Raises ConfigError."""
    fetch = partial(hf_hub_download, name, "config.json")
    with suppress(LocalEntryNotFoundError, HFValidationError):
        return Path(fetch(local_files_only=True)).parent
    return _from_hub(f"model.path={name}", fetch, needed="config.json").parent


def _from_hub(key: str, fetch: Callable[[], str], *, needed: str) -> Path:
    if not is_online():
        raise ConfigError(
            f"{key}: no such folder, not in the hub's cache, and the hub can not be reached; "
            "give a local folder, or fetch it first with a network"
        )
    try:
        return Path(fetch())
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{key}: neither a folder nor a hub id that can be read ({reason}); "
            f"use a folder with {needed}, or the id of a model on the hub"
        ) from error


def _model_here(name: str) -> Path | None:
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return folder if any(folder.glob("*.safetensors")) else None
