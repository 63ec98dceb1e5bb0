"""Write a model as a folder that transformers loads: safetensors, config.json, generation_config.json, tokenizer.

    weight 1, 2, ... ─▶ rounded to the dtype ─▶ names and cuts of the published format ─▶ one file ─▶ the next file

Only one file's tensors are in memory at a time. The plan of which tensors share a file is made before any tensor is
read, of what is published together: a fused tensor that the published format cuts up (Mixtral's experts) stays in one
file with all its parts, and so do tensors that it joins.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig

from zeroexp.config.families import MODELS
from zeroexp.config.keys import ConfigError, ModelConfig
from zeroexp.config.vocabulary import TokenizerChoice
from zeroexp.interface.module_buffers import persistent_buffers
from zeroexp.models.huggingface_tensor_names import publish, published_together, saved_tensors
from zeroexp.models.module import build_empty

INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)

Shapes = Mapping[str, tuple[int, ...]]


def write(
    folder: Path,
    config: ModelConfig,
    shapes: Shapes,
    read: Callable[[str], Tensor],
    *,
    dtype: torch.dtype,
    max_shard_size: str,
    tokenizer: TokenizerChoice | None,
    labels: Sequence[Any] | None = None,
) -> None:
    """Fill the empty `folder`. `read` returns a parameter or buffer by its name in `shapes`; each is read once.

    Weights are rounded to `dtype` to the nearest, ties to even; float32 is exact. Buffers keep their dtypes.
    `max_shard_size` is written as in transformers: 5GB, 500MB. labels: what the classes are called, in their order.
    Raises OSError, and ConfigError if transformers does not have the model or the parameters differ.
    """
    module = empty_model(config, shapes)
    as_saved = {name: buffer.dtype for name, buffer in persistent_buffers(module).items()}
    dtypes = {name: as_saved.get(name, dtype) for name in shapes}
    if labels is not None and list(labels) != list(range(len(labels))):
        module.config.id2label = {number: str(name) for number, name in enumerate(labels)}
        module.config.label2id = {name: number for number, name in module.config.id2label.items()}
    _write_weights(folder, module, read, dtypes, max_shard_size)
    module.config.architectures = [type(module).__name__]
    module.config.dtype = dtype
    module.config.use_cache = True  # it is off only in training
    if tokenizer is not None:
        _write_tokenizer(folder, module, tokenizer)
    module.config.save_pretrained(folder)
    if config.task == "causal":
        GenerationConfig.from_model_config(module.config).save_pretrained(folder)


def empty_model(config: ModelConfig, shapes: Shapes) -> Any:
    """Build the model without memory. Raises ConfigError for one that transformers does not have or has otherwise."""
    if not MODELS[config.family].of_transformers:
        use = f"export a run of {', '.join(n for n in MODELS.own if MODELS[n].of_transformers)}"
        raise ConfigError(f"model.family={config.family}: transformers has no such model; {use}")
    module: Any = build_empty(config, shapes).module
    require_same(module, shapes)
    return module


def require_same(module: nn.Module, shapes: Shapes) -> None:
    """Raise ConfigError where the model, as it is built here, has other tensors than the checkpoint."""
    expected = {name: tuple(tensor.shape) for name, tensor in saved_tensors(module).items()}
    for name in (*expected, *shapes):
        if expected.get(name) != shapes.get(name):
            difference = f"{name} is {shapes.get(name)} in it, {expected.get(name)} here"
            remedy = (
                "export it with the versions of its plugins and of transformers that trained it"
            )
            raise ConfigError(f"the checkpoint's model: {difference}; {remedy}")


def _write_weights(
    folder: Path,
    module: Any,
    read: Callable[[str], Tensor],
    dtypes: Mapping[str, torch.dtype],
    max_shard_size: str,
) -> None:
    groups = {next(iter(group.shapes)): group for group in published_together(module)}
    sizes = {
        name: torch.empty(group.numel, dtype=dtypes[name], device="meta")
        for name, group in groups.items()
    }
    plan = _plan(sizes, max_shard_size)
    file_of: dict[str, str] = {}
    for file, firsts in plan.filename_to_tensors.items():
        names = [name for first in firsts for name in groups[first].shapes]
        tensors = {name: read(name).to(dtypes[name]) for name in names}
        file_of.update((name, file) for name in _write_file(folder / file, module, tensors))
        del tensors  # frees memory before the next file's tensors are read
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": dict(sorted(file_of.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(path: Path, module: nn.Module, tensors: dict[str, Tensor]) -> list[str]:
    """Write one file and return the published names of its tensors."""
    published = publish(module, tensors)
    published = {name: tensor.contiguous() for name, tensor in published.items()}
    try:
        save_file(published, path, metadata={"format": "pt"})
    except SafetensorError as error:  # safetensors wraps the system's OSError
        raise OSError(None, str(error), path) from error
    return list(published)


def _plan(sizes: dict[str, Tensor], max_shard_size: str) -> Any:
    try:
        return split_torch_state_dict_into_shards(sizes, max_shard_size=max_shard_size)
    except ValueError as error:
        remedy = "use a number and its unit, for example 5GB"
        raise ConfigError(f"--max-shard-size={max_shard_size}: no size; {remedy}") from error


def _write_tokenizer(folder: Path, module: Any, tokenizer: TokenizerChoice) -> None:
    """Copy the tokenizer's files byte for byte; special tokens without a role in them get their roles in training."""
    for name in TOKENIZER_FILES:
        if (tokenizer.file.parent / name).is_file():
            shutil.copyfile(tokenizer.file.parent / name, folder / name)
    words = {row["id"]: row["content"] for row in _json(tokenizer.file)["added_tokens"]}
    end = words.get(tokenizer.end_of_text)
    beside = tokenizer.file.with_name("config.json")
    ids = _json(beside) if beside.is_file() else {}
    for key in ("bos_token_id", "eos_token_id"):
        setattr(module.config, key, ids.get(key, tokenizer.end_of_text))
    if not (folder / "tokenizer_config.json").exists():
        content = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": end,
            "eos_token": end,
            "pad_token": words.get(tokenizer.padding),
            "clean_up_tokenization_spaces": False,
        }
        longest = getattr(module.config, "max_position_embeddings", None)
        if longest is not None:  # Mamba and BLOOM name none
            content["model_max_length"] = longest
        (folder / "tokenizer_config.json").write_text(
            json.dumps(content, indent=2) + "\n", encoding="utf-8"
        )


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
