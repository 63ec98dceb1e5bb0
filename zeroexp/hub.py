"""A local folder, a cached snapshot or a download: the one place that asks whether the hub can be reached."""

from __future__ import annotations

import functools
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from zeroexp.config import ConfigError
from zeroexp.network import answers

MODEL_FILES = ["*.safetensors", "*.json"]


@functools.cache
def online() -> bool:
    """Whether the hub answers within seconds."""
    if constants.HF_HUB_OFFLINE:
        return False
    return answers(constants.ENDPOINT)


def model_folder(name: str) -> Path:
    """Folder with the weights, config and tokenizer that `model.weights=name` means.

    A local folder, else the hub's cache, else a download. Raises ConfigError when there is none of them.
    """
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    try:
        folder = Path(snapshot_download(name, local_files_only=True))
        if any(folder.glob("*.safetensors")):
            return folder
    except (LocalEntryNotFoundError, HFValidationError):
        pass  # not in the cache: the hub is asked next
    if not online():
        raise ConfigError(
            f"model.weights={name}: no such folder, not in the hub's cache, and the hub can not be reached; "
            f"give a local folder, or fetch it first with a network"
        )
    try:
        return Path(snapshot_download(name, allow_patterns=MODEL_FILES))
    except (HfHubHTTPError, HFValidationError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"model.weights={name}: neither a folder nor a hub id that can be read ({reason})"
        ) from error
