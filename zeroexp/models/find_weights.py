"""Folder of a model's weights: a local one, a cached snapshot or a download.

Only this file asks whether the hub can be reached.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from zeroexp.config.keys import ConfigError
from zeroexp.process.server_address import server_answers

MODEL_FILES = ["*.safetensors", "*.json", "*.jinja"]


@cache
def is_online() -> bool:
    """Return whether the hub answers within seconds; False in the hub's offline mode."""
    if constants.HF_HUB_OFFLINE:
        return False
    return server_answers(constants.ENDPOINT)


def model_folder(name: str) -> Path:
    """Return the folder with the weights, config and tokenizer that `model.weights=name` means. Raises ConfigError."""
    return _folder(f"model.weights={name}", name, MODEL_FILES, "*.safetensors", _lacks_files)


def config_folder(name: str) -> Path:
    """Return a folder with the config.json of the model that `model.path=name` means. Raises ConfigError."""
    return _folder(f"model.path={name}", name, ["config.json"], "config.json", lambda _: False)


def _lacks_files(folder: Path) -> bool:
    """Tell whether a download stopped, or somebody else wanted the weights alone."""
    names = {"config.json", "tokenizer.json", "tokenizer_config.json"}
    for index in folder.glob("*.safetensors.index.json"):
        names |= {*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    return not all((folder / name).exists() for name in names)


def _folder(
    key: str, name: str, patterns: list[str], needed: str, lacks: Callable[[Path], bool]
) -> Path:
    """Return a local folder, else one of the hub's cache that has the files `needed`, else a download.

    What a cached one lacks is fetched where the hub answers, of the same revision.
    """
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    # Without patterns the hub's client wants every file of the repository. Mistral's hold their weights twice.
    wanted: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": ["consolidated*"]}
    cached: Path | None = None
    with suppress(LocalEntryNotFoundError, HFValidationError):
        folder = Path(snapshot_download(name, local_files_only=True, **wanted))
        cached = folder if any(folder.glob(needed)) else None
    if cached is not None and not (lacks(cached) and is_online()):
        return cached
    if not is_online():
        raise ConfigError(
            f"{key}: no such folder, not in the hub's cache, and the hub can not be reached; "
            "give a local folder, or fetch it first with a network"
        )
    try:
        return Path(snapshot_download(name, revision=cached and cached.name, **wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        if cached is not None:  # in a folder of others', for one
            return cached
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{key}: neither a folder nor a hub id that can be read ({reason}); "
            f"use a folder with {needed}, or the id of a model on the hub"
        ) from error
