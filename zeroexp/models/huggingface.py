"""Build the models of transformers, as causal language models or with a classification head."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, _meta_registrations, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    masking_utils,
)
from transformers.integrations import moe
from transformers.utils import logging

from zeroexp.config.families import shape_of, vocab_size_of_shape
from zeroexp.config.keys import ConfigError, ModelConfig
from zeroexp.interface.values import Values
from zeroexp.models import find_weights, huggingface_weights_check
from zeroexp.models.deferred import Drawn
from zeroexp.models.huggingface_keys import RANDOMNESS, check_keys, check_shape
from zeroexp.models.huggingface_weights_read import Stored
from zeroexp.registry.did_you_mean import did_you_mean

# These keys of a config.json are arguments of ours, or say what nobody here reads.
OURS = {
    *("model_type", "use_cache", "dtype", "torch_dtype", "id2label", "label2id", "num_labels"),
    "_attn_implementation",
}
LOOK_AHEAD = ("cpmant",)  # without a mask of their own, and with nothing that says so
DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
SEARCH = masking_utils.find_packed_sequence_indices
TASKS = {
    "causal": AutoModelForCausalLM,
    "classification": AutoModelForSequenceClassification,
}


def build(config: ModelConfig, vocab_size: int | None) -> nn.Module:
    """Build the model, with random weights and a vocabulary of `vocab_size`, in float32 and training mode."""
    if architecture(config) == "xlnet":
        problem = "looks ahead, and as a classifier reads the last position, where ours are padded"
        raise ConfigError(f"model_type=xlnet: {problem}; use another architecture")
    shape = _shape(config, vocab_size)
    module = _from_config(config, shape)
    if config.task == "causal" and (
        architecture(config) in LOOK_AHEAD or _looks_ahead(shape, module)
    ):
        problem = f"{architecture(config)} looks ahead, at the words that it is to predict"
        raise ConfigError(
            f"model.task=causal: {problem}; use a decoder, or model.task=classification"
        )
    return _make_deterministic(config, module)


def _looks_ahead(shape: PreTrainedConfig, module: nn.Module) -> bool:
    """Tell whether attention reaches later words: by the layers of an encoder, as BERT's, or by the config's word."""
    if any(getattr(each, "is_decoder", None) is False for each in module.modules()):
        return True
    shapes = (shape, shape.get_text_config())  # as embedders have it that were made of decoders
    return any(
        getattr(each, "is_causal", None) is False
        or getattr(each, "use_bidirectional_attention", None) in (True, "all")
        for each in shapes
    )


def _from_config(config: ModelConfig, shape: PreTrainedConfig) -> nn.Module:
    """Build the model; transformers takes PyTorch's fused attention, or the architecture's own where it has none."""
    try:
        return TASKS[config.task].from_config(shape, dtype=torch.float32)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0]
        problem = f"transformers builds no {config.task} model of {architecture(config)} ({reason})"
        raise ConfigError(
            f"model.task={config.task}: {problem}; use another task or model"
        ) from error


def _make_deterministic(config: ModelConfig, module: nn.Module) -> nn.Module:
    """Switch off randomness, and show the padding to a classifier whose attention may look ahead.

    Position ids are searched for several sequences in a sample only where the data give them: transformers searches its
    own too, and reads what it found, for which the host would wait until a GPU has done all that it was given.
    """
    for each in module.modules():
        if isinstance(each, DROPOUTS):
            each.p = 0.0
    if config.family == "hf" and config.task == "classification":
        module.register_forward_pre_hook(_mask_padding, with_kwargs=True)
    module.register_forward_pre_hook(_leave_out_search, with_kwargs=True)
    module.register_forward_hook(_search_again, always_call=True)
    return module.train()


def _leave_out_search(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("position_ids") is None:
        masking_utils.find_packed_sequence_indices = lambda position_ids: None


def _search_again(*_: Any) -> None:
    masking_utils.find_packed_sequence_indices = SEARCH


def _mask_padding(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if "attention_mask" in kwargs or "input_ids" not in kwargs:
        return args, kwargs
    mask = (kwargs["input_ids"] != module.config.pad_token_id).long()
    return args, {**kwargs, "attention_mask": mask}


def architecture(config: ModelConfig) -> str:
    """Return what transformers calls the model: its `model_type`."""
    return str(shape_of(config)["model_type"]) if config.family == "hf" else config.family


@contextlib.contextmanager
def patched_for_fake_tensors() -> Iterator[None]:
    """Let models run where there are no values.

    Of a mask transformers asks whether it can be left out, but not where it is traced. Fused experts multiply by
    torch's grouped product, which tells the shapes of bfloat16 alone; every position goes to the same number of
    experts, so no size depends on which they are.
    """
    is_traced, asks = masking_utils.is_tracing, moe._can_use_grouped_mm
    checks = _meta_registrations._meta_grouped_mm_common
    masking_utils.is_tracing = lambda *_: True
    moe._can_use_grouped_mm = lambda *_: True
    _meta_registrations._meta_grouped_mm_common = _grouped_product
    try:
        yield
    finally:
        masking_utils.is_tracing, moe._can_use_grouped_mm = is_traced, asks
        _meta_registrations._meta_grouped_mm_common = checks


def _grouped_product(first: Tensor, second: Tensor, *, offs: Tensor, **further: Any) -> Tensor:
    """Return a tensor of the product's shape; torch's own function refuses other dtypes before that."""
    made = _meta_registrations._create_grouped_mm_output_tensor
    return made(first, second, offs, further["out_dtype"])


def _refused_shape(error: Exception, config: ModelConfig) -> str:
    """Say what transformers has against a shape: of one key, or of several that do not fit each other."""
    cause = error.__cause__ if isinstance(error, StrictDataclassError) else None
    reason = " ".join(str(cause or error).split()).rstrip(".")
    if field := re.search(r"for field '(\w+)'", str(error)):
        value = shape_of(config).get(field[1])
        return f"model.hf_config.{field[1]}={value}: {reason}; use a value of that type"
    whose = f"model.hf_config of model.name={config.name}"
    return f"{whose}: {reason}; give it values that fit each other"


def _shape(config: ModelConfig, vocab_size: int | None) -> PreTrainedConfig:
    """Build transformers' config, without key-value cache and without randomness in forward."""
    kind = architecture(config)
    if kind not in CONFIG_MAPPING:
        remedy = did_you_mean(kind, CONFIG_MAPPING) or "use one that it has"
        raise ConfigError(f"model_type={kind}: transformers has no such architecture; {remedy}")
    check_keys(config, kind)
    keys = {key: value for key, value in shape_of(config).items() if key not in OURS}
    if "num_hidden_layers" in config.hf_config and "layer_types" not in config.hf_config:
        keys.pop("layer_types", None)  # the published list is of the published length
    if vocab_size is not None:
        keys["vocab_size"] = vocab_size
    if config.task == "classification":
        # The head reads the last token that is not padding, so it must know the padding id.
        if keys.get("pad_token_id") is None:
            keys["pad_token_id"] = 0
        keys = {**keys, "num_labels": config.num_labels}
    _keep_quiet()
    try:
        shape = AutoConfig.for_model(kind, use_cache=False, **keys)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(_refused_shape(error, config)) from error
    if not isinstance(getattr(shape, "vocab_size", None), int):
        problem = "a model of several parts, which takes more than tokens"
        raise ConfigError(f"model_type={kind}: {problem}; use the model of its text alone")
    if config.family != "hf":  # elsewhere a number of the same name may mean something else
        check_shape(shape)
    for key, value in shape.to_dict().items():
        if (
            RANDOMNESS.search(key)
            and isinstance(value, int | float)
            and not isinstance(value, bool)
        ):
            setattr(shape, key, 0.0)
    return shape


def require_fitting_weights(config: ModelConfig, folder: Path) -> None:
    """Raise ConfigError unless `folder` holds the weights of exactly this model; no values are read.

    If the data decides the model's vocabulary size, the weights' size is assumed.
    """
    words = vocab_size_of_shape(config) or huggingface_weights_check.vocab_size_of(config, folder)
    with torch.device("meta"):
        module = build(config, words)
    huggingface_weights_check.require_fitting(config, folder, module)


def stored(config: ModelConfig, module: nn.Module, drawn: Drawn | None) -> Values:
    """Return the weights that `config.weights` names, and fill in the saved buffers of `module`.

    Its parameters may be on meta. A head that is missing in the weights is `drawn`, or stays as the module has it.
    Raises ConfigError unless they are the weights of exactly this model.
    """
    assert config.weights is not None
    folder = find_weights.model_folder(config.weights)
    _keep_quiet()
    headers = huggingface_weights_check.require_fitting(config, folder, module)
    values = Stored(module, headers, drawn)
    values.fill_buffers()
    return values


def _keep_quiet() -> None:
    """Silence transformers: its warnings and load report repeat our checks, or concern generation."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
