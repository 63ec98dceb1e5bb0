"""A local folder, a cached snapshot or a download: the one place that asks whether there is a network.

The hub's own client retries for half a minute before it admits that a machine is offline.
"""

from __future__ import annotations

import functools
import urllib.error
import urllib.request
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from zeroexp.config import ConfigError

CONNECT_SECONDS = 3.0
MODEL_FILES = ["*.safetensors", "*.json"]


@functools.cache
def online() -> bool:
    """Whether the hub answers within seconds; proxies of the environment are used."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urllib.request.urlopen(
            urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=CONNECT_SECONDS
        ).close()
    except urllib.error.HTTPError:
        return True  # it answered, if not with what a browser wants
    except (TimeoutError, urllib.error.URLError, ConnectionError):
        return False
    return True


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
