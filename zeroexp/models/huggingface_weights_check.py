"""Check that weights and saved buffers in a folder are those of the configured model, without reading their values.

    config.json ── transformers' class fills in its defaults ──▶ every key that decides the function has our value
    headers of the files of weights ───────────────────────────▶ every name is one of ours and has our shape

[Note: which keys decide] transformers loads the names that fit, drops the rest without an error, and computes with the
config it is given, not with the folder's. So each key of the family's class must agree, where a missing key has its
default, unless the key is in HARMLESS. A key that the class does not know has no effect in transformers either.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from zeroexp.config.keys import ConfigError, ModelConfig
from zeroexp.models.huggingface_keys import effective_keys
from zeroexp.models.huggingface_tensor_names import publish, saved_tensors
from zeroexp.models.published_config import read_folder
from zeroexp.models.read_weight_files import Header, UnreadableWeights, read_headers, read_tensor

# Older versions saved these computed, untrained tables with the weights.
TABLES = re.compile(
    r"\.(rotary_emb\.inv_freq|attn\.(masked_)?bias|attention\.(masked_)?bias|embeddings\.position_ids)$"
)
# The hub's BERT has names of TensorFlow, and transformers publishes ESM under them.
OF_TENSORFLOW = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
SPELLINGS = {**OF_TENSORFLOW, **{new: old for old, new in OF_TENSORFLOW.items()}}
FLOATS = ("F64", "F32", "F16", "BF16")
LANGUAGE_HEAD = "lm_head."
HEADS = (LANGUAGE_HEAD, "score.")


def require_fitting(config: ModelConfig, folder: Path, module: Any) -> dict[str, Header]:
    """Return the header of every tensor in `folder`, by the published name that the model with its head gives it.

    Raises ConfigError, in one line, unless these are the weights of exactly this model, which may be on meta.
    A classification head may be missing or be replaced by another task's head.
    """
    _require_config(config, folder, module.config)
    tensors = {n: t.detach().to("meta") for n, t in saved_tensors(module).items()}
    expected = publish(module, tensors)
    try:
        headers = _of_model(read_headers(folder), module, expected)
    except UnreadableWeights as error:
        _refuse(config, f"its weights can not be read ({error})", "fetch or copy them again")
    _require_names(config, module, expected, headers)
    _require_shapes(config, expected, headers)
    _require_tied(config, module, headers)
    return headers


def vocab_size_of(config: ModelConfig, folder: Path) -> int | None:
    """Return the vocabulary size in the folder's config.json."""
    words = read_folder(folder, _named(config)).get("vocab_size")
    return words if isinstance(words, int) else None


# ---- config.json


def _require_config(config: ModelConfig, folder: Path, ours: PreTrainedConfig) -> None:
    written = read_folder(folder, _named(config))
    kind = written.pop("model_type")
    if kind != ours.model_type:
        problem = f"its config.json says model_type={kind}, not {ours.model_type}"
        _refuse(config, problem, f"choose weights of model.family={config.family}")
    try:
        theirs = AutoConfig.for_model(kind, **written)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())
        _refuse(config, f"its config.json is none of a {kind}: {reason}", "repair it")
    here, there = effective_keys(ours), effective_keys(theirs)
    if differ := [key for key in {**here, **there} if here.get(key) != there.get(key)]:
        their_values = ", ".join(f"{key}={_shown(there.get(key))}" for key in differ)
        our_values = ", ".join(_shown(here.get(key)) for key in differ)
        use = " ".join(f"++model.hf_config.{key}={_shown(there.get(key))}" for key in differ)
        remedy = f"use {use}, or, if you mean another function, change its config.json"
        problem = (
            f"its config.json has {their_values} where model.name={config.name} has {our_values}"
        )
        _refuse(config, problem, remedy)


def _shown(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


# ---- files of weights


def _of_model(
    headers: dict[str, Header], module: Any, expected: Mapping[str, Tensor]
) -> dict[str, Header]:
    """Return the names as in the model with its head: files saved without a head lack the base model's prefix.

    What transformers' own class says to leave out (layers that predict several tokens at once) is no part of the model.
    """
    prefix = _prefix_of(module, expected)
    if not any(name.startswith(prefix) for name in headers):
        headers = {n if n.startswith(HEADS) else prefix + n: h for n, h in headers.items()}
    headers = {_as_expected(n, expected): h for n, h in headers.items()}
    none_of_it = [TABLES, *(module._keys_to_ignore_on_load_unexpected or ())]
    return {
        name: header
        for name, header in headers.items()
        if name in expected or not any(re.search(each, name) for each in none_of_it)
    }


def _prefix_of(module: Any, expected: Mapping[str, Any]) -> str:
    """Return what stands before published names of the base model, which its class may call otherwise (Nemotron-H)."""
    own = f"{module.base_model_prefix}."
    if any(name.startswith(own) for name in expected):
        return own
    (first, _), *_ = Counter(name.partition(".")[0] for name in expected).most_common(1)
    return f"{first}."


def _as_expected(name: str, expected: Mapping[str, Any]) -> str:
    """Return the name in the spelling that the model publishes; one that it has in neither stays."""
    others = (name.replace(one, other) for one, other in SPELLINGS.items())
    return name if name in expected else next((n for n in others if n in expected), name)


# ---- what must agree


def _require_names(
    config: ModelConfig, module: Any, expected: Mapping[str, Any], headers: Mapping[str, Any]
) -> None:
    inside = _prefix_of(module, expected)

    def is_head(name: str) -> bool:
        """Return whether a classifier's is drawn anew, and another task's left out."""
        of_base = name.startswith(inside) and ".pooler." not in name
        return config.task == "classification" and not of_base

    missing = sorted(n for n in expected.keys() - headers.keys() if not is_head(n))
    # A file may repeat the head that is tied to the embedding; _require_tied compares its values.
    extra = sorted(
        n
        for n in headers.keys() - expected.keys()
        if not n.startswith(LANGUAGE_HEAD) and not is_head(n)
    )
    if extra:
        remedy = "choose weights of this model; these would be left out in silence"
        if all(name.startswith(HEADS) for name in extra):
            remedy = "choose weights without this head, or the task it is for"
        _refuse(config, f"{_first_of(extra)} in it, not in model.name={config.name}", remedy)
    if missing:
        remedy = "choose weights of this model"
        _refuse(config, f"{_first_of(missing)} of model.name={config.name}, not in it", remedy)


def _require_shapes(
    config: ModelConfig, expected: Mapping[str, Tensor], headers: Mapping[str, Header]
) -> None:
    for name, header in headers.items():
        counts = name in expected and not expected[name].is_floating_point()  # a buffer of integers
        if header.dtype not in FLOATS and not counts:
            problem = f"{name} is {header.dtype} in {header.file.name}"
            _refuse(config, problem, f"use weights in one of {', '.join(FLOATS)}")
        shape = tuple(expected[name].shape) if name in expected else header.shape
        if header.shape != shape:
            problem = (
                f"{name} is {_by(header.shape)} in it, {_by(shape)} in model.name={config.name}"
            )
            _refuse(config, problem, "choose weights of this model, or change model.hf_config")


def _require_tied(config: ModelConfig, module: Any, headers: Mapping[str, Header]) -> None:
    """Raise ConfigError if a file holds both tied tensors with different values: transformers would untie them."""
    beside = f"{LANGUAGE_HEAD}weight"
    parameters = dict(module.named_parameters(remove_duplicate=False))
    words = module.get_input_embeddings().weight
    # Asked of the module: there are classes that do not tie what their config says, and configs that say nothing.
    if beside not in headers or parameters.get(beside) is not words:
        return
    own = next(name for name, p in module.named_parameters() if p is words)
    (name,) = publish(module, {own: words.detach().to("meta")})
    if not torch.equal(read_tensor(headers[beside]), read_tensor(headers[name])):
        problem = f"{beside} differs from {name} in it, model.name={config.name} ties them"
        _refuse(config, problem, "choose weights of this model")


def _first_of(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} parameters, first {names[0]},"


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a number"


def _named(config: ModelConfig) -> str:
    return f"model.weights={config.weights}"


def _refuse(config: ModelConfig, problem: str, remedy: str) -> NoReturn:
    raise ConfigError(f"{_named(config)}: {problem}; {remedy}")
