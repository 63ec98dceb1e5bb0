"""Which keys of `model.hf_config` a family knows, and which of them change what is trained here.

transformers accepts a misspelt key silently, and takes many keys that this project leaves without a use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from zeroexp.config.families import shape_of
from zeroexp.config.keys import ConfigError, ModelConfig
from zeroexp.registry.did_you_mean import did_you_mean

# Randomness in forward is off in all our models, so that every engine computes the same.
RANDOMNESS = re.compile(r"dropout|pdrop|layerdrop|drop_path|jitter")
# Names and versions; settings of generation, of transformers' own loss, of outputs nobody reads, and of one attention.
IDLE = {
    *("architectures", "id2label", "label2id", "model_type", "problem_type"),
    *("transformers_version", "_name_or_path", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    *("pretraining_tp", "reorder_and_upcast_attn", "router_aux_loss_coef", "use_cache"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
    *("summary_type", "summary_use_proj"),
}
PAD = "pad_token_id"
# These keys of a published config do not matter: idle ones, token ids, which the data decides here, and how random
# weights are drawn. Neither does RANDOMNESS.
HARMLESS = {*IDLE, "dtype", "initializer_range", "bos_token_id", "eos_token_id", PAD}
ELSEWHERE = {"dtype": "precision", "torch_dtype": "precision", "num_labels": "model.num_labels"}
# transformers understands these, which older versions wrote, and keeps them in ROPE, unless they are in it.
ROPE = "rope_parameters"
SPELT_APART = ("rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_pct")

# Whole numbers above 0, where the family has them.
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "n_inner"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "head_dim"),
    *("num_local_experts", "num_experts_per_tok", "sliding_window"),
)


def read_config_json(folder: Path) -> Any:
    """Return what config.json holds, as transformers reads it: it writes infinity as `{"__float__": "Infinity"}`.

    Raises OSError and ValueError.
    """
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(written, dict):
        return written  # which transformers does not expect
    return PreTrainedConfig.get_config_dict(folder, local_files_only=True)[0]


def check_keys(config: ModelConfig, kind: str) -> None:
    """Raise ConfigError for a key that the architecture `kind` does not know, or whose value would be ignored.

    A published config is nobody's wish: its keys without a use here are left out in silence.
    """
    shape = AutoConfig.for_model(kind)
    names = [*shape.to_dict(), *shape.attribute_map]
    names += SPELT_APART if ROPE in names else ()
    for key, value in config.hf_config.items():
        if key == "model_type" and config.family == "hf":
            continue
        named = f"model.hf_config.{key}"
        if key in ELSEWHERE:
            raise ConfigError(f"{named}={value}: no effect here; set {ELSEWHERE[key]}")
        if key not in names:
            remedy = did_you_mean(key, names) or "see transformers' documentation"
            raise ConfigError(f"{named}: {type(shape).__name__} has no such key; {remedy}")
        _require_one_spelling(config, key, value)
        if key in IDLE:
            raise ConfigError(f"{named}={value}: no effect on what is trained; leave it out")
        if RANDOMNESS.search(key) and value:
            problem = "forward passes have no randomness here, so that engines can be compared"
            raise ConfigError(f"{named}={value}: {problem}; leave it out")


def _require_one_spelling(config: ModelConfig, key: str, value: Any) -> None:
    """Raise ConfigError for a key of rotary positions beside one that transformers takes in its place."""
    if key in (ROPE, "rope_scaling"):
        _require_one_method(f"model.hf_config.{key}", value)
    other = "rope_scaling" if key == ROPE else ROPE
    if key in (ROPE, *SPELT_APART) and shape_of(config).get(other):
        remedy = f"set it in model.hf_config.{ROPE}"
        if key == ROPE:
            remedy = f"set model.hf_config.rope_theta or {other}"
        raise ConfigError(f"model.hf_config.{key}={value}: no effect beside {other}; {remedy}")


def _require_one_method(named: str, turns: Any) -> None:
    """Raise ConfigError for two methods in one dict, also of one type of layer: transformers takes `rope_type`."""
    if not isinstance(turns, dict):
        return
    method, other = turns.get("rope_type"), turns.get("type")
    if None not in (method, other) and method != other:
        problem = f"no effect beside rope_type={method}"
        raise ConfigError(f"{named}.type={other}: {problem}; set {named}.rope_type")
    for key, each in turns.items():
        _require_one_method(f"{named}.{key}", each)


def check_shape(shape: PreTrainedConfig) -> None:
    """Raise ConfigError for numbers of which a model can be built but not computed."""

    def wrong(key: str, problem: str) -> None:
        raise ConfigError(f"model.hf_config.{key}={of[key]}: {problem}")

    of: dict[str, Any] = {key: getattr(shape, key, None) for key in (*SIZES, PAD)}
    for key in SIZES:
        if of[key] is not None and (type(of[key]) is not int or of[key] < 1):
            wrong(key, "no whole number above 0; use one")
    heads, groups = of["num_attention_heads"], of["num_key_value_heads"]
    experts, turns = of["num_local_experts"], getattr(shape, "rope_parameters", None)
    if groups and heads % groups:
        problem = f"does not divide num_attention_heads={heads}; use one that does"
        wrong("num_key_value_heads", problem)
    if turns and (of["head_dim"] or of["hidden_size"] // heads) % 2:
        wrong("num_attention_heads", "a head has an odd number of dimensions; use fewer heads")
    if experts and of["num_experts_per_tok"] > experts:
        wrong("num_experts_per_tok", f"there are {experts} experts; use at most as many")
    if of[PAD] is not None and not 0 <= of[PAD] < of["vocab_size"]:
        wrong(PAD, f"no word of model.hf_config.vocab_size={of['vocab_size']}; use one")


def keys_trained_by(published: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what decides how the model of a config.json is trained, its padding included, by transformers' class.

    Every key of a config that transformers does not take, or whose layers have sizes of their own (RuntimeError).
    """
    try:
        shape = AutoConfig.for_model(**published)
        keys = effective_keys(shape)
    except (StrictDataclassError, ValueError, TypeError, KeyError, RuntimeError):
        return published
    return {"model_type": shape.model_type, PAD: getattr(shape, PAD, None), **keys}


def effective_keys(shape: PreTrainedConfig) -> dict[str, Any]:
    """Return the keys of the class that decide the function, flattened, with nulls replaced by their meaning."""
    names = set(type(shape)().to_dict())
    values = {
        key: value
        for key, value in shape.to_dict().items()
        if key in names - HARMLESS and not RANDOMNESS.search(key)
    }
    width, heads = (getattr(shape, key, None) for key in ("hidden_size", "num_attention_heads"))
    if "head_dim" in values and width and heads:
        values["head_dim"] = values["head_dim"] or width // heads
    if "n_inner" in values and width:
        values["n_inner"] = values["n_inner"] or 4 * width
    values["rope_parameters"] = values.get("rope_parameters") or {}
    return {name: leaf for key, value in values.items() for name, leaf in _leaves(key, value)}


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of a key, which may itself be a config, that decide the function."""
    if not isinstance(value, dict):
        yield key, value
        return
    for inner, each in value.items():
        if inner not in HARMLESS and not RANDOMNESS.search(str(inner)):
            yield from _leaves(f"{key}.{inner}", each)
