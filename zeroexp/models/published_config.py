"""Turn `model=hf model.path=…` into a config that says everything: the published config and where its weights are.

Only config.json is read, before anything is checked, so that all rules and the run's own config see the model's sizes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from zeroexp.config.families import shape_of
from zeroexp.config.keys import Config, ConfigError, ModelConfig

FAMILY = "hf"


def adopt_published_config(config: Config) -> Config:
    """Return the config with the published one of `model.path` in it. Raises ConfigError."""
    model = config.model
    _refuse_without_effect(model)
    if model.family != FAMILY or model.path is None:
        return config
    published = _read_published_config(model)
    weights = None if model.init == "random" else model.path
    name = Path(model.path.rstrip("/")).name if model.name == FAMILY else model.name
    model = replace(model, name=name, published=published, weights=weights)
    # Of the shipped tokenizer a published id may be any word, or none.
    is_shipped = weights is None or config.data.vocab_size is not None
    return replace(config, model=_with_padding(model, is_shipped))


def _with_padding(model: ModelConfig, is_shipped: bool) -> ModelConfig:
    """Let the end of text pad where the published config names no padding, since 0 may be a word such as `!`.

    A head would take such a word at the end of a text for padding, and read the token before it.
    """
    keys = model.hf_config if is_shipped else shape_of(model)
    if model.task != "classification" or _is_word(keys.get("pad_token_id")):
        return model
    end = keys.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    if is_shipped:  # it ends texts with 0
        end = 0
    padding = end if _is_word(end) else None
    return replace(model, hf_config={**model.hf_config, "pad_token_id": padding})


def _is_word(value: object) -> bool:
    return isinstance(value, int) and value >= 0  # older configs write -1 for none


def _refuse_without_effect(model: ModelConfig) -> None:
    if model.published:
        key, value = next(iter(model.published.items()))
        remedy = f"set model.hf_config.{key} instead, with a + before it where it is new"
        problem = "holds the config.json of model.path and nothing else"
        raise ConfigError(f"model.published.{key}={value}: {problem}; {remedy}")
    if model.family != FAMILY:
        return
    if model.path is None:
        if "model_type" in model.hf_config:
            return
        remedy = "set it to a folder with config.json, or to a hub id"
        raise ConfigError(f"model.path=null: model={model.name} needs a model; {remedy}")
    elif model.weights is not None:
        remedy = "leave it null; model.init=random starts without weights"
        raise ConfigError(f"model.weights={model.weights}: model.path names them; {remedy}")


def read_folder(folder: Path, named: str) -> dict[str, Any]:
    """Read config.json of a folder of weights. Raises ConfigError, which begins with `named`, a key and its value."""
    # transformers takes two seconds to import.
    from zeroexp.models.huggingface_keys import read_config_json

    try:
        published = read_config_json(folder)
    except FileNotFoundError as error:
        remedy = "use a folder that save_pretrained wrote"
        raise ConfigError(f"{named}: no config.json in it; {remedy}") from error
    except (OSError, ValueError) as error:
        problem = f"its config.json can not be read ({error})"
        raise ConfigError(f"{named}: {problem}; repair it") from error
    if not isinstance(published, dict) or not isinstance(published.get("model_type"), str):
        problem = "its config.json has no model_type"
        raise ConfigError(f"{named}: {problem}; use a folder of transformers")
    for key, (why, remedy) in UNFIT.items():
        if published.get(key):
            raise ConfigError(f"{named}: its config.json has {key}, {why}; {remedy}")
    return published


def _read_published_config(model: ModelConfig) -> dict[str, Any]:
    """Read config.json of a local folder, or else of the hub."""
    assert model.path is not None
    named, folder = f"model.path={model.path}", Path(model.path).expanduser()
    if not folder.is_dir():
        if model.path[0] in "./~":
            raise ConfigError(f"{named}: no such folder; use one that exists, or a hub id")
        # The hub's client takes half a second to import.
        from zeroexp.models import find_weights

        folder = find_weights.config_folder(model.path)
    return read_folder(folder, named)


# Keys of a published config.json that no run can follow: what each means, and the remedy.
UNFIT = {
    "auto_map": (
        "which means code of its own",
        "remove it there to train what transformers has for its model_type, or use a model without it",
    ),
    "quantization_config": (
        "which means weights that are no plain numbers",
        "save it dequantized (model.dequantize() of transformers), or use a model without it",
    ),
    "is_encoder_decoder": (
        "and an encoder and a decoder take two inputs",
        "use a model without it",
    ),
}
